"""A draft model that is broken is named: at start, and while serving. Text that nobody can guess is not called a fault."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mtpserve.config import CacheConfig, EngineConfig, ModelConfig, SpecConfig
from mtpserve.core.request import Finish, Proposal, Request
from mtpserve.core.sampling import SamplingParams
from mtpserve.core.state.request_state import RequestState
from mtpserve.engine.depth import watchdog
from mtpserve.engine.depth.depth_config import WATCHDOG_CONFIG
from mtpserve.engine.depth.watchdog import Watchdog
from mtpserve.engine.engine import Engine
from mtpserve.engine.startup.build import build_engine
from mtpserve.engine.startup.start import try_out
from mtpserve.engine.steps import RequestEvent, event_of
from tests.runtime.recorders import draft_one_by_one
from tests.tiny import run, tiny_engine, tiny_model

DEEP = 3


class ScriptedEngine:
    """Without a model: `healthy` says whether the head is, or which share of its drafts, `easy` whether clients' texts can be drafted. A
    step takes 10 ms."""

    context_length = 100

    def __init__(self, clients: int = 8, seats: int = 20) -> None:
        self.healthy, self.easy = 1.0, True
        self.now, self.seats, self.resets = 0.0, seats, 0
        self.watch = Watchdog(DEEP, vocab=60, clock=lambda: self.now)
        self.running = [RequestState(Request(f"client {i}", [1], SamplingParams()), [1], 10**9) for i in range(clients)]
        self.waiting: list[RequestState] = []
        self.policy, self.forgotten = self, 0
        self.wanted: list[int] = []  # of all steps
        self.source = "mtp"

    @property
    def has_work(self) -> bool:
        return any(self.watch.is_self_check(req.id) for req in (*self.running, *self.waiting))

    def add(self, request: Request, compiled: bool = False) -> None:
        assert self.watch.is_self_check(request.id) and request.sampling.greedy
        assert request.sampling.max_tokens is not None
        self.waiting.append(RequestState(request, list(request.prompt), 1 + request.sampling.max_tokens))

    def abort(self, request_id: str) -> None:
        self.running = [req for req in self.running if req.id != request_id]
        self.waiting = [req for req in self.waiting if req.id != request_id]

    def reset_prefix_cache(self) -> None:
        self.resets += 1

    def forget(self) -> None:
        self.forgotten += 1

    def step(self) -> None:
        self.now += 0.01
        self.watch.before_step(self)
        draft_depth = self.watch.limit_drafts(self.running, 0 if self.watch.suspended else DEEP)
        while self.waiting and len(self.running) < self.seats:
            self.running.append(self.waiting.pop(0))
        self.wanted.append(draft_depth)
        events = list[RequestEvent]()
        for req in self.running:
            drafts = draft_depth if req.draft.max_draft_tokens is None else min(draft_depth, req.draft.max_draft_tokens)
            hit = 0.618 * len(req.tokens) % 1 < self.healthy and (self.easy or self.watch.is_self_check(req.id))
            path = list(range(1, drafts + 1)) if hit else []
            req.tokens += [1] * (1 + len(path))
            req.finish = Finish.LENGTH if len(req.tokens) >= req.max_num_tokens else None
            events.append(event_of(req, [], proposal=Proposal([7] * drafts, list(range(drafts)), [self.source] * drafts, path)))
        self.running = [req for req in self.running if req.finish is None]
        assert all(event.id.startswith("client") for _, event in self.watch.client_events(events))

    def run(self, seconds: float, until: Callable[[], bool] = lambda: False) -> float:
        """→ the seconds that it took."""
        began = self.now
        while self.now < began + seconds and not until():
            self.step()
        return self.now - began


def started(**options: Any) -> ScriptedEngine:
    engine = ScriptedEngine(**options)
    clients, engine.running = engine.running, []
    engine.watch.start(engine)
    engine.running = clients
    return engine


def test_a_healthy_head_is_never_suspended() -> None:
    engine = started()
    assert engine.watch.health.start == 1.0 and engine.watch.health.state == "ok"
    engine.run(20)
    assert engine.watch.health.faults_total == 0 and set(engine.wanted) == {DEEP}
    assert len(engine.running) == 8, "nothing is tried out where there is no doubt"


@pytest.mark.parametrize("clients", [1, 8])
def test_a_broken_head_is_named_and_comes_back(clients: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    engine = started(clients=clients)
    engine.run(2)
    engine.healthy = 0.0
    assert engine.run(10, lambda: engine.watch.suspended) < 2
    named = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert len(named) == 1 and "all of them are token 7" in named[0] and engine.watch.health.reason in named[0]
    engine.run(20)
    assert set(engine.wanted[-1000:]) == {0} and len(engine.running) == clients
    engine.run(WATCHDOG_CONFIG.retry_interval_s)
    assert engine.watch.suspended and DEEP in engine.wanted[-2000:], "tried again"
    engine.healthy = 1.0
    engine.run(3 * WATCHDOG_CONFIG.retry_interval_s, lambda: not engine.watch.suspended)
    assert engine.watch.health.state == "ok" and engine.watch.health.faults_total == 1
    assert (engine.resets, engine.forgotten) == (1, 1)
    engine.run(1)
    assert set(engine.wanted[-50:]) == {DEEP} and all(req.draft.max_draft_tokens is None for req in engine.running)
    assert "works again" in caplog.records[-1].message
    assert sum("DOES NOT WORK" in record.message for record in caplog.records) == 1


def test_a_head_that_gets_worse_is_named_and_drafts_on(caplog: pytest.LogCaptureFixture) -> None:
    """0.75 before and 0.3 after: not as bad as a head that is broken, and not text that is hard."""
    engine = ScriptedEngine()
    engine.healthy = 0.75
    clients, engine.running = engine.running, []
    engine.watch.start(engine)
    engine.running = clients
    engine.run(2)
    engine.healthy = 0.3
    assert engine.run(30, lambda: engine.watch.health.state != "ok") < 10
    engine.run(200)
    health = engine.watch.health
    assert health.state == "weak" and health.faults_total == 1 and set(engine.wanted[-50:]) == {DEEP}
    assert "drafts on" in health.reason and sum("DOES NOT WORK" in record.message for record in caplog.records) == 1
    engine.healthy = 0.75
    engine.run(100, lambda: engine.watch.health.state == "ok")
    assert engine.watch.health.state == "ok" and health.faults_total == 1


def test_the_back_off_doubles_up_to_its_end() -> None:
    engine = started(clients=2)
    engine.run(1)
    engine.healthy = 0.0
    engine.run(10, lambda: engine.watch.suspended)
    tried = [engine.now]
    while len(tried) < 9:
        engine.run(2 * WATCHDOG_CONFIG.max_retry_interval_s, lambda: bool(engine.watch._self_check))
        tried.append(engine.now)
        engine.run(WATCHDOG_CONFIG.max_retry_interval_s, lambda: not engine.watch._self_check)
    waits = [after - before for before, after in pairwise(tried)]
    assert waits == pytest.approx([30, 60, 120, 240, 480, 600, 600, 600], abs=1.5)


def test_hard_text_is_no_fault() -> None:
    """One client's random tokens, or everybody's: what the model says by itself is drafted as ever."""
    engine = started()
    engine.run(1)
    engine.easy = False
    engine.run(120)
    assert engine.watch.health.faults_total == 0 and set(engine.wanted) == {DEEP}
    tried = []
    engine.run(120, lambda: tried.append(engine.has_work) is not None)
    assert sum(tried) < 0.05 * len(tried), "and being sure of that costs little"
    engine.healthy = 0.0
    assert engine.run(100, lambda: engine.watch.suspended) < 61


def test_a_head_that_breaks_soon_after_a_doubt_is_named_within_ten_seconds() -> None:
    engine = started()
    engine.run(1)
    engine.easy = False
    engine.run(0.5)
    engine.easy, engine.healthy = 1.0, False
    assert engine.run(10, lambda: engine.watch.suspended) < WATCHDOG_CONFIG.doubt_interval_s + 1


@pytest.mark.parametrize(("clients", "named"), [(8, True), (7, False)])
def test_without_a_seat_many_requests_decide(clients: int, named: bool) -> None:
    engine = started(clients=clients)
    engine.run(1)
    engine.seats, engine.healthy = clients, 0.0
    seconds = engine.run(30, lambda: engine.watch.suspended)
    assert engine.watch.suspended is named
    if named:
        assert WATCHDOG_CONFIG.seat_wait_s < seconds < 10 and clients * 100 * seconds > WATCHDOG_CONFIG.min_client_verifications


def test_drafts_of_other_sources_are_not_counted() -> None:
    engine = started()
    engine.run(1)
    engine.healthy, engine.source = 0.0, "grammar"
    engine.run(60)
    assert engine.watch.health.faults_total == 0 and engine.watch._window.verified < WATCHDOG_CONFIG.window_verifications


def test_a_slow_model_starts_untried() -> None:
    engine = ScriptedEngine(clients=0)
    engine.watch.clock = iter(range(10_000)).__next__  # a second from one look to the next
    engine.watch.start(engine)
    assert engine.watch.health.state == "unmeasured" and engine.watch.health.start is None


def test_nothing_to_watch() -> None:
    engine = started()
    engine.watch = Watchdog()
    engine.watch.start(engine)
    engine.run(5)
    assert engine.watch.health.state == "off"


# ---------------------------------------------------------------------------------------------------------- engines

CHAIN, TREE = {}, {"speculative_eagle_topk": 2, "speculative_num_draft_tokens": 6}
GREEDY = SamplingParams(max_tokens=48, temperature=0, ignore_eos=True)


def demo(directory: Path | None = None, adaptive: bool = True, **spec: Any) -> Engine:
    asked = SpecConfig(speculative_algorithm="NEXTN", speculative_num_steps=DEEP, speculative_adaptive=adaptive, **spec)
    model = ModelConfig() if directory is None else ModelConfig(model=str(directory))
    return build_engine(EngineConfig(model=model, cache=CacheConfig(max_total_tokens=8192), spec=asked))


def damage(engine: Engine, how: str) -> Callable[[], None]:
    """In the draft layer's output. → what undoes it."""
    draft_one_by_one(engine)
    head: Any = engine.runner.step.model.mtp_head  # type: ignore[attr-defined]
    own = head.extend, head.step

    def broken(passes: Callable[..., Any]) -> Callable[..., Any]:
        calls = count()

        def call(*arguments: Any) -> Any:
            made = passes(*arguments)
            often = made.head * 0 if next(calls) % 3 else made.head
            bad = {"zeros": made.head * 0, "nan": made.head * torch.nan, "shuffled": made.head.flip(-1), "often zeros": often}[how]
            return type(made)(bad, made.features)

        return call

    head.extend, head.step = map(broken, own)

    def repair() -> None:
        head.extend, head.step = own

    return repair


