"""The step on the device: build → forward → accept → advance → compact → draft, for all spans together. There is no other path.

Prompt chunks, plain decoding and verification, of chains and of trees, differ in their spans' widths and in nothing else. Nothing here
reads a number on the host (unless a request's rules do), so that a step is the same work whatever it finds, and can be replayed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from mtpserve.cache.states import States
from mtpserve.cache.stores import Stores
from mtpserve.core.batch import Batch, Drafts, Hidden, Sampler, Verdict
from mtpserve.core.protocols.attention import AttentionBackend
from mtpserve.core.protocols.models import Drafter, Trunk
from mtpserve.runtime.inputs import RowLayout, Rows, build, compact, place
from mtpserve.runtime.publish import Columns, result_columns
from mtpserve.runtime.seats import SeatTensors
from mtpserve.spec.verify.accept import LOSSLESS, Decide, accept
from mtpserve.spec.verify.thresholds import Thresholds


class Computed(NamedTuple):
    """A step up to its verdicts."""

    batch: Batch
    hidden: Hidden
    verdict: Verdict
    columns: Columns
    table: Tensor  # what the host gets


def sample_hidden(head: Tensor, batch: Batch) -> Tensor:
    """head [T, hidden] → [R * (K + 1), hidden], the rows that logits are computed of."""
    # Where all spans have one committed token and K drafts, these are all rows in order.
    if batch.longest == 1 and len(head) == batch.sample_rows.numel():
        return head
    return head.index_select(0, batch.sample_rows.flatten())


def unmarked(part: str) -> None:
    """Nobody measures."""


class Step:
    """The parts that a step is made of. `states`: of the trunk's recurrent layers, where it has any. `decide` is the kernel that decides
    where all is lossless.

    `mark` is called after each part, with its name, for measurements: runtime/graphs/parts."""

    def __init__(
        self, model: Trunk, attention: AttentionBackend, stores: Stores, drafter: Drafter, seats: SeatTensors, *,
        states: States | None = None, thresholds: Thresholds = LOSSLESS, processed_logprobs: bool = False, decide: Decide | None = None,
    ) -> None:  # fmt: skip
        self.states = states
        self.model, self.attention, self.stores, self.drafter, self.seats = model, attention, stores, drafter, seats
        self.thresholds, self.processed_logprobs, self.decide = thresholds, processed_logprobs, decide
        self.mark: Callable[[str], None] = unmarked

    def catch_up(self, layout: RowLayout, seat_ids: Tensor, sampler: Sampler) -> None:
        """The draft model absorbs the last rows of these seats, of which steps have deferred that."""
        # What has ended is not to be written to: its pages may be others'.
        seat_ids = seat_ids.masked_fill(self.seats.done[seat_ids], self.seats.padding)
        start = (self.seats.computed[seat_ids] - layout.length).clamp(min=0)
        self.drafter.catch_up(place(layout, self.seats, seat_ids, sampler, None, start))

    def forward(self, rows: Rows) -> Computed:
        """Everything that the host wants to know: its copy can start before the drafting."""
        seats = self.seats
        batch = build(rows, seats)
        self.mark("host")
        hidden = self.model.trunk(batch.ids, batch.positions, self.attention.plan(batch), self.drafter.features)
        logits = self.model.logits(sample_hidden(hidden.head, batch)).unflatten(0, batch.sample_rows.shape)
        self.mark("verify")
        verdict = accept(logits, batch, self.drafter.sizes.depth, self.thresholds, self.processed_logprobs, self.decide)
        table = seats.result_table(batch, verdict)
        self.mark("accept")
        return Computed(batch, hidden, verdict, result_columns(batch, verdict), table)

    def propose(self, rows: Rows, done: Computed) -> Drafts | None:
        self.mark("host")
        batch, hidden, verdict = done.batch, done.hidden, done.verdict
        batch.sampler.advance(batch, verdict)
        self.seats.advance(batch, verdict)
        if verdict.path is not None:
            assert rows.layout.compacted is not None
            batch, hidden = compact(rows.layout.compacted, batch, hidden, verdict, self.seats, self.stores, self.states)
        self.mark("accept")
        drafts = self.drafter.draft(batch, hidden, verdict, rows.want)
        self.mark("draft")
        seat_ids = batch.drafted(batch.seat_ids)
        self.seats.hold(seat_ids, drafts, rows.trees)
        return drafts
