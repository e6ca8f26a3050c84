"""In every round of a speculative run the drafts are those of a computation from scratch: no cache, no spans, transformers' layers."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from mtpserve.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, SpecConfig
from mtpserve.core.batch import Batch, Drafts, Hidden, VerifyOutput
from mtpserve.core.plan import StepPlan
from mtpserve.core.request import Request
from mtpserve.core.sampling import SamplingParams
from mtpserve.engine.engine import Engine
from mtpserve.engine.startup.build import build_engine
from mtpserve.runtime.runner import CAUGHT_UP, Runner
from mtpserve.spec import sizes
from mtpserve.spec.draft.chain import ChainDrafter
from mtpserve.spec.draft.combined import CombinedDrafter
from tests import selection
from tests.models.chained import step
from tests.models.checkpoints import YARN, Tiny, deepseek, glm4_moe, glm4_moe_lite, mimo
from tests.models.hybrids import nemotron_h, qwen3_5, qwen3_5_moe, qwen3_next
from tests.models.ling import ling
from tests.models.longcat import longcat
from tests.models.own_layouts import ernie, mimo_v2
from tests.models.sparse_checkpoints import deepseek_v32, glm_dsa
from tests.spec.diagonal import diagonal

STEPS = 4
LENGTHS = (2, 16, 9, 1)
DEFERRED, AT_ONCE = 16, 2


@pytest.fixture(autouse=True)
def few_rows_are_deferred(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that texts may be short, and of few requests at once."""
    monkeypatch.setattr(sizes, "DEFERRED", DEFERRED)
    monkeypatch.setitem(CAUGHT_UP, "cpu", AT_ONCE)


@dataclass(frozen=True)
class Round:
    """One request in one step."""

    ids: list[int]  # committed
    drafts: list[int]
    logits: Tensor  # [drafts, vocabulary], what each was drawn from
    greedy: bool


class Listener:
    """Stands in for the drafter and writes down what goes through it."""

    def __init__(self, drafter: ChainDrafter) -> None:
        self.drafter, self.model = drafter, drafter.passes.model
        for name in ("sizes", "coupled", "graph_safe", "features", "lag"):
            setattr(self, name, getattr(drafter, name))
        self.rounds: list[Round] = []
        self.logits: list[Tensor] = []

    def heard(self, head: Tensor, depth: int) -> Tensor:
        self.logits.append(self.model.logits(head, depth))
        return self.logits[-1]

    def store_deferred_kv(self, batch: Batch) -> None:
        self.drafter.store_deferred_kv(batch)

    def draft(self, batch: Batch, hidden: Hidden, verify_output: VerifyOutput) -> Drafts | None:
        self.logits = []
        model = self.model
        self.drafter.passes.model = SimpleNamespace(  # type: ignore[assignment]
            extend=model.extend, store_kv=model.store_kv, step=model.step, logits=self.heard, lag=model.lag, features=model.features,
            at_once=model.at_once, mask=model.mask,
        )  # fmt: skip
        drafts = self.drafter.draft(batch, hidden, verify_output)
        if drafts is not None:
            req_indices = batch.req_indices if batch.draft_spans is None else batch.req_indices[batch.draft_spans]
            logits = torch.stack(self.logits, 1)
            for i, req_idx in enumerate(req_indices.tolist()):
                ids = batch.req_tensors.tokens[req_idx, : batch.req_tensors.num_tokens[req_idx]].tolist()
                greedy = drafts.probs is None or bool((drafts.probs[i].amax(-1) == 1).all())
                self.rounds.append(Round(ids, drafts.tokens[i].tolist(), logits[i], greedy))
        return drafts


def engine_of(tiny: Tiny, budget: int, tokens: int, page_size: int, steps: int = STEPS, adaptive: bool = False) -> Engine:
    return build_engine(
        EngineConfig(
            model=ModelConfig(model=str(tiny.directory), device="cpu", dtype="float32"),
            cache=CacheConfig(page_size=page_size, max_total_tokens=tokens),
            spec=SpecConfig(speculative_algorithm="NEXTN", speculative_adaptive=adaptive, speculative_num_steps=steps),
            scheduler=SchedulerConfig(max_running_requests=4, chunked_prefill_size=budget),
        ),
        poison=True,
    )


def restless(engine: Engine, seed: int) -> Engine:
    """Nothing is drafted in runs of steps, some longer than rows are deferred, and in between everything is."""
    policy, dice, left = engine.policy, Random(seed), [0]
    assert policy is not None

    def chosen(seqs: object) -> int:
        left[0] = left[0] - 1 if left[0] > 0 else dice.choice([1, 3, 4, DEFERRED - 1, DEFERRED, DEFERRED + 1, 2 * DEFERRED + 3])
        return STEPS if left[0] == 0 else 0

    policy.choose = chosen  # type: ignore[method-assign, assignment]
    return engine


