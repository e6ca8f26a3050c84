"""Steps that are captured once and replayed: one launch on the host instead of hundreds.

A graph is a whole step (forward, accept, compact, absorb, draft) for a padded number of requests, each with as many rows as the engine
verifies. It is fed with seats, wanted depths and numbers of drafts; everything else it reads from the seats on the device. The seat that
belongs to no request pads it.

    requests   | a | b | c | - |      tier 4             rows of each   | x d1 d2 d3 |    fewer drafts are masked

Prompts have graphs of their own, for a padded number of rows in all, and are fed with the number of each. Launched kernel by kernel, a
short prompt took 36 ms on an H100 with 36 layers; a step without takes 4 ms.

    rows       | a a a | b b b b | - | - - |      8 spans of 4 requests, at most 3 of which are real

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
from torch.nn.functional import pad

from mtpserve.core.batch import Keep, Want
from mtpserve.runtime.inputs import RowLayout, Rows, row_layout
from mtpserve.runtime.publish import Columns
from mtpserve.runtime.sampling import Asked, BatchSampler, SeatSampling
from mtpserve.runtime.step import Step
from mtpserve.runtime.transfer import write

log = logging.getLogger(__name__)

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
# Rows of prompts in one graph, and requests, of which at least one pads it: it has the rows that are left over. With more rows a GPU takes
# longer than the launches.
PROMPTS = ((64, 8), (128, 16), (192, 16), (256, 32), (384, 32), (512, 32), (768, 64), (1024, 64))
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
    width: int  # rows of each; 0: each has its own number
    deepest: int  # 0: nothing is drafted
    trees: bool
    asked: Asked
    deferred: bool = False  # where nothing is drafted: the rows are absorbed with a later step
    rows: int = 0  # of all prompts together
    resumed: bool = False  # some of these start right after pages of another request


@dataclass(frozen=True, slots=True)
class Recorded:
    # [3 to 8, requests]: seats, wanted depths, most drafts, Keep's numbers where layers keep states, and of prompts what `fitted` gives
    given: Tensor
    layout: RowLayout | None  # its tensors are read by every replay; None: it is made of `given`
    outcome: GraphOutput
    again: Callable[[], object]


@dataclass(frozen=True, slots=True)
class Prompts:
    """Of a step's requests: rows of each, and which of them start right after pages of another request."""

    lengths: Seq[int]
    resumed: Seq[int]


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