def serve(engine: Engine, steps: int, until: Callable[[], bool] = lambda: False) -> int:
    """Eight requests at a time, of other prompts each time → the steps that were made."""
    made = 0
    while made < steps and not until():
        if not engine.has_work:
            for i in range(8):
                engine.add(Request(f"{made} {i}", [(31 * made + 101 * i + j) % 2000 for j in range(6)], GREEDY))
        assert all(event.error is None and " " in event.id and "check" not in event.id for event in engine.step())
        made += 1
    return made


@pytest.mark.parametrize(
    ("how", "shape", "adaptive"),
    [
        ("zeros", CHAIN, True),
        ("nan", CHAIN, False),
        ("shuffled", TREE, True),
        pytest.param("zeros", TREE, False, marks=pytest.mark.thorough),
    ],
)
def test_a_head_that_breaks_while_serving(how: str, shape: dict[str, Any], adaptive: bool, caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    engine = demo(adaptive=adaptive, **shape)
    engine.watchdog.clock = lambda: now[0]
    if engine.policy is not None:  # drafting that works is worth its time on any machine
        engine.policy.times.seconds = lambda work: 0.001 * (1 + 0.02 * work.passes)  # type: ignore[method-assign]
    try_out(engine)
    health = engine.stats.draft_health
    assert health.state == "ok" and health.start is not None and health.start > 0.4
    assert engine.stats.drafts_total == 0 and engine.stats.pages_used == engine.stats.pages_cached == 0
    serve(engine, 25)
    assert health.faults_total == 0
    repair = damage(engine, how)
    steps = serve(engine, 600, lambda: health.state == "suspended")
    assert health.state == "suspended" and health.faults_total == 1, f"not named in {steps} steps"
    assert "DOES NOT WORK" in caplog.text and ("token" in health.reason) is (how != "shuffled")
    before = engine.stats.drafts_total
    serve(engine, 60)
    assert engine.stats.drafts_total <= before + 16, "what was in flight"
    repair()
    now[0] += WATCHDOG_CONFIG.retry_interval_s + 1
    assert serve(engine, 200, lambda: health.state == "ok") < 100
    before = engine.stats.drafts_total
    serve(engine, 60)
    assert engine.stats.drafts_total > before and health.faults_total == 1
    while engine.has_work:
        engine.step()
    engine.check_integrity()


def test_a_head_that_gets_worse_while_serving() -> None:
    """Two of three of its outputs are zero."""
    engine = demo(adaptive=False)
    engine.watchdog.clock = lambda: 0.0
    try_out(engine)
    health = engine.stats.draft_health
    damage(engine, "often zeros")
    serve(engine, 600, lambda: health.state != "ok")
    assert health.state == "weak" and health.faults_total == 1 and "drafts on" in health.reason


def test_texts_are_the_same_through_all_of_it() -> None:
    # At a fixed depth: on a busy machine drafting may not be worth its time, and what is not drafted shows no fault.
    engine = demo(adaptive=False)
    engine.watchdog.clock = lambda: 0.0
    try_out(engine)
    prompts = [[(101 * i + j) % 2000 for j in range(6)] for i in range(8)]
    long = SamplingParams(max_tokens=150, temperature=0, ignore_eos=True)
    plain = run(engine, prompts, long)
    engine.reset_prefix_cache()
    damage(engine, "zeros")
    assert run(engine, prompts, long) == plain
    assert engine.stats.draft_health.state == "suspended"


def test_a_checkpoint_whose_draft_layer_is_random_is_named_at_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = Path(shutil.copytree(ModelConfig().directory, tmp_path / "random"))
    generator, changed = torch.Generator().manual_seed(0), 0
    layers = engine_layers(directory)
    for file in directory.glob("*.safetensors"):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if f"layers.{layers}." in name and tensor.dim() == 2 and tensor.is_floating_point():
                tensors[name] = (torch.randn(tensor.shape, generator=generator) * tensor.shape[1] ** -0.5).to(tensor.dtype)
                changed += 1
        save_file(tensors, file, {"format": "pt"})
    assert changed > 3
    engine = demo(directory)
    engine.watchdog.clock = lambda: 0.0
    try_out(engine)
    health = engine.stats.draft_health
    assert health.state == "weak" and health.start is not None and health.start < 0.2 and health.faults_total == 1
    (said,) = [record.message for record in caplog.records if record.name == watchdog.__name__]
    (count,) = re.findall(r"of (\d+) verifications", said)
    assert "DOES NOT WORK" in said and int(count) >= WATCHDOG_CONFIG.window_verifications
    assert "40 %" in said and "--speculative-draft-model-path" in said
    serve(engine, 30)
    assert health.faults_total == 1 and health.state == "weak", "named once; it drafts on, where that is asked for"


def engine_layers(directory: Path) -> int:
    return int(json.loads((directory / "config.json").read_text())["num_hidden_layers"])


@pytest.mark.parametrize("floor", [None, 0.4])
def test_a_tiny_models_head_is_weak(floor: float | None) -> None:
    engine = tiny_engine(tiny_model(), 2, floor=floor)
    engine.watchdog.clock = lambda: 0.0
    try_out(engine)
    assert engine.stats.draft_health.state == ("off" if floor is None else "weak")
    assert engine.stats.pages_cached == engine.stats.draft_tokens_total == 0


def test_nothing_is_watched_where_acceptance_is_synthetic_or_n_grams_draft() -> None:
    assert tiny_engine(tiny_model(), 2, floor=0.4, rates=[0.5, 0.5]).watchdog.health.state == "off"
    ngram = SpecConfig(speculative_algorithm="NGRAM", speculative_num_steps=2)
    assert tiny_engine(tiny_model(), ngram, floor=0.4).watchdog.health.state == "off"
