"""The counters of proposals and verifications in core.request.EngineStats."""

from __future__ import annotations

from mtpserve.config.drafters import MTP
from mtpserve.core.batch import Source
from mtpserve.core.request import Proposal
from mtpserve.core.stats.engine_stats import STEP_TOKENS, EngineStats

FORCED = Source.GRAMMAR.name.lower()


def new_stats(depth: int, pages_total: int, drafter: str = MTP) -> EngineStats:
    """`depth` of the deepest draft; `drafter`: the draft model's name among the sources."""
    return EngineStats(
        pages_total=pages_total,
        draft_tokens_per_position=[0] * depth,
        accepted_tokens_per_position=[0] * depth,
        steps_per_depth=[0] * (depth + 1),
        accept_lengths=[0] * (depth + 1),
        step_tokens=[0] * (len(STEP_TOKENS) + 1),
        draft_tokens_by_source=dict.fromkeys(Source.names(drafter), 0),
        accepted_tokens_by_source=dict.fromkeys(Source.names(drafter), 0),
    )


def count_verification(stats: EngineStats, proposal: Proposal, accepted: int, committed: int) -> None:
    """Add one verification, of which `accepted` drafts and `committed` tokens were used. Tokens that a
    grammar forces are accepted where what is before them is: they are not counted by position, where they
    would hide how often drafts are."""
    stats.drafts_total += 1
    stats.draft_tokens_total += len(proposal.tokens)
    stats.accepted_tokens_total += accepted
    depths, per_position, by_source = [0], stats.draft_tokens_per_position, stats.draft_tokens_by_source
    for parent, source in zip(proposal.parents, proposal.sources, strict=True):
        depth = depths[parent]
        depths.append(depth + 1)
        per_position[depth] += source != FORCED
        by_source[source] += 1
    for depth, node in enumerate(proposal.path[:accepted]):
        source = proposal.sources[node - 1]
        stats.accepted_tokens_per_position[depth] += source != FORCED
        stats.accepted_tokens_by_source[source] += 1
    stats.accept_lengths[committed - 1] += 1