def planned(engine: Engine) -> list[StepPlan]:
    """All plans that are launched from now on."""
    plans: list[StepPlan] = []
    launch = engine.runner.launch

    def launched(plan: StepPlan) -> Any:
        plans.append(plan)
        return launch(plan)

    engine.runner.launch = launched  # type: ignore[method-assign]
    return plans


def listen(engine: Engine) -> Listener:
    runner: Any = engine.runner
    assert isinstance(runner, Runner) and isinstance(runner.drafter, CombinedDrafter) and isinstance(runner.drafter.base, ChainDrafter)
    listener = Listener(runner.drafter.base)
    runner.drafter.base = listener  # type: ignore[assignment]
    return listener


def run(engine: Engine, temperatures: tuple[float, ...], tokens: int = 20) -> Counter[int]:
    """Requests that arrive one after the other → how many drafts the verifications accepted."""
    generator = torch.Generator().manual_seed(2)
    waiting = [
        Request(
            str(i),
            torch.randint(engine.card.vocab, (n,), generator=generator).tolist(),
            SamplingParams(max_tokens=tokens, temperature=temperatures[i % len(temperatures)], seed=i, ignore_eos=True),
        )
        for i, n in enumerate(LENGTHS)
    ]
    accepted: Counter[int] = Counter()
    while waiting or engine.has_work:
        if waiting:
            engine.add(waiting.pop())
        for event in engine.step():
            assert event.error is None
            if len(event.proposal.tokens) == engine.card.speculative_steps and event.finish is None:
                accepted[event.num_accepted_tokens] += 1
        engine.check_integrity()
    return accepted


def check(tiny: Tiny, rounds: list[Round]) -> None:
    assert rounds
    for each in rounds:
        wanted = tiny.draft_logits(each.ids, each.drafts)
        worst = (each.logits - wanted).abs().max().item()
        assert worst < 1e-4 * max(1.0, wanted.abs().max().item()), f"{worst} after {len(each.ids)} tokens"  # NaN fails too
        if each.greedy:
            assert each.drafts == wanted.argmax(-1).tolist()


MODELS: dict[str, Callable[[Path], Tiny]] = {
    "deepseek": lambda directory: deepseek(directory, n_group=4, topk_group=2, routed_scaling_factor=1.5),
    "deepseek without q_lora, yarn": lambda directory: deepseek(directory, q_lora_rank=None, rope_scaling=YARN, n_shared_experts=2),
    "deepseek v3.2": deepseek_v32,
    "mimo": mimo,
    "ernie": ernie,
    "glm 4.6": glm4_moe,
    "glm 4.7 flash": glm4_moe_lite,
    "qwen3-next": qwen3_next,
    "qwen3.5": qwen3_5,
    "qwen3.5 moe": qwen3_5_moe,
    "glm 5.2": glm_dsa,
}
# Rows per step, tokens in the pool, tokens in a page. The second pool is so small that requests are preempted.
PLACES = {"one step a prompt": (64, 400, 16), "chunks": (6, 400, 5), "chunks and preemption": (9, 60, 5)}


PASSES = {"one pass": 1, "keys and values in a pass of their own": 2}
OTHERS: dict[str, Callable[[Path], Tiny]] = {"step 3.5": step, "mimo-v2": mimo_v2, "nemotron 3": nemotron_h, "ling 2.0": ling}
OTHERS |= {"longcat-flash": longcat}


