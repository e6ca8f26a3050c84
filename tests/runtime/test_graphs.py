"""Captured steps, with stand-ins for the recorder: what may be in one, which are made, what is kept, and what follows a failure."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

from mtpserve.config import EngineConfig, SpecConfig
from mtpserve.core.request import Request
from mtpserve.core.sampling import SamplingParams, Speculation
from mtpserve.engine.engine import Engine
from mtpserve.engine.startup import build
from mtpserve.runtime.graphs.capture import Body, CaptureFailed, CudaGraphCapturer
from mtpserve.runtime.graphs.graph_key import GraphOutput, tiers
from mtpserve.runtime.graphs.graphs import StepGraphs
from mtpserve.runtime.graphs.prompt_rows import MIXED_PROMPTS, PROMPTS, Prompts
from mtpserve.runtime.sampling.sampling import SamplingFeatures, usual_features
from tests.runtime.recorders import Again, HostRead, Watched, blinded, nothing_is_read, runner_of
from tests.spec.diagonal import diagonal
from tests.tiny import prompts, run, tiny_engine, tiny_model

PLAIN, CHAIN = SpecConfig(speculative_algorithm="none"), SpecConfig(speculative_algorithm="MTP", speculative_num_steps=3)
TREE = SpecConfig(speculative_algorithm="MTP", speculative_num_steps=3, speculative_eagle_topk=2, speculative_num_draft_tokens=8)
LOSSY = SpecConfig(speculative_algorithm="MTP", speculative_num_steps=3, speculative_accept_threshold_single=0.5)
SPECS = {"plain": PLAIN, "chain": CHAIN, "tree": TREE, "lossy": LOSSY}
KINDS = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
GREEDY = SamplingFeatures.of([], False)


def chain(steps: int) -> SpecConfig:
    return SpecConfig(speculative_algorithm="MTP", speculative_num_steps=steps)


def graphs_of(engine: Engine) -> StepGraphs:
    graphs = runner_of(engine).graphs
    assert graphs is not None
    return graphs


def sampled(coupled: bool) -> SamplingFeatures:
    return SamplingFeatures(all_greedy=False, any_greedy=True, largest_k=64, any_top_p=True, any_min_p=True, all_coupled=coupled)


# -- what may be in a captured step -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.tolist(), lambda x: x.numpy(), lambda x: x.cpu(), lambda x: x.unique(), torch.nonzero, torch.unique,
        torch.bincount, torch.where, lambda x: x[0].item(), lambda x: int(x[0]), lambda x: float(x[0]), lambda x: bool(x[0]),
        lambda x: range(x[0]), lambda x: 3 in x, lambda x: x[x > 1], lambda x: x.masked_select(x > 1), lambda x: torch.equal(x, x),
        lambda x: x.repeat_interleave(x), lambda x: x[[0, 1]], lambda x: x.__setitem__(x > 1, x[0]), lambda x: x.__setitem__(0, 5),
        lambda x: torch.tensor([1, 2]), max,
    ],
)  # fmt: skip
def test_the_guard_sees_every_way_to_read(read: Callable[[torch.Tensor], object]) -> None:
    numbers = torch.arange(4)
    with nothing_is_read(), pytest.raises(HostRead):
        read(numbers)
    assert numbers.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize(("spec", "family"), diagonal(SPECS, ["modules", "mimo", "chained"]))
def test_a_captured_step_reads_nothing_on_the_host(spec: SpecConfig, greedy: bool, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tier, as at start."""
    engine = tiny_engine(tiny_model(family, kernels="torch"), spec, recorder=Watched())
    runner, graphs = blinded(engine, monkeypatch), graphs_of(engine)
    features = SamplingFeatures.of([], runner.drafter.coupled) if greedy else sampled(runner.drafter.coupled)
    graphs.capture_all([features], spec is TREE)
    assert [key.requests for key in graphs.captured if not key.rows] == [16, 8, 4, 2, 1]
    alone = [(key.rows, key.spans) for key in graphs.captured if key.rows and not key.requests]
    mixed = [(key.requests, key.rows, key.spans) for key in graphs.captured if key.rows and key.requests]
    assert alone == list(PROMPTS[::-1])
    assert mixed == ([] if spec is TREE else [(16, rows, spans) for rows, spans in MIXED_PROMPTS[::-1]])
    for key, recorded in graphs.captured.items():
        assert (key.max_steps > 0) == (spec.steps > 0) and (key.trees == (spec is TREE) or key.rows)
        assert recorded is not None
        with torch.inference_mode():
            recorded.replay()


