"""Decoding steps that are captured once and replayed: one launch on the host instead of hundreds.

A graph is a whole step (forward, accept, compact, absorb, draft) for a padded number of requests, each with as many rows as the engine
verifies. It is fed with seats, wanted depths and numbers of drafts; everything else it reads from the seats on the device. The seat that
belongs to no request pads it.

    requests   | a | b | c | - |      tier 4             rows of each   | x d1 d2 d3 |    fewer drafts are masked

All tiers are captured at start for the usual parameters; others when they are first needed, which takes about as long as a few dozen
steps. A step whose capture failed is launched as any other, from then on.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mtpserve.core.batch import Keep, Want
from mtpserve.runtime.inputs import Rows, row_layout
from mtpserve.runtime.publish import Columns
from mtpserve.runtime.sampling import Asked, BatchSampler, SeatSampling
from mtpserve.runtime.step import Step
from mtpserve.runtime.transfer import write

log = logging.getLogger(__name__)

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
DEPTHS = (1, 3)  # of chains, in addition to the engine's own depth
WARM_UPS = 2  # compile kernels and fill caches, neither of which may happen in a capture
LOG_EVERY = 10  # captures at start


@dataclass(frozen=True, slots=True)
class GraphOutput:
    """What a step leaves for the host, and all that a graph keeps of it: the memory of everything else is the next graph's too."""

    columns: Columns
    table: Tensor
    count: Tensor | None  # [requests], the drafts that now wait; None: nothing was drafted
    trees: bool  # they branch


Body = Callable[[], GraphOutput]


class CaptureFailed(Exception):
    """The step can be launched, but not captured. The cause says why."""


class Recorder(Protocol):
    def record(self, body: Body) -> tuple[GraphOutput, Callable[[], object]]:
        """Run `body` as often as needed, and give what its recorded run returns, and what repeats that run into the same tensors.
        Raises CaptureFailed."""
        ...


