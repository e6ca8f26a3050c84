"""The counters of one engine. What they mean is written at core.request.EngineStats; who reads them is the server's business."""

from __future__ import annotations

from mtpserve.core.request import EngineStats
from mtpserve.core.sequence import Finish
from mtpserve.engine.scheduler import Outcome


def new_stats(max_drafts: int, pages_total: int) -> EngineStats:
    return EngineStats(
        pages_total=pages_total,
        draft_tokens_per_position=[0] * max_drafts,
        accepted_tokens_per_position=[0] * max_drafts,
        accept_lengths=[0] * (max_drafts + 1),
    )


def count(stats: EngineStats, outcome: Outcome) -> None:
    """Add one request's share of one step. A prompt counts once, with its first token, however often it was recomputed."""
    seq = outcome.seq
    stats.failed_requests_total += seq.finish is Finish.ERROR
    if not outcome.tokens:
        return
    stats.generation_tokens_total += len(outcome.tokens)
    if seq.output_len == len(outcome.tokens):
        stats.prompt_tokens_total += seq.prompt_len
    if outcome.proposed:
        _count_verification(stats, outcome)


def _count_verification(stats: EngineStats, outcome: Outcome) -> None:
    stats.drafts_total += 1
    stats.draft_tokens_total += len(outcome.proposed)
    stats.accepted_tokens_total += outcome.accepted
    for position in range(len(outcome.proposed)):
        stats.draft_tokens_per_position[position] += 1
        stats.accepted_tokens_per_position[position] += position < outcome.accepted
    stats.accept_lengths[len(outcome.tokens) - 1] += 1