@pytest.mark.parametrize(("spec", "temperature"), diagonal(SPECS, {"greedy": 0.0, "drawn": 0.8}))
def test_nothing_is_read_beside_requests_that_do_and_after_them(
    spec: SpecConfig, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Predictions of requests beside it and of ended ones, rules and prompt chunks beside it: the captured step knows none of them."""
    recorder = Watched()
    engine = tiny_engine(tiny_model("mimo", kernels="torch"), spec, recorder=recorder, budget=24, seats=6)
    blinded(engine, monkeypatch)
    hot: dict[str, Any] = {"temperature": temperature, "seed": 5}
    requests = [
        (SamplingParams(**hot, max_tokens=4), [1, 2, 3]),  # its prediction is the first to be left over
        (SamplingParams(**hot, max_tokens=25), []),
        (SamplingParams(**hot, max_tokens=25, repetition_penalty=1.3), []),
        (SamplingParams(**hot, max_tokens=12), [4, 5, 6, 7]),
        (SamplingParams(**hot, max_tokens=25, top_k=7, top_p=0.9), []),
        (SamplingParams(**hot, max_tokens=25, speculation=Speculation(num_steps=1)), []),
    ]
    for i, ((params, prediction), prompt) in enumerate(zip(requests, prompts(6, seed=2), strict=True)):
        engine.add(Request(str(i), prompt, params, prediction=prediction))
    while engine.has_work:
        assert all(event.error is None for event in engine.step())
    assert len(recorder.replayed) > 10
    # Alone, once all the others have ended.
    engine.add(Request("late", [1, 2], SamplingParams(**hot, max_tokens=9)))
    while engine.has_work:
        assert all(event.error is None for event in engine.step())


@pytest.mark.parametrize("spec", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize(
    "options",
    [{"rates": (0.7,) * 8}, {"token_map": [1, 5, 9, 20]}, {}],
    ids=["synthetic", "token map", "thresholds"],
)
def test_nor_does_what_options_add(spec: SpecConfig, greedy: bool, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    shape = spec if options else replace(spec, speculative_accept_threshold_single=0.5, speculative_accept_threshold_acc=0.7)
    engine = tiny_engine(tiny_model("mimo", kernels="torch"), shape, recorder=Watched(), seats=2, **options)
    runner, graphs = blinded(engine, monkeypatch), graphs_of(engine)
    recorded = graphs.capture(graphs.key(2, 3, True, GREEDY if greedy else sampled(runner.drafter.coupled), spec is TREE))
    assert recorded is not None
    with torch.inference_mode():
        recorded.replay()


@pytest.mark.parametrize("end", ["abort", "finish"])
def test_a_prediction_goes_with_its_request(end: str) -> None:
    engine = tiny_engine(tiny_model(kernels="torch"), CHAIN)
    req_tensors = runner_of(engine).req_tensors
    engine.add(Request("0", [1, 2], SamplingParams(max_tokens=6), prediction=[3, 4, 5]))
    engine.add(Request("1", [1, 2, 3], SamplingParams(max_tokens=40)))
    engine.step()
    assert set(req_tensors.predictions) == {0}
    if end == "abort":
        engine.abort("0")
    while engine.has_work and "0" in engine._scheduler.live:
        engine.step()
    engine.add(Request("2", [1, 2], SamplingParams(max_tokens=6)))  # gets the seat that is free now
    engine.step()
    assert engine._scheduler.live["2"].req_idx == 0 and not req_tensors.predictions


# -- which are made, and how wide -------------------------------------------------------------------------------------------------


def test_tiers_cover_every_number_of_requests() -> None:
    for most in (1, 3, 8, 20, 100, 256):
        sizes = tiers(most)
        assert sizes == sorted(set(sizes)) and sizes[-1] == most and sizes[0] == 1


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 6, 7])
def test_a_step_is_as_wide_as_the_engine_drafts(steps: int) -> None:
    """k + 1 rows, not the next power of two; fewer drafts, as near the end of a text, are masked and need no graph of their own."""
    graphs = graphs_of(tiny_engine(tiny_model(kernels="torch"), chain(steps), recorder=Again()))
    for drafts in range(1, steps + 1):
        assert graphs.key(3, drafts, steps, GREEDY, False).width == steps + 1
    whole = graphs.key(4, steps, steps, GREEDY, False)
    assert graphs.key(3, 0, steps, GREEDY, False) == graphs.key(3, steps, 0, GREEDY, False) == whole
    plain = graphs.key(3, 0, 0, GREEDY, False)
    assert (plain.width, plain.max_steps) == (1, 0)


def test_chains_that_are_less_deep_have_a_few_widths_of_their_own() -> None:
    graphs = graphs_of(tiny_engine(tiny_model(kernels="torch"), chain(7), recorder=Again()))
    assert [graphs.key(3, depth, depth, GREEDY, False).width for depth in range(1, 8)] == [2, 4, 4, 8, 8, 8, 8]
    # The step in which the depth changes verifies what the last one left, and drafts what the next one verifies.
    assert graphs.key(3, 3, 1, GREEDY, False) == graphs.key(3, 1, 3, GREEDY, False) == graphs.key(3, 3, 3, GREEDY, False)
    graphs.capture_all([GREEDY], False, adaptive=True, prompts=64)
    decoding = {(key.requests, key.max_steps) for key in graphs.captured if not key.rows}
    assert decoding == {(size, depth) for size in tiers(16) for depth in (0, 1, 3, 7)}
    others = {(key.requests, key.rows, key.max_steps) for key in graphs.captured if key.rows}
    # Beside a request with eight rows a prompt has 56 of 64, at most.
    kinds = {(size, rows, depth) for size, rows in ((0, 64), (0, 128), (16, 64), (16, 192)) for depth in (0, 1, 3, 7)}
    assert others == kinds - {(16, 192, 7)}


def test_a_tree_is_as_wide_as_its_nodes() -> None:
    graphs = graphs_of(tiny_engine(tiny_model(kernels="torch"), TREE, recorder=Again()))
    assert graphs.key(3, 2, TREE.steps, GREEDY, True).width == TREE.nodes + 1 == 8


@pytest.mark.parametrize(("most", "above", "expected"), [(16, None, 13), (16, 2, 22), (3, None, 9)])
def test_all_tiers_are_captured_at_start_and_said_to_be(
    most: int, above: int | None, expected: int, caplog: pytest.LogCaptureFixture
) -> None:
    recorder = Again()
    engine = tiny_engine(tiny_model(kernels="torch"), CHAIN, recorder=recorder, seats=most)
    graphs = graphs_of(engine)
    with caplog.at_level(logging.INFO, "mtpserve"):
        graphs.capture_all([GREEDY, sampled(False)], False, above, prompts=48)
    sizes = [key.requests for key in graphs.captured if key.width == 4 and not key.rows]
    assert sizes == sorted(sizes, reverse=True) and set(sizes) == set(tiers(most))
    plain = {key.requests for key in graphs.captured if key.width == 1 and not key.rows}
    assert plain == {size for size in tiers(most) if above and size > above}
    assert recorder.recordings == len(graphs.captured) == expected
    assert caplog.messages == [f"CUDA graphs: {expected} of {expected}, for up to {most} requests"]
    params = [SamplingParams(max_tokens=9 + i, temperature=0.7 * (i % 2), top_k=5 * (i % 3), seed=i) for i in range(min(most, 9))]
    run(engine, prompts(len(params)), params)
    assert recorder.recordings == expected and recorder.replayed, "something was captured under load"


def test_what_pads_a_captured_step_touches_nobody() -> None:
    engine = tiny_engine(tiny_model(kernels="torch"), CHAIN, recorder=Again())
    runner, graphs = runner_of(engine), graphs_of(engine)
    pool, req_tensors = runner.step.stores.stores[0].pool, runner.req_tensors
    before = pool.k[:, : -req_tensors.page_size].clone()
    graphs.capture(graphs.key(4, 3, True, GREEDY, False))
    for resumed in ([], [0]):
        graphs.capture(graphs.prompt_key(Prompts([9], resumed), 3, GREEDY) or pytest.fail("it is not captured"))
    assert torch.equal(before.isnan(), pool.k[:, : -req_tensors.page_size].isnan())
    assert pool.k[:, -req_tensors.page_size :].isfinite().all()
    assert (req_tensors.num_tokens[:-1] == 0).all() and req_tensors.num_tokens[-1] == 1 and req_tensors.done.all()


def test_a_graph_keeps_what_the_host_reads_and_nothing_else() -> None:
    """Above all not what the drafts were drawn from, [requests, depth, vocabulary]: a body has put it into the seats by then."""

    class Marked(Again):
        def capture(self, body: Body) -> tuple[GraphOutput, Callable[[], object]]:
            made, _ = super().capture(body)
            return made, lambda: None

    engine = tiny_engine(tiny_model(kernels="torch"), CHAIN, recorder=Marked())
    runner, graphs, drawn = runner_of(engine), graphs_of(engine), []
    draft = runner.drafter.draft

    def watched(*args: Any) -> Any:
        drafts = draft(*args)
        drawn.append(weakref.ref(drafts.probs))
        return drafts

    runner.drafter.draft = watched  # type: ignore[method-assign]
    recorded = graphs.capture(graphs.key(4, 3, True, sampled(False), False))
    gc.collect()
    assert recorded is not None and drawn and all(probs() is None for probs in drawn)
    kept = [recorded.output.table, recorded.output.num_proposals]
    assert sum(part.nbytes for part in kept if part is not None) < 4 * 8 * 40


# -- failures ---------------------------------------------------------------------------------------------------------------------


class Refusing(Again):
    """Cannot capture more than two requests."""

    def capture(self, body: Body) -> tuple[GraphOutput, Callable[[], object]]:
        made, again = super().capture(body)
        if len(made[0]) > 2:
            raise CaptureFailed from RuntimeError("operation not permitted when stream is capturing\nCompile with `TORCH_USE_CUDA_DSA`")
        return made, again


@KINDS
def test_what_cannot_be_captured_is_launched(spec: SpecConfig, caplog: pytest.LogCaptureFixture) -> None:
    params = [SamplingParams(max_tokens=9 + 3 * i, temperature=0.7 * (i % 2), seed=i) for i in range(6)]
    wanted = run(tiny_engine(tiny_model(kernels="torch"), spec), prompts(6, seed=3), params)
    recorder = Refusing()
    engine = tiny_engine(tiny_model(kernels="torch"), spec, recorder=recorder, overlap=1)
    with caplog.at_level(logging.WARNING, "mtpserve"):
        assert run(engine, prompts(6, seed=3), params) == wanted
    recorded = graphs_of(engine).captured
    assert (
        recorder.replayed
        and set(recorder.replayed) <= {1, 2}
        and {key.requests for key, made in recorded.items() if made is None and not key.rows} == {4, 8}
    )
    # Once for each, and in one line.
    assert len(caplog.messages) == sum(made is None for made in recorded.values())
    assert all(message.endswith("RuntimeError: operation not permitted when stream is capturing") for message in caplog.messages)


class FakeCuda:
    """torch.cuda as far as a capture goes: streams, whose captures may fail in the middle or at the end, and allocators that notice: the
    device's, which can be told that a capture has ended, and the one of pinned memory, which refuses its pool for ever."""

    def __init__(self, fault: str) -> None:
        self.fault, self.current, self.capturing, self.log = fault, "main", False, list[str]()
        self.pools, self.refused = 0, set[int]()

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fake = self

        class Stream:
            def __init__(self, name: str = "side") -> None:
                self.name = name
                fake.log.append(f"new stream {name}")

            def wait_stream(self, other: Any) -> None:
                pass

        main = Stream("main")

        @contextmanager
        def stream(on: Stream) -> Any:
            before, fake.current = fake.current, on.name
            try:
                yield
            finally:
                fake.current = before

        class Graph:
            def __init__(self, graph: Any, pool: Any, stream: Stream) -> None:
                self.stream, self.pool = stream, pool

            def __enter__(self) -> None:
                assert not fake.capturing, "captures_underway.empty() INTERNAL ASSERT FAILED"
                assert self.pool not in fake.refused, "beginAllocateToPool: already recording to mempool_id"
                fake.before, fake.current, fake.capturing = fake.current, self.stream.name, True

            def __exit__(self, *raised: Any) -> None:
                if fake.fault == "end" or raised[0] is not None:
                    fake.refused.add(self.pool)
                    raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
                fake.current, fake.capturing = fake.before, False

        def end(device: int, pool: Any) -> None:
            if not fake.capturing:
                raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
            fake.capturing = False

        cuda = {
            "Stream": Stream, "stream": stream, "graph": Graph, "current_stream": lambda: main, "graph_pool_handle": self.pool,
            "current_device": lambda: 0, "synchronize": self.synchronize, "CUDAGraph": type("Graph", (), {"replay": None}),
        }  # fmt: skip
        for name, value in cuda.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", end, raising=False)

    def pool(self) -> int:
        self.pools += 1
        return self.pools

    def synchronize(self) -> None:
        if self.fault == "device":
            raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")


@pytest.mark.parametrize("fault", ["", "body", "end", "warm-up", "device"])
def test_a_failed_capture_leaves_stream_and_allocator_as_they_were(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(fault)
    cuda.install(monkeypatch)
    recorder, made = CudaGraphCapturer(), (torch.zeros(1), None, False)

    def body() -> GraphOutput:
        assert cuda.current == "side"
        if fault in ("body", "device") and cuda.capturing:
            raise torch.AcceleratorError("CUDA error: operation not permitted when stream is capturing")
        if fault == "warm-up":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return made

    expected: Any = {"": nullcontext(), "device": pytest.raises(torch.AcceleratorError)}.get(fault, pytest.raises(CaptureFailed))
    with expected as caught:
        assert recorder.capture(body)[0] is made
    assert (cuda.current, cuda.capturing) == ("main", False)
    if fault in ("body", "warm-up"):
        assert isinstance(caught.value.__cause__, (RuntimeError, torch.OutOfMemoryError))
    cuda.fault = fault = ""
    for _ in range(2):
        assert recorder.capture(body)[0] is made
    assert cuda.pools <= 2
    assert cuda.log.count("new stream side") == 1, "libraries would keep a workspace for each"


@pytest.mark.parametrize("exact", [False, True])
def test_exact_steps_are_never_captured(exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the design says. A device that is called a GPU, whose captures are stood in for."""
    runner = runner_of(tiny_engine(tiny_model("mimo", kernels="torch"), CHAIN, exact=exact, recorder=Again()))
    if not exact:
        runner.step.attention.graph_safe = True
    monkeypatch.setattr(build, "CudaGraphCapturer", Again)
    config = EngineConfig(spec=replace(CHAIN, speculative_adaptive=False, speculative_exact=exact))
    assert build.make_graphs(config, runner.step, runner.sampling, 2) is None, "captured on a CPU"
    monkeypatch.setattr(runner.step.req_tensors, "device", FakeDevice())
    monkeypatch.setattr(StepGraphs, "capture", lambda graphs, key: graphs.captured.update({key: None}))
    graphs = build.make_graphs(config, runner.step, runner.sampling, 2)
    assert exact if graphs is None else len([key for key in graphs.captured if not key.rows]) == 2 * len(usual_features(False))


class FakeDevice:
    type = "cuda"
