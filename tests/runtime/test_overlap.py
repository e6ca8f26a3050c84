"""The real step under a late engine, launched and replayed: the text is the one of a step at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mtpserve.config import SpecConfig
from mtpserve.core.request import Request
from mtpserve.core.sampling import SamplingParams, Speculation
from mtpserve.engine.engine import Engine
from mtpserve.runtime.graphs import Body, Made, StepGraphs, tiers
from mtpserve.runtime.runner import Runner
from mtpserve.runtime.sampling import Asked
from tests.tiny import prompts, run, tiny_engine, tiny_model

PLAIN, CHAIN = SpecConfig(), SpecConfig(speculative_algorithm="MTP", speculative_num_steps=3)
TREE = SpecConfig(speculative_algorithm="MTP", speculative_num_steps=3, speculative_eagle_topk=2, speculative_num_draft_tokens=8)
MIXED = SpecConfig(speculative_algorithm="MTP+NGRAM", speculative_num_steps=2)
KINDS = pytest.mark.parametrize("spec", [PLAIN, CHAIN, TREE, MIXED], ids=["plain", "chain", "tree", "mixed"])
STOPS = (3, 17)


def asked(sampled: bool) -> list[SamplingParams]:
    """Six requests that differ in everything that a step may have to know about them."""
    hot: dict[str, Any] = {"temperature": 0.8 if sampled else 0.0, "seed": 5, "max_tokens": 30}
    return [
        SamplingParams(**hot, stop_token_ids=STOPS),
        SamplingParams(**hot, repetition_penalty=1.3, min_tokens=9),
        SamplingParams(**hot, top_k=7, top_p=0.9, ignore_eos=True),
        SamplingParams(**hot, logprobs=2),
        SamplingParams(**hot, logit_bias={4: 3.0}, min_p=0.05),
        SamplingParams(**hot, speculation=Speculation(num_steps=1)),
    ]


class Again:
    """Replays by running the body again into the tensors of the first run, as a captured graph would."""

    def __init__(self) -> None:
        self.recordings = 0
        self.replayed: list[int] = []  # requests of each replay, padding counted

    def record(self, body: Body) -> tuple[Made, Callable[[], object]]:
        verified, drafts = body()
        self.recordings += 1

        def again() -> None:
            self.replayed.append(len(verified.batch.seat_ids))
            fresh, proposed = body()
            verified.table.copy_(fresh.table)
            if drafts is not None and proposed is not None:
                drafts.count.copy_(proposed.count)

        return (verified, drafts), again


def texts(spec: SpecConfig, sampled: bool, **options: Any) -> list[list[int]]:
    engine = tiny_engine(tiny_model("mimo"), spec, eos=(11,), **options)
    return run(engine, prompts(6, seed=2), asked(sampled))


@KINDS
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("overlap", [1, 2])
def test_a_late_engine_gives_the_same_text(spec: SpecConfig, sampled: bool, overlap: int) -> None:
    assert texts(spec, sampled, overlap=overlap) == texts(spec, sampled)


@pytest.mark.parametrize("spec", [PLAIN, CHAIN, TREE], ids=["plain", "chain", "tree"])
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_replayed_steps_give_the_same_text(spec: SpecConfig, sampled: bool, overlap: int) -> None:
    """Some of the requests cannot be replayed, and prompts come in chunks, so that most steps have both."""
    recorder = Again()
    assert texts(spec, sampled, overlap=overlap, recorder=recorder, budget=24) == texts(spec, sampled)
    assert len(recorder.replayed) > 20 and recorder.recordings < len(recorder.replayed) / 2


@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_a_small_pool_preempts_and_the_text_stays(overlap: int) -> None:
    params = [SamplingParams(temperature=0.7, seed=i, max_tokens=40) for i in range(5)]
    alone = run(tiny_engine(tiny_model(), CHAIN), prompts(5, seed=4), params)
    engine = tiny_engine(tiny_model(), CHAIN, pages=34, overlap=overlap, recorder=Again(), seats=4)
    assert run(engine, prompts(5, seed=4), params) == alone
    assert engine.stats.preemptions_total > 0


@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_the_device_ends_requests_where_the_host_does(overlap: int) -> None:
    engine = tiny_engine(tiny_model(), CHAIN, eos=(11,), overlap=overlap)
    seats = runner_of(engine).seats
    for i, params in enumerate(asked(sampled=True)):
        engine.add(Request(str(i), prompts(6, seed=2)[i], params))
    ended: dict[int, list[int]] = {}
    live = dict(engine._scheduler.live)
    seat_of: dict[str, int] = {}
    while engine.has_work:
        for event in engine.step():
            if event.finish is not None:
                ended[seat_of[event.id]] = live[event.id].tokens
        seat_of |= {seq.id: seq.seat for seq in live.values() if seq.seat is not None}
    assert len(ended) == 6 and bool(seats.done[:6].all())
    for seat, tokens in ended.items():
        # Steps that came too late left the seat alone; behind the stop stands at most what came with it in one step.
        length = int(seats.length[seat])
        assert len(tokens) <= length <= len(tokens) + 3 and seats.tokens[seat, : len(tokens)].tolist() == tokens


class NoReading(TorchDispatchMode):
    """Fails on whatever would make the host wait, or depends on numbers: none of it can be captured."""

    FORBIDDEN = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "is_nonzero", "item", "lift_fresh", "equal")

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.name().split("::")[-1].split(".")[0]
        assert name not in self.FORBIDDEN, f"a captured step would call {function.name()}"
        for index in args[1] if name in ("index", "index_put", "index_put_") else ():
            assert index is None or index.dtype is not torch.bool, "a mask as an index has a shape that depends on numbers"
        return function(*args, **(kwargs or {}))


class Watched(Again):
    def record(self, body: Body) -> tuple[Made, Callable[[], object]]:
        made, _ = super().record(body)
        with NoReading():
            body()
        return made, body


@pytest.mark.parametrize("spec", [PLAIN, CHAIN, TREE], ids=["plain", "chain", "tree"])
@pytest.mark.parametrize("greedy", [True, False])
def test_a_captured_step_reads_nothing_on_the_host(spec: SpecConfig, greedy: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention and the moving of paths do in plain torch, so stand-ins take their places: kernels read nothing, and are not torch's."""
    engine = tiny_engine(tiny_model("mimo"), spec, recorder=Watched())
    runner = runner_of(engine)
    attention = Blind(runner.step.attention.pool)  # type: ignore[attr-defined]
    runner.step.attention = attention
    monkeypatch.setattr(runner.step.pool, "_compact", lambda pool, source, target: None)
    base = getattr(runner.drafter, "base", runner.drafter)
    if spec is not PLAIN:
        monkeypatch.setattr(base, "attention", attention)
    graphs = runner.graphs
    assert graphs is not None
    cuts = not greedy
    wanted = Asked(
        all_greedy=greedy, any_greedy=True, largest_k=64 * cuts, any_top_p=cuts, any_min_p=cuts, all_coupled=runner.drafter.coupled
    )
    graphs.record_first(runner.sizes.proposals(spec.steps, plain=True), [wanted], spec is TREE)
    assert {key.requests for key in graphs.recorded} == {16, 8, 4, 2, 1}
    assert all((key.deepest > 0) == (spec.steps > 0) and key.trees == (spec is TREE) for key in graphs.recorded)


