"""Decoding steps that are captured once and replayed: one launch on the host instead of hundreds.

A graph is a whole step (forward, accept, compact, absorb, draft) over a padded number of requests and rows each. It is fed with seats and
wanted depths; everything else it finds on the device. What pads it is the seat that is nobody's.

    requests   | a | b | c | - |      tier 4             rows of each   | x d1 d2 d3 |    tier 4: who has fewer drafts is masked

Graphs that are not there yet are captured when they are first needed, which takes about as long as a few dozen steps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mtpserve.core.batch import Drafts, Want
from mtpserve.runtime.inputs import Rows, row_layout
from mtpserve.runtime.sampling import Asked, BatchSampler, SeatSampling
from mtpserve.runtime.step import Computed, Step
from mtpserve.runtime.transfer import write

log = logging.getLogger(__name__)

Body = Callable[[], tuple[Computed, "Drafts | None"]]
Made = tuple[Computed, "Drafts | None"]

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
FIRST = 8  # tiers up to here, and the largest, are captured at start
WARM_UPS = 2  # compile kernels and fill caches, neither of which may happen in a capture


class Recorder(Protocol):
    def record(self, body: Body) -> tuple[Made, Callable[[], object]]:
        """Run `body` as often as needed, and give what its recorded run returns, and what repeats that run into the same tensors."""
        ...


class CudaRecorder:
    """All graphs share one pool of memory: only one of them runs at a time, and what one returns is kept alive by its owner."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()

    def record(self, body: Body) -> tuple[Made, Callable[[], object]]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UPS):
                body()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            made = body()
        return made, graph.replay


@dataclass(frozen=True, slots=True)
class Key:
    requests: int
    width: int
    deepest: int  # 0: nothing is drafted
    trees: bool
    asked: Asked


@dataclass(frozen=True, slots=True)
class Recorded:
    given: Tensor  # [2, requests]: seats, wanted depths
    rows: Rows  # its tensors are read by every replay
    made: Made
    again: Callable[[], object]


def tiers(most: int) -> list[int]:
    """Numbers of requests, the largest last."""
    return [*(size for size in ROWS if size < most), most]


class StepGraphs:
    """`most` requests in one graph, at most."""

    def __init__(self, step: Step, sampling: SeatSampling, recorder: Recorder, most: int) -> None:
        self.step, self.sampling, self.recorder, self.most = step, sampling, recorder, most
        self.recorded: dict[Key, Recorded] = {}

    def replay(self, seats: Seq[int], wanted: Seq[int], drafts: int, asked: Asked, trees: bool) -> Made:
        """`drafts` of the widest span. What it gives is overwritten by the next replay, on the device and in its order."""
        key = self.key(len(seats), drafts, max(wanted) > 0, asked, trees)
        found = self.recorded.get(key) or self.record(key)
        padding = key.requests - len(seats)
        write(found.given, [[*seats, *[self.step.seats.padding] * padding], [*wanted, *[0] * padding]])
        found.again()
        return found.made

    def key(self, requests: int, drafts: int, any_wanted: bool, asked: Asked, trees: bool) -> Key:
        width = min(1 << drafts.bit_length(), self.step.drafter.sizes.rows_per_step) if drafts else 1
        size = next(tier for tier in tiers(self.most) if tier >= requests)
        return Key(size, width, self.step.drafter.sizes.depth if any_wanted else 0, trees, asked.rounded())

    def record_first(self, drafts: int, asked: Iterable[Asked], trees: bool) -> None:
        """The largest before the others: their memory fits into its own."""
        for size in reversed(tiers(self.most)):
            if size in (self.most, *(tier for tier in ROWS if tier <= FIRST)):
                for each in asked:
                    self.record(self.key(size, drafts, drafts > 0, each, trees))

    @torch.inference_mode()
    def record(self, key: Key) -> Recorded:
        step, device = self.step, self.step.seats.device
        given = torch.zeros(2, key.requests, dtype=torch.int64, device=device)
        given[0] = step.seats.padding
        seat_ids, each = given.unbind(0)
        layout = row_layout.__wrapped__(
            ((1, key.width - 1, True),) * key.requests, device, step.drafter.sizes.depth if step.drafter.sizes.branching else None
        )  # not from the cache, which forgets
        rows = Rows(layout, seat_ids, None, Want(each, key.deepest), key.trees, BatchSampler(self.sampling, key.asked))

        def body() -> Made:
            computed = step.forward(rows)
            return computed, step.propose(rows, computed)

        made, again = self.recorder.record(body)
        log.debug("captured a step of %d requests, %d rows each, %d deep", key.requests, key.width, key.deepest)
        self.recorded[key] = Recorded(given, rows, made, again)
        return self.recorded[key]