class CudaRecorder:
    """All graphs share one pool of memory: only one of them runs at a time, and what one returns is kept alive by its owner. They share
    one stream too, since libraries keep a workspace for each stream that they have seen. After a failed capture the next ones share
    another pool."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream()
        self.failed: list[torch.cuda.CUDAGraph] = []

    def record(self, body: Body) -> tuple[GraphOutput, Callable[[], object]]:
        current = torch.cuda.current_stream()
        graph = torch.cuda.CUDAGraph()
        try:
            self.stream.wait_stream(current)
            with torch.cuda.stream(self.stream):
                for _ in range(WARM_UPS):
                    body()
            current.wait_stream(self.stream)
            # torch.cuda.graph does not restore the stream if the end of the capture raises; the outer context does.
            with torch.cuda.stream(current), torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
                made = body()
        except Exception as error:
            self.clean_up(graph)
            raise CaptureFailed from error
        return made, graph.replay

    def clean_up(self, graph: torch.cuda.CUDAGraph) -> None:
        """After a failed capture. A torch without https://github.com/pytorch/pytorch/pull/180395 takes it for unfinished in its allocators.
        The device's can be told; the next capture would die of an internal assertion otherwise. The one of pinned memory cannot: it refuses
        the pool from then on (seen with torch 2.11), and still asks the failed graph what is its own, so that this is kept. That the pool
        may never be given back (https://github.com/pytorch/pytorch/pull/190348) does no harm: the graphs before use it.

        Raises torch.AcceleratorError where the device itself has failed."""
        with contextlib.suppress(RuntimeError):  # the capture has ended there, too
            torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), self.pool)
        self.failed.append(graph)
        self.pool = torch.cuda.graph_pool_handle()
        torch.cuda.synchronize()


@dataclass(frozen=True, slots=True)
class Key:
    requests: int
    width: int  # rows of each
    deepest: int  # 0: nothing is drafted
    trees: bool
    asked: Asked
    deferred: bool = False  # where nothing is drafted: the rows are absorbed with a later step


@dataclass(frozen=True, slots=True)
class Recorded:
    given: Tensor  # [3 or 5, requests]: seats, wanted depths, most drafts, and Keep's numbers where layers keep states
    rows: Rows  # its tensors are read by every replay
    outcome: GraphOutput
    again: Callable[[], object]


def tiers(most: int) -> list[int]:
    """Numbers of requests, the largest last."""
    return [*(size for size in ROWS if size < most), most]


def usual(coupled: bool) -> list[Asked]:
    """The usual parameters: no temperature, temperature alone, or with any of top_k, top_p and min_p. `coupled` as in Asked."""
    cuts = ((True, 0, False), (False, 0, False), (False, 1, True))
    wanted = [
        Asked(all_greedy=greedy, any_greedy=True, largest_k=top_k, any_top_p=top_p, any_min_p=top_p, all_coupled=coupled)
        for greedy, top_k, top_p in cuts
    ]
    return [each.rounded() for each in wanted]


class StepGraphs:
    """`most` requests in one graph, at most. The widths are the engine's own, a token and all drafts of a request, those of a few less
    deep chains, and a single row for steps that neither verify nor draft. Steps between them are masked: near the end of its text a
    request has fewer drafts for a step or two, which is not worth a capture."""

    def __init__(self, step: Step, sampling: SeatSampling, recorder: Recorder, most: int) -> None:
        self.step, self.sampling, self.recorder, self.most = step, sampling, recorder, most
        self.drafts = step.drafter.sizes.proposals(step.drafter.sizes.depth, plain=True)
        self.depths = sorted({depth for depth in DEPTHS if depth < self.drafts} | {self.drafts})
        self.recorded: dict[Key, Recorded | None] = {}  # None: cannot be captured

    def again(self) -> StepGraphs:
        """For what the step drafts with now, in the same memory."""
        return StepGraphs(self.step, self.sampling, self.recorder, self.most)

    def replay(
        self, seats: Seq[int], wanted: Seq[int], most: Seq[int], drafts: int, want: int, asked: Asked, trees: bool, deferred: bool = False,
        kept: Seq[Seq[int]] = (),
    ) -> GraphOutput | None:  # fmt: skip
        """`drafts` of the widest span; `want`: how deep the step drafts; `deferred`: as in Key; `kept`: Keep's numbers, where layers keep
        states. What it gives is overwritten by the next replay, on the device and in its order. None: such a step cannot be captured,
        and nothing was done."""
        key = self.key(len(seats), drafts, want if any(wanted) else 0, asked, trees, deferred)
        recorded = self.recorded[key] if key in self.recorded else self.record(key)
        if recorded is None:
            return None
        padding = key.requests - len(seats)
        # A chain's number of drafts is its depth, and those who are limited otherwise are not captured.
        most = most or [self.drafts] * len(seats)
        depths = wanted if self.step.drafter.sizes.trees else list(map(min, wanted, most))
        lists = (seats, self.step.seats.padding), (depths, 0), (most, 0), *((each, 0) for each in kept)
        write(recorded.given, [[*each, *[pad] * padding] for each, pad in lists])
        recorded.again()
        return recorded.outcome

    def key(self, requests: int, drafts: int, deepest: int, asked: Asked, trees: bool, deferred: bool = False) -> Key:
        assert drafts <= self.drafts
        size = next(tier for tier in tiers(self.most) if tier >= requests)
        if drafts == 0 and deepest == 0:
            return Key(size, 1, 0, False, asked.rounded(), deferred)
        sizes = self.step.drafter.sizes
        if sizes.trees or sizes.always_free:
            return Key(size, self.drafts + 1, sizes.depth, trees, asked.rounded())
        # The step in which the depth changes is as wide as the deeper one.
        depth = next(depth for depth in self.depths if depth >= max(drafts, deepest))
        return Key(size, depth + 1, depth, trees, asked.rounded())

    def record_all(self, asked: Seq[Asked], trees: bool, plain_above: int | None = None, adaptive: bool = False) -> None:
        """Every tier, the largest first: the memory of the others fits into its own. `plain_above`: with more requests than that the
        engine drafts nothing. `adaptive`: it drafts as deep as it thinks best."""
        sizes = tiers(self.most)[::-1]
        depths = self.depths[::-1] if adaptive and self.drafts else [self.drafts]
        keys = [self.key(size, depth, depth, each, trees) for size in sizes for depth in depths for each in asked]
        if adaptive and self.drafts:
            plain_above = 0
        if plain_above is not None:
            deferred = self.step.drafter.sizes.deferred > 0
            keys += [self.key(size, 0, 0, each, False, deferred) for size in sizes if size > plain_above for each in asked]
        keys = list(dict.fromkeys(keys))
        for number, key in enumerate(keys, 1):
            self.record(key)
            if number % LOG_EVERY == 0 or number == len(keys):
                log.info("captured %d of %d steps, for up to %d requests", number, len(keys), self.most)

    @torch.inference_mode()
    def record(self, key: Key) -> Recorded | None:
        step, device = self.step, self.step.seats.device
        given = torch.zeros(3 if step.states is None else 5, key.requests, dtype=torch.int64, device=device)
        given[0] = step.seats.padding
        seat_ids, each, most, *kept = given.unbind(0)
        layout = row_layout.__wrapped__(
            ((1, key.width - 1, True),) * key.requests, device, step.drafter.sizes.depth if step.drafter.sizes.branching else None
        )  # not from the cache, which forgets
        rows = Rows(
            layout,
            seat_ids,
            None,
            Want(each, key.deepest, most if step.drafter.sizes.trees else None, key.deferred, not key.deferred),
            key.trees,
            BatchSampler(self.sampling, key.asked),
            keep=Keep(*kept) if kept else None,
        )

        def body() -> GraphOutput:
            computed = step.forward(rows)
            drafts = step.propose(rows, computed)
            if drafts is None:
                return GraphOutput(computed.columns, computed.table, None, False)
            return GraphOutput(computed.columns, computed.table, drafts.count, drafts.tree is not None)

        try:
            self.recorded[key] = Recorded(given, rows, *self.recorder.record(body))
            log.debug("captured a step of %d requests, %d rows each, %d deep", key.requests, key.width, key.deepest)
        except CaptureFailed as failure:
            self.recorded[key] = None
            why = failure.__cause__ or failure
            first = str(why).partition("\n")[0]
            log.warning(
                "a step of %d requests, %d rows each, cannot be captured and is launched each time: %s: %s",
                key.requests, key.width, type(why).__name__, first,
            )  # fmt: skip
        return self.recorded[key]
