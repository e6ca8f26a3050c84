"""The counters of one engine. What they mean is written at core.request.EngineStats; who reads them is the server's business."""

from __future__ import annotations

from mtpserve.core.batch import Source
from mtpserve.core.request import EngineStats, Finish
from mtpserve.engine.scheduler import Outcome


def new_stats(depth: int, pages_total: int) -> EngineStats:
    """`depth` of the deepest draft."""
    return EngineStats(
        pages_total=pages_total,
        draft_tokens_per_position=[0] * depth,
        accepted_tokens_per_position=[0] * depth,
        accept_lengths=[0] * (depth + 1),
        draft_tokens_by_source={source.name.lower(): 0 for source in Source},
        accepted_tokens_by_source={source.name.lower(): 0 for source in Source},
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
    if outcome.proposal.tokens:
        _count_verification(stats, outcome)


def _count_verification(stats: EngineStats, outcome: Outcome) -> None:
    proposal = outcome.proposal
    stats.drafts_total += 1
    stats.draft_tokens_total += len(proposal.tokens)
    stats.accepted_tokens_total += outcome.accepted
    depths = [0]
    for parent, source in zip(proposal.parents, proposal.sources, strict=True):
        depths.append(depths[parent] + 1)
        stats.draft_tokens_per_position[depths[-1] - 1] += 1
        stats.draft_tokens_by_source[source] += 1
    for depth, node in enumerate(proposal.path[: outcome.accepted]):
        stats.accepted_tokens_per_position[depth] += 1
        stats.accepted_tokens_by_source[proposal.sources[node - 1]] += 1
    stats.accept_lengths[len(outcome.tokens) - 1] += 1
