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
    """One step's rows on the device: T rows of R spans. The widest span has K drafts; narrower ones are padded where it says so.

    A row's index is its place in the request (`start + i`), which is where its KV goes; for a chain it is the position too.
    """

    ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64, by depth: siblings of a tree share one
    index: Tensor  # [T] int64, place in the request
    slots: Tensor  # [T] int64, place in the KV pool
    row_seats: Tensor  # [T] int64, whose row it is
    seat_ids: Tensor  # [R] int64
    cu_q: Tensor  # [R+1] int64, first row of each span
    kv_len: Tensor  # [R] int64, tokens in the cache after this step's rows are stored
    shape: SpanShape  # of the widest span; narrower chains are its prefixes
    draft_count: Tensor  # [R] int64, drafts that span r really has
    last_row: Tensor  # [R] int64, row of the span's last committed token
    sample_rows: Tensor  # [R, K+1] int64, that row and its drafts' rows; short spans repeat their last row
    samples: Tensor  # [R] int64, 1 where the span reaches the end of what is committed
    draft_spans: Tensor | None  # [D] int64, spans that may be drafted for; None: all
    seats: Seats
    sampler: Sampler


class Hidden(NamedTuple):
    """Two views of the last layer's output. The same tensor where a family feeds its MTP layer after the final norm."""

    head: Tensor  # [rows, hidden], what the language-model head multiplies
    recycle: Tensor  # [rows, hidden], what an MTP layer is fed


@dataclass(frozen=True, slots=True)
class Verdict:
    """What verification decided. A span without drafts gets one token: that is sampling. Void for spans that do not sample."""

    tokens: Tensor  # [R, K+1] int64: accepted drafts, then the target's own token; what follows is void
    accepted: Tensor  # [R] int64: how many drafts survived; `accepted + 1` tokens are committed
    failed: Tensor  # [R] bool: logits that decided something were not finite; the request ends with an error


@dataclass(frozen=True, slots=True)
class Drafts:
    """Proposals for the D spans that are drafted for. `probs` None: each proposal stands for a point mass."""

    tokens: Tensor  # [D, K] int64
    probs: Tensor | None  # [D, K, vocabulary] float32, the distribution each was drawn from


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