@pytest.mark.parametrize(("make", "place", "passes"), diagonal(OTHERS | MODELS, PLACES, PASSES))
def test_drafts_are_those_of_a_computation_from_scratch(
    tmp_path: Path, make: Callable[[Path], Tiny], place: tuple[int, int, int], passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if make is step and passes == 2:
        pytest.skip("of chained layers every row needs the output")
    monkeypatch.setattr("mtpserve.spec.draft.passes.SPLIT_ROWS", sys.maxsize if passes == 1 else 0)
    monkeypatch.setattr("mtpserve.spec.draft.passes.SPLIT_EACH", 1)
    tiny = make(tmp_path)
    engine = engine_of(tiny, *place)
    listener = listen(engine)
    accepted = run(engine, temperatures=(1.0, 0.0, 2.0))
    assert accepted[0] and sum(accepted[n] for n in range(1, STEPS)), f"no partial rejection was seen: {accepted}"
    assert (engine.stats.preemptions_total > 0) == (place[1] == 60)
    assert {r.greedy for r in listener.rounds} == {True, False}
    check(tiny, listener.rounds)


ALIKE = ("deepseek without q_lora, yarn", "glm 4.6", "qwen3.5", "qwen3.5 moe", "glm 5.2")  # as the one before it, where rows are absorbed


@pytest.mark.parametrize(
    ("make", "place"),
    [*diagonal({k: v for k, v in MODELS.items() if k not in ALIKE}, PLACES),
     *(pytest.param(MODELS[k], place, id=f"{k}-{name}", marks=pytest.mark.thorough) for k in ALIKE for name, place in PLACES.items())],
)  # fmt: skip
def test_drafts_after_steps_without_any(tmp_path: Path, make: Callable[[Path], Tiny], place: tuple[int, int, int]) -> None:
    """Rows that no step has absorbed are absorbed before drafts are wanted again."""
    tiny = make(tmp_path)
    budget, tokens, page_size = place
    engine = restless(engine_of(tiny, budget, 2 * tokens, page_size, adaptive=True), seed=budget)
    listener, plans = listen(engine), planned(engine)
    for _ in range(3 if selection.ALL else 2):
        run(engine, temperatures=(1.0, 0.0), tokens=45)
    assert (engine.stats.preemptions_total > 0) == (tokens == 60)
    late = [span.num_deferred_tokens for plan in plans for span in plan.spans]
    assert max(late) == DEFERRED and any(0 < rows < DEFERRED for rows in late)
    assert max(sum(span.num_deferred_tokens > 0 for span in plan.spans) for plan in plans) > AT_ONCE  # in parts
    check(tiny, listener.rounds)


# Where layers are recurrent, pages of an output are not found at all: a state is kept after the prompt.
PAGED = {name: make for name, make in MODELS.items() if make not in (qwen3_next, qwen3_5, qwen3_5_moe)}


@pytest.mark.parametrize(("make", "tokens"), diagonal(PAGED, {str(tokens): tokens for tokens in range(20, 28)}))
def test_pages_are_found_once_all_of_their_rows_are_absorbed(tmp_path: Path, make: Callable[[Path], Tiny], tokens: int) -> None:
    tiny, page_size = make(tmp_path), 4
    engine = engine_of(tiny, 64, 400, page_size, adaptive=True)
    assert engine.policy is not None
    engine.policy.choose = lambda reqs: 0  # type: ignore[method-assign]
    text, sampling = [5, 3, 8, 1, 7], SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True)
    engine.add(Request("first", text, sampling))
    while engine.has_work:
        text = text + [token for event in engine.step() for token in event.tokens]
    listener, cached = listen(engine), 0
    engine.policy.choose = lambda reqs: STEPS  # type: ignore[method-assign]
    engine.add(Request("second", text, SamplingParams(max_tokens=9, temperature=0, ignore_eos=True)))
    while engine.has_work:
        cached += sum(event.num_cached_tokens for event in engine.step())
    # A step of the first request has absorbed all rows once DEFERRED were deferred; what came after is not found.
    assert page_size <= len(text) - cached <= DEFERRED + 2 * page_size
    check(tiny, listener.rounds)


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_other_depths(tmp_path: Path, steps: int) -> None:
    tiny = deepseek(tmp_path)
    engine = engine_of(tiny, 8, 400, 3, steps)
    listener = listen(engine)
    run(engine, temperatures=(3.0,))
    assert {len(r.drafts) for r in listener.rounds} == {steps}
    check(tiny, listener.rounds)


@pytest.mark.parametrize("make", [deepseek, mimo])
def test_a_greedy_batch_proposes_the_most_likely(tmp_path: Path, make: Callable[[Path], Tiny]) -> None:
    tiny = make(tmp_path)
    engine = engine_of(tiny, 7, 400, 5)
    listener = listen(engine)
    run(engine, temperatures=(0.0,))
    assert all(r.greedy for r in listener.rounds)
    check(tiny, listener.rounds)


def test_the_layer_keeps_up_where_nothing_is_wanted(tmp_path: Path) -> None:
    """Drafting is off for some steps in the middle: the rounds after them must not show it."""
    tiny = deepseek(tmp_path)
    engine = engine_of(tiny, 6, 400, 5)
    listener = listen(engine)
    prompt = torch.randint(engine.card.vocab, (15,), generator=torch.Generator().manual_seed(2)).tolist()
    engine.add(Request("a", prompt, SamplingParams(max_tokens=30, temperature=1.5, seed=1, ignore_eos=True)))
    step = 0
    while engine.has_work:
        engine._draft_depth = STEPS if step % 7 > 3 else 0
        step += 1
        assert all(event.error is None for event in engine.step())
    assert len(listener.rounds) > 4
    check(tiny, listener.rounds)