class Blind:
    """core.protocols.AttentionBackend that stores, and attends to nothing."""

    graph_safe = True

    def __init__(self, pool: Any) -> None:
        self.pool = pool

    def supports(self, layout: Any, device: str) -> bool:
        return True

    def plan(self, batch: Any) -> Any:
        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor | None, layer: int) -> torch.Tensor:
            self.pool.store(layer, batch.slots, k, v)
            return q[..., : self.pool.layout.value_dim].contiguous()

        return attend


def test_what_pads_a_captured_step_touches_nobody() -> None:
    engine = tiny_engine(tiny_model(), CHAIN, recorder=Again())
    runner = runner_of(engine)
    pool, seats = runner.step.pool, runner.seats
    before = pool.k[:, : -seats.page_size].clone()
    assert isinstance(runner.graphs, StepGraphs)
    runner.graphs.record(runner.graphs.key(4, 3, True, Asked.of([], False), False))
    assert torch.equal(before.isnan(), pool.k[:, : -seats.page_size].isnan())
    assert pool.k[:, -seats.page_size :].isfinite().all()
    assert (seats.length[:-1] == 0).all() and seats.length[-1] == 1 and seats.done.all()


def test_tiers_cover_every_number_of_requests() -> None:
    for most in (1, 3, 8, 20, 100, 256):
        sizes = tiers(most)
        assert sizes == sorted(set(sizes)) and sizes[-1] == most and sizes[0] == 1
    engine = tiny_engine(tiny_model(), CHAIN, recorder=Again())
    graphs = runner_of(engine).graphs
    assert graphs is not None
    greedy = Asked.of([], False)
    for drafts, width in ((0, 1), (1, 2), (2, 4), (3, 4), (5, 8), (11, 12)):
        assert graphs.key(3, drafts, True, greedy, False).width == width  # 3 of the chain's and 8 free ones, at most


def runner_of(engine: Engine) -> Runner:
    runner = engine._runner
    assert isinstance(runner, Runner)
    return runner
