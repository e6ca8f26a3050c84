"""What a request needs next: its rows, its pages, and how the plan says so. Functions of one sequence."""

from __future__ import annotations

from msgspec.structs import replace

from mtpserve.core.plan import BlockTableEntry, NewRequest, SpanPlan
from mtpserve.core.state.request_state import RequestState


def decodes(req: RequestState) -> bool:
    """All but the last token is computed, and it can have more."""
    expected = req.num_expected_tokens
    return req.num_scheduled_tokens == expected - 1 and expected < req.max_num_tokens


def ends(req: RequestState) -> bool:
    """What is in flight fills its last place."""
    return req.num_expected_tokens >= req.max_num_tokens


def useful_drafts(req: RequestState) -> int:
    # With room for r tokens: r - 1 drafts and the target's own token fill it.
    return min(req.num_draft_tokens, req.max_num_tokens - req.num_expected_tokens - 1)


def to_compute(req: RequestState) -> int:
    """Tokens that a request without a seat, or with a part of its prompt computed, comes to by its first
    verification."""
    return min(len(req.tokens) + req.num_write_ahead + 1, req.max_num_tokens)


def next_span(req: RequestState, length: int, drafts: int = 0) -> SpanPlan:
    """The request's next rows."""
    assert req.req_idx is not None
    end, expected = req.num_scheduled_tokens + length, req.num_expected_tokens
    samples = end == expected
    drafts_next = samples or (expected > req.num_prompt_tokens and end == expected - 1)
    return SpanPlan(
        req.req_idx,
        req.num_scheduled_tokens,
        length,
        drafts,
        samples,
        drafts_next,
        req.draft.max_draft_tokens if drafts_next else None,
    )


def chunk(req: RequestState, rows: int) -> SpanPlan:
    """The next committed tokens to compute, at most so many.

    fresh prompt   |=======|=======|====|      the last chunk reaches the end and samples
    recomputed     |=======|=======|===|x      stops before x, which it once sampled: x is verified with
                                               drafts, as it was
    """
    return next_span(req, min(req.prefill_end - req.num_scheduled_tokens, rows))


def deferred(
    decoding: list[tuple[RequestState, SpanPlan]],
    draft_depth: int,
    max_deferred_tokens: int,
    beside_prompts: bool,
) -> list[tuple[RequestState, SpanPlan]]:
    """Decides for each decoding span when the draft model stores the KV of its row: with this step, or with a
    later one.

    draft_depth 0, no drafts to verify     defer, until a request has `max_deferred_tokens` such rows
    drafts are wanted or verified          store all deferred rows now
    `beside_prompts`                       the pass runs anyway: only requests with deferred rows go on
    """
    has_drafts = has_deferred = is_full = False
    for req, span in decoding:
        has_drafts = has_drafts or span.num_draft_tokens > 0
        has_deferred = has_deferred or req.draft.num_deferred_tokens > 0
        is_full = is_full or req.draft.num_deferred_tokens == max_deferred_tokens
    may_defer = draft_depth == 0 and not has_drafts
    if not may_defer and not has_deferred:
        return decoding
    spans: list[tuple[RequestState, SpanPlan]] = []
    for req, span in decoding:
        defers = may_defer and (not beside_prompts or (req.draft.num_deferred_tokens > 0 and not is_full))
        num_rows = req.draft.num_deferred_tokens if is_full or not defers else 0
        req.draft.num_deferred_tokens += defers - num_rows
        if defers or num_rows:
            span = replace(span, defers_kv=defers, num_deferred_tokens=num_rows)
        spans.append((req, span))
    return spans


def admission(req: RequestState) -> NewRequest:
    assert req.req_idx is not None
    output_ids, cache = req.tokens[req.num_prompt_tokens :], req.cache
    return NewRequest(
        req.req_idx, req.request, output_ids, req.num_computed_tokens, req.max_num_tokens,
        cache.num_shared_tokens, req.draft.coupled, cache.start_state, req.queue.adapter_slot,
    )  # fmt: skip


def new_blocks(req: RequestState, groups: int) -> list[BlockTableEntry]:
    """Pages of the first `groups` groups that no plan has named yet."""
    if not req.cache.has_new_blocks:
        return []
    assert req.req_idx is not None
    entries, req.cache.has_new_blocks = list[BlockTableEntry](), False
    for group, blocks in enumerate(req.cache.blocks[:groups]):
        first, blocks.planned_end = max(blocks.planned_end, blocks.first), blocks.end
        pages = blocks.pages[first - blocks.first :]
        entries += [(group, req.req_idx, column, page) for column, page in enumerate(pages, first)]
    return entries
