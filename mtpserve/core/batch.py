"""What goes into a step and what comes out of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from mtpserve.core.sequence import Sequence
from mtpserve.core.shape import SpanShape

if TYPE_CHECKING:
    from torch import Tensor

    from mtpserve.core.protocols import Sampler, Seats


@dataclass(frozen=True, slots=True)
class Span:
    """The rows that one request brings to a step: `length` committed tokens from `start`, then its drafts.

    A prompt chunk is many tokens and no drafts, plain decoding one token and no drafts, a verification one token and k.
    """

    seq: Sequence
    start: int
    length: int
    shape: SpanShape = SpanShape()

    @property
    def width(self) -> int:
        return self.length + self.shape.size

    @property
    def samples(self) -> bool:
        """The span reaches the end of what is committed, so the step produces a token for it."""
        return self.start + self.length == len(self.seq.tokens)

    @property
    def drafts_next(self) -> bool:
        """After the step everything but the last token is computed, so the request can be drafted for.

        True for every span that samples, and for a preempted request that was recomputed up to its last token: it goes on
        with the very drafts that it had, so that preemption does not change what a seed gives.
        """
        return self.samples or (self.seq.output_len > 0 and self.start + self.length == len(self.seq.tokens) - 1)


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's rows on the device. T rows of R spans; of the spans, S sample, with the same padded width of K+1 rows.

    A row's index is its place in the request (`start + i`), which is where its KV goes; for a chain it is the position too.
    """

    ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64, by depth: siblings of a tree share one
    slots: Tensor  # [T] int64, places in the KV pool
    row_seats: Tensor  # [T] int64, whose row it is
    seat_ids: Tensor  # [R] int64
    cu_q: Tensor  # [R+1] int32, first row of each span
    kv_len: Tensor  # [R] int32, tokens that the span's last row may see, itself included
    page_table: Tensor  # [seats, P] int32, of all seats; row `seat_ids[r]` is span r's
    page_size: int
    shape: SpanShape  # of the widest span; a narrower chain is its prefix
    draft_count: Tensor  # [R] int64, drafts that span r really has
    last_row: Tensor  # [R] int64, row of the span's last committed token
    sample_spans: Tensor | None  # [S] int64, spans that sample; None: all of them
    sample_rows: Tensor  # [S, K+1] int64, rows of the last committed token and its drafts; short spans repeat their last row
    seats: Seats
    sampler: Sampler


class Hidden(NamedTuple):
    """Two views of the last layer's output. The same tensor where a family feeds its MTP layer after the final norm."""

    head: Tensor  # [rows, hidden], what the language-model head multiplies
    recycle: Tensor  # [rows, hidden], what an MTP layer is fed


@dataclass(frozen=True, slots=True)
class Verdict:
    """What verification decided, for the S spans that sample. A span without drafts gets one token: that is sampling."""

    tokens: Tensor  # [S, D+1] int64: accepted drafts, then the target's own token; what follows is void
    accepted: Tensor  # [S] int64: how many drafts survived; `accepted + 1` tokens are committed
    failed: Tensor  # [S] bool: the target's logits were not finite; the request ends with an error


@dataclass(frozen=True, slots=True)
class Drafts:
    """Proposals for the R spans. `probs` None: the drafter was deterministic, each proposal stands for a point mass."""

    tokens: Tensor  # [R, K] int64
    probs: Tensor | None  # [R, K, vocabulary] float32, the distribution each was drawn from


@dataclass(frozen=True, slots=True)
class SpanResult:
    """Host copy of one span's outcome."""

    tokens: list[int]  # committed by this step: accepted drafts and one more; empty for a chunk that ends inside the prompt
    accepted: int  # drafts among them
    proposed: list[int]  # the drafts that were verified
    drafts: int  # proposals that now wait for the next step
    failed: bool = False


@dataclass(frozen=True, slots=True)
class StepResult:
    spans: list[SpanResult]  # in the order of the spans