def ragged(lengths: Tensor, real: Tensor, rows: int) -> RowLayout:
    """lengths [R], `rows` in all, of prompts that end with this step; real [R]: 0 for a request that pads. Its rows are all its first
    one, so that nothing is longer than its seat."""
    ends, row = lengths.cumsum(0), torch.arange(rows, device=lengths.device)
    cu_q = pad(ends, (1, 0))
    span = torch.searchsorted(ends, row, right=True)
    none, last = torch.zeros_like(lengths), ends - 1
    offset = (row - cu_q[span]) * real[span]
    return RowLayout(span, offset, torch.zeros_like(row), cu_q, lengths, none, last, last.unsqueeze(1), real, 0, rows, None)


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
        kept: Seq[Seq[int]] = (), prompts: Prompts | None = None,
    ) -> GraphOutput | None:  # fmt: skip
        """`drafts` of the widest span; `want`: how deep the step drafts; `deferred`: as in Key; `kept`: Keep's numbers, where layers keep
        states. What it gives is overwritten by the next replay, on the device and in its order. None: such a step cannot be captured,
        or its prompts are too long, and nothing was done."""
        deepest = want if any(wanted) else 0
        if prompts is None:
            key = self.key(len(seats), drafts, deepest, asked, trees, deferred)
        elif (found := self.prompt_key(prompts, deepest, asked)) is None:
            return None
        else:
            key = found
        recorded = self.recorded[key] if key in self.recorded else self.record(key)
        if recorded is None:
            return None
        padding = key.requests - len(seats)
        # A chain's number of drafts is its depth, and those who are limited otherwise are not captured.
        most = most or [self.drafts] * len(seats)
        depths = wanted if self.step.drafter.sizes.trees else list(map(min, wanted, most))
        lists = (seats, self.step.seats.padding), (depths, 0), (most, 0), *((each, 0) for each in kept)
        numbers = [[*each, *[number] * padding] for each, number in lists]
        if prompts is not None:
            numbers += fitted(prompts, key)
        write(recorded.given, numbers)
        recorded.again()
        return recorded.outcome

    def prompt_key(self, prompts: Prompts, deepest: int, asked: Asked) -> Key | None:
        """None: there are too many rows, or requests."""
        requests, rows = len(prompts.lengths), sum(prompts.lengths)
        for most, spans in PROMPTS:
            if requests < spans and rows + spans - requests <= most:
                depth = self.depth_of(deepest) if deepest else 0
                # Seats in which drafts once branched, or not, and all parameters alike: it is few requests' sampling.
                trees = self.step.drafter.sizes.branching
                return Key(spans, 0, depth, trees, asked.general, rows=most, resumed=bool(prompts.resumed))
        return None

    @property
    def used_depths(self) -> list[int]:
        """Those of graphs in which anything is drafted."""
        sizes = self.step.drafter.sizes
        return [sizes.depth] if sizes.trees or sizes.always_free else self.depths

    def depth_of(self, drafts: int) -> int:
        """The depth of the graph in which so many are drafted, or verified: of a tree more than it is deep."""
        *shallower, deepest = self.used_depths
        return next((depth for depth in shallower if depth >= drafts), deepest)

    def key(self, requests: int, drafts: int, deepest: int, asked: Asked, trees: bool, deferred: bool = False) -> Key:
        assert drafts <= self.drafts
        size = next(tier for tier in tiers(self.most) if tier >= requests)
        if drafts == 0 and deepest == 0:
            return Key(size, 1, 0, False, asked.rounded(), deferred)
        # The step in which the depth changes is as wide as the deeper one.
        depth, sizes = self.depth_of(max(drafts, deepest)), self.step.drafter.sizes
        return Key(size, (self.drafts if sizes.trees or sizes.always_free else depth) + 1, depth, trees, asked.rounded())

    def record_all(
        self, asked: Seq[Asked], trees: bool, plain_above: int | None = None, adaptive: bool = False,
        prompts: int = PROMPTS[-1][0], shared: bool = False,
    ) -> None:  # fmt: skip
        """Every tier, the largest first: the memory of the others fits into its own. `plain_above`: with more requests than that the
        engine drafts nothing. `adaptive`: it drafts as deep as it thinks best. `prompts`: rows of a step, at most; `shared`: some may
        follow pages of another request."""
        sizes = tiers(self.most)[::-1]
        depths = self.depths[::-1] if adaptive and self.drafts else [self.drafts]
        keys = [self.key(size, depth, depth, each, trees) for size in sizes for depth in depths for each in asked]
        if adaptive and self.drafts:
            plain_above = 0
        if plain_above is not None:
            deferred = self.step.drafter.sizes.deferred > 0
            keys += [self.key(size, 0, 0, each, False, deferred) for size in sizes if size > plain_above for each in asked]
            depths = [*depths, 0]
        both = ([], [0])[: 1 + (shared or self.step.drafter.lag == 0)]
        for rows in sorted({min(rows - spans, prompts) for rows, spans in PROMPTS}, reverse=True):
            some = [Prompts([rows], resumed) for resumed in both]
            keys += [key for depth in depths for each in asked for one in some if (key := self.prompt_key(one, depth, each))]
        keys = list(dict.fromkeys(keys))
        for number, key in enumerate(keys, 1):
            self.record(key)
            if number % LOG_EVERY == 0 or number == len(keys):
                log.info("captured %d of %d steps, for up to %d requests", number, len(keys), self.most)

    @torch.inference_mode()
    def record(self, key: Key) -> Recorded | None:
        step, device = self.step, self.step.seats.device
        numbers = [[step.seats.padding] * key.requests, *([0] * key.requests for _ in range(2 if step.states is None else 4))]
        if key.rows:
            numbers += fitted(Prompts([], []), key)
        given = torch.empty(len(numbers), key.requests, dtype=torch.int64, device=device)
        write(given, numbers)
        layout = None if key.rows else self.layout(key)
        rows_each = f"{key.rows} rows of prompts" if key.rows else f"{key.width} rows each"

        def body() -> GraphOutput:
            rows = self.rows(key, given, layout)
            computed = step.forward(rows)
            drafts = step.propose(rows, computed)
            if drafts is None:
                return GraphOutput(computed.columns, computed.table, None, False)
            return GraphOutput(computed.columns, computed.table, drafts.count, drafts.tree is not None)

        try:
            self.recorded[key] = Recorded(given, layout, *self.recorder.record(body))
            log.debug("captured a step of %d requests, %s, %d deep", key.requests, rows_each, key.deepest)
        except CaptureFailed as failure:
            self.recorded[key] = None
            why = failure.__cause__ or failure
            first = str(why).partition("\n")[0]
            log.warning(
                "a step of %d requests, %s, cannot be captured and is launched each time: %s: %s",
                key.requests, rows_each, type(why).__name__, first,
            )  # fmt: skip
        return self.recorded[key]

    def layout(self, key: Key) -> RowLayout:
        """Of a step whose requests have equally many rows. Not from the cache, which forgets."""
        sizes = self.step.drafter.sizes
        spans = ((1, key.width - 1, True),) * key.requests
        return row_layout.__wrapped__(spans, self.step.seats.device, sizes.depth if sizes.branching else None)

    def rows(self, key: Key, given: Tensor, layout: RowLayout | None) -> Rows:
        """`given`: see Recorded. `layout`: None for prompts."""
        parts = list(given.unbind(0))
        seat_ids, each, most = parts[:3]
        keep, resumed = None if self.step.states is None else Keep(*parts[3:5]), None
        if layout is None:
            lengths, real, after_others = parts[-3:]
            layout, resumed = ragged(lengths, real, key.rows), after_others if key.resumed else None
        return Rows(
            layout,
            seat_ids,
            None,
            Want(each, key.deepest, most if self.step.drafter.sizes.trees else None, key.deferred, not key.deferred),
            key.trees,
            BatchSampler(self.sampling, key.asked),
            resumed,
            keep=keep,
        )


def fitted(prompts: Prompts, key: Key) -> list[list[int]]:
    """Of the requests of a graph: their rows, whether they are real, and those that are `resumed`, repeated as often as needed. What pads
    it has a row each; the last one those that are left over."""
    lengths, padding = list(prompts.lengths), key.requests - len(prompts.lengths)
    padded = [*lengths, *[1] * (padding - 1), key.rows - sum(lengths) - padding + 1]
    resumed = list(prompts.resumed) or [key.requests - 1]
    return [padded, [1] * len(lengths) + [0] * padding, (resumed * key.requests)[: key.requests]]
