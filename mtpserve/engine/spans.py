"""What a request needs next: its rows, its pages, and how the plan says so. Functions of one sequence."""

from __future__ import annotations

from msgspec.structs import replace

from mtpserve.core.plan import Admission, NewPages, SpanPlan
from mtpserve.core.sequence import Sequence


def decodes(seq: Sequence) -> bool:
    """All but the last token is computed, and it can have more."""
    expected = seq.expected
    return seq.launched == expected - 1 and expected < seq.max_len


def ends(seq: Sequence) -> bool:
    """What is in flight fills its last place."""
    return seq.expected >= seq.max_len


def useful_drafts(seq: Sequence) -> int:
    # With room for r tokens: r - 1 drafts and the target's own token fill it.
    return min(seq.drafts, seq.max_len - seq.expected - 1)


def to_compute(seq: Sequence) -> int:
    """Tokens that a request without a seat, or with a part of its prompt computed, comes to by its first verification."""
    return min(len(seq.tokens) + seq.reach + 1, seq.max_len)


def next_span(seq: Sequence, length: int, drafts: int = 0) -> SpanPlan:
    """The request's next rows."""
    assert seq.seat is not None
    end, expected = seq.launched + length, seq.expected
    samples = end == expected
    drafts_next = samples or (expected > seq.prompt_len and end == expected - 1)
    return SpanPlan(seq.seat, seq.launched, length, drafts, samples, drafts_next, seq.most if drafts_next else None)


def chunk(seq: Sequence, rows: int) -> SpanPlan:
    """The next committed tokens to compute, at most so many.

    fresh prompt   |=======|=======|====|      the last chunk reaches the end and samples
    recomputed     |=======|=======|===|x      stops before x, which it once sampled: x is verified with drafts, as it was
    """
    return next_span(seq, min(seq.prefill_end - seq.launched, rows))


def deferred(decoding: list[tuple[Sequence, SpanPlan]], want: int, most: int, beside: bool) -> list[tuple[Sequence, SpanPlan]]:
    """Spans of requests that decode, told when a draft model absorbs their rows: while nothing is drafted in a later step, after `most`
    rows or when drafts are wanted. `beside` prompts that are computed together with them, whose rows are absorbed with this step, only
    those wait whose earlier rows do."""
    drafted = late = full = False
    for seq, span in decoding:
        drafted, late, full = drafted or span.drafts > 0, late or seq.deferred > 0, full or seq.deferred == most
    defers = want == 0 and not drafted
    if not defers and not late:
        return decoding
    spans: list[tuple[Sequence, SpanPlan]] = []
    for seq, span in decoding:
        waits = defers and (not beside or (seq.deferred > 0 and not full))
        rows = seq.deferred if full or not waits else 0
        seq.deferred += waits - rows
        spans.append((seq, replace(span, deferred=waits, late=rows) if waits or rows else span))
    return spans


def admission(seq: Sequence) -> Admission:
    assert seq.seat is not None
    return Admission(
        seq.seat, seq.id, list(seq.tokens), seq.prompt_len, seq.computed, seq.max_len, seq.seed, seq.sampling, seq.bad_words,
        seq.prediction, seq.depth, seq.shared, seq.coupled, seq.state,
    )  # fmt: skip


def new_pages(seq: Sequence, groups: int) -> list[NewPages]:
    """Those that no plan has named, of the first `groups` groups."""
    assert seq.seat is not None
    new, seq.grown = list[NewPages](), False
    for group, held in enumerate(seq.held[:groups]):
        first, held.planned = max(held.planned, held.first), held.end
        if first < held.end:
            new.append(NewPages(seq.seat, first, held.pages[first - held.first :], group))
    return new
