"""An engine without a model, for the tests of what surrounds it: tokens that count up, with drafts among them, no torch.

`python -m tests.server.fake_engine` serves it as `mtpserve launch` does, with its options; FAKE_ENGINE selects a fault.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace

from mtpserve.cli.launch import parser
from mtpserve.cli.options import parsed_values, settings
from mtpserve.config import EngineConfig
from mtpserve.core.errors import ConfigError, InvalidRequest, LoadError, MTPServeError, QueueFull
from mtpserve.core.plan import NOTHING_ALLOWED
from mtpserve.core.protocols.control import (
    ContinueGeneration,
    LoadLoRA,
    OnEveryRank,
    PauseGeneration,
    Reply,
    SetWeightVersion,
    Sleep,
    UnloadLoRA,
    UpdateWeights,
    WakeUp,
)
from mtpserve.core.request import Finish, FirstTokenTimes, ModelCard, Proposal, Request, TokenEvent, TokenLogprob
from mtpserve.core.sampling import GrammarSpec
from mtpserve.core.spec_sizes import SpecSizes
from mtpserve.core.stats.engine_stats import EngineStats
from mtpserve.core.stats.reports import SpecChange, SpecReport
from mtpserve.engine.depth.policy import DepthPolicy, report
from mtpserve.engine.parallel.ticks import Ticks
from mtpserve.engine.process.controls import Controls
from mtpserve.engine.process.core_share import CoreShare

FACTORY = "tests.server.fake_engine:build"
CONTEXT, VOCAB, STEPS, PAGES = 4096, 300, 2, 64
FIRST_TOKEN = 40  # tokens are FIRST_TOKEN, +1, … , below the vocabulary


class FakeEngine:
    """Two tokens a step and request, one of them an accepted draft of two. A step takes `pause` seconds."""

    def __init__(self, name: str, pause: float) -> None:
        self.card = ModelCard(name, VOCAB, CONTEXT, (1,), STEPS, page_size=16)
        self.stats = EngineStats(pages_total=PAGES, draft_tokens_per_position=[0, 0], accepted_tokens_per_position=[0, 0])
        self.stats.accept_lengths, self.stats.steps_per_depth = [0, 0, 0], [0, 0, 0]
        self.policy: DepthPolicy | None = DepthPolicy(SpecSizes(steps=STEPS, num_proposed=STEPS, written=STEPS), STEPS)
        self.stats.depths = self.policy.state
        self.pause, self.weight_version = pause, "default"
        self.live: dict[str, tuple[Request, int]] = {}
        self.ticks, self.cores, self.controls = Ticks(), CoreShare(), Controls()
        self.controls.add(SetWeightVersion, self.set_version)
        self.controls.add(UpdateWeights, self.update)
        self.controls.add(OnEveryRank, lambda call: Reply(values={"parameter": [0.5, 1.0], "checksums": {"a": "b"}}))
        self.updates: list[UpdateWeights] = []
        self.controls.add(LoadLoRA, self.load_lora)
        self.controls.add(UnloadLoRA, self.load_lora)
        self.lora_calls: list[LoadLoRA | UnloadLoRA] = []
        self.sleeps: list[Sleep | WakeUp] = []
        self.controls.add(PauseGeneration, self.set_paused)
        self.controls.add(ContinueGeneration, self.set_paused)
        self.controls.add(Sleep, self.set_sleeping)
        self.controls.add(WakeUp, self.set_sleeping)
        self.cache: set[int] = set()  # hashes of prompts up to the end of a page
        self.found: dict[str, int] = {}  # tokens in it, for each live request

    @property
    def has_work(self) -> bool:
        return bool(self.live) and not (self.stats.paused or self.stats.sleeping)

    @property
    def changes_idle(self) -> bool:
        return False

    def compile(self, spec: GrammarSpec | None) -> None:
        if spec is not None and spec.text.startswith("wait"):
            time.sleep(float(spec.text.removeprefix("wait ")))
        if spec is not None and spec.text == "bad":
            raise InvalidRequest("regex: it is bad", "regex")

    def add(self, request: Request, compiled: bool = False) -> None:
        if request.sampling.seed == 400:
            raise InvalidRequest("seed 400 is refused", "seed")
        if request.sampling.seed == 429:
            raise QueueFull("the queue is full")
        self.stats.prompt_tokens_total += len(request.prompt)
        self.found[request.id] = self._cached(request)
        self.stats.cached_prompt_tokens_total += self.found[request.id]
        self.live[request.id] = (request, len(request.prior_output_ids))
        self._gauge()

    def abort(self, request_id: str) -> None:
        self.live.pop(request_id, None)
        self._gauge()

    def close(self) -> None:
        pass

    def reset_prefix_cache(self) -> None:
        self.cache.clear()
        self._gauge()

    def set_spec(self, change: SpecChange) -> SpecReport:
        if self.policy is not None and change != SpecChange():
            self.policy.set(change)
        self.stats.depths = None if self.policy is None else self.policy.state
        return report(self.policy, self.card.speculative_steps, self.stats)

    def set_version(self, call: SetWeightVersion) -> Reply:
        if call.weight_version == "broken":
            raise RuntimeError("it broke")
        if call.weight_version == "bad":
            raise InvalidRequest("weight_version: it is bad", "weight_version")
        self.stats.weight_version = call.weight_version
        return Reply(values={"name": call.weight_version})

    def load_lora(self, call: LoadLoRA | UnloadLoRA) -> Reply:
        """It cannot read a path with `bad` in it."""
        self.lora_calls.append(call)
        is_bad = isinstance(call, LoadLoRA) and "bad" in call.request.lora_path
        return Reply("adapters/bad: peft_type must be LORA" if is_bad else "")

    def update(self, call: UpdateWeights) -> Reply:
        self.updates.append(call)
        return Reply(values={"waiting": [], "parameters": 1})

    def set_paused(self, call: PauseGeneration | ContinueGeneration) -> Reply:
        self.stats.paused = int(isinstance(call, PauseGeneration))
        return Reply()

    def set_sleeping(self, call: Sleep | WakeUp) -> Reply:
        self.sleeps.append(call)
        self.stats.sleeping = int(isinstance(call, Sleep))
        return Reply(values={"bytes": 1000})

    def fix_depth(self, steps: int) -> None:
        """As an engine that was started so."""
        self.card, self.policy, self.stats.depths = replace(self.card, speculative_steps=steps), None, None

    def settle(self) -> list[TokenEvent]:
        return []

    def step(self) -> list[TokenEvent]:
        time.sleep(self.pause)
        self.stats.steps_total += 1
        return [self._event(request, done) for request, done in list(self.live.values())]

    def pretend_tiers(self) -> None:
        """Statistics with tiers below the device: host memory, and a disk from which one page could not be read."""
        stats = self.stats
        stats.tier_pages, stats.tier_pages_total = {"host": 120}, {"host": 400}
        stats.loaded_pages, stats.dropped_pages_total = {"host": 30, "disk": 10}, 5
        stats.transfers_total = {"save": 150, "load": 40, "spill": 100, "fetch": 10}
        stats.transfer_bytes_total = {"save": 15_000_000, "load": 4_000_000, "spill": 10_000_000, "fetch": 1_000_000}
        stats.transfer_seconds_total = {"save": 0.0075, "load": 0.001, "spill": 0.02, "fetch": 0.004}
        stats.failed_transfers_total = {"fetch": 1}

    def check_alive(self) -> None:
        """Nothing can end."""

    def check_integrity(self) -> None:
        if self.stats.pages_used and not (self.stats.paused or self.stats.sleeping):
            raise AssertionError("pages in use while idle")

    def _gauge(self) -> None:
        self.stats.running = self.stats.pages_used = len(self.live)
        self.stats.pages_cached = len(self.cache)

    def _cached(self, request: Request) -> int:
        prompt, page = request.prompt, self.card.page_size
        columns = {end: hash((request.salt, *prompt[:end])) for end in range(page, len(prompt) + 1, page)}
        found = max((end for end, key in columns.items() if key in self.cache), default=0)
        self.cache |= set(columns.values())
        return min(found, len(prompt) - 1) if request.sampling.prompt_logprobs is None else 0

    def _event(self, request: Request, done: int) -> TokenEvent:
        seed = request.sampling.seed
        if seed == 666 and done >= 4:
            raise RuntimeError("the fake engine broke")
        if seed == 500 and done >= 4:
            self.abort(request.id)
            return TokenEvent(request.id, [], finish=Finish.ERROR, error="not a finite number")
        if seed == 401 and done >= 2:
            self.abort(request.id)
            return TokenEvent(request.id, [], finish=Finish.ERROR, error=f"{NOTHING_ALLOWED}: bad_words")
        room = min(request.sampling.max_tokens or CONTEXT, CONTEXT - len(request.prompt)) - done
        tokens = [FIRST_TOKEN + (done + i) % (VOCAB - FIRST_TOKEN) for i in range(min(2, room))]
        finish = Finish.LENGTH if room <= 2 else None
        self.live[request.id] = (request, done + len(tokens))
        if finish is not None:
            self.abort(request.id)
        self._count(len(tokens))
        accepted = len(tokens) - 1
        proposal = Proposal([tokens[0], 5], [0, 1], ["mtp", "prediction"], [1][:accepted])
        asked = request.sampling.logprobs
        scores = None if asked is None else [TokenLogprob(-0.5, 1, [(token, -0.5), (3, -2.0)][:asked]) for token in tokens]
        top = request.sampling.prompt_logprobs
        first = [TokenLogprob(-1.0, 2, [(7, -0.1)][:top]) for _ in request.prompt[1:]] if top is not None and done == 0 else None
        times = FirstTokenTimes(0.25, 0.5) if done == 0 else None
        return TokenEvent(request.id, tokens, accepted, proposal, finish, None, scores, first, times, self.found.pop(request.id, 0))

    def _count(self, tokens: int) -> None:
        stats = self.stats
        stats.generation_tokens_total += tokens
        stats.drafts_total += 1
        stats.draft_tokens_total += 2
        stats.accepted_tokens_total += tokens - 1
        stats.draft_tokens_per_position = [stats.drafts_total] * 2
        stats.accepted_tokens_per_position = [stats.accepted_tokens_total, 0]
        stats.accept_lengths[tokens - 1] += 1
        stats.steps_per_depth[STEPS] += 1
        stats.step_tokens = [count + (number == 1) for number, count in enumerate(stats.step_tokens or [0] * 14)]  # 2 to 8 tokens
        stats.step_tokens_total += tokens


def build(config: EngineConfig, *, progress: bool) -> FakeEngine:
    match os.environ.get("FAKE_ENGINE", ""):
        case "config":
            raise ConfigError("--fake must not be\ngiven")
        case "load":
            raise LoadError("model.safetensors: tensor 'x' is cut off")
        case "bug":
            raise RuntimeError("unexpected")
        case "slow":
            time.sleep(60)
    return FakeEngine((config.model.served_model_name or ("fake",))[0], float(os.environ.get("FAKE_PAUSE", "0.005")))


def main() -> int:
    from mtpserve.server.launch import serve

    try:
        chosen = settings({"port": 0, "drain_timeout": 10.0, "log_interval": 0.2} | parsed_values(parser().parse(sys.argv[1:])))
        return serve(chosen.engine, chosen.server, factory=FACTORY)
    except MTPServeError as error:
        print(f"mtpserve: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1


if __name__ == "__main__":
    sys.exit(main())
