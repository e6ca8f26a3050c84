"""From options to the sizes that drafting has; see core.draft_sizes for what they mean."""

from __future__ import annotations

from mtpserve.config import FREE_DRAFTS, SpecConfig
from mtpserve.core.draft_sizes import DraftSizes


def draft_sizes(spec: SpecConfig, budget: int) -> DraftSizes:
    """A step of `budget` rows must hold all drafts of a request."""
    if spec.steps == 0:
        return DraftSizes()
    return DraftSizes(
        steps=spec.steps,
        proposed=spec.nodes,
        # A tree's frontiers of topk nodes each lie one after the other, whatever they continue.
        written=max(spec.nodes, spec.topk * (spec.steps - 1)),
        free=min(FREE_DRAFTS, max(budget - spec.nodes - 1, 0)),
        always_free=spec.drafter is not None and spec.ngram,
        trees=spec.topk > 1,
    )


def coupled(spec: SpecConfig) -> bool:
    """Whether all drafts are point masses that follow the target's own noise. A chain that comes from one model alone is sampled instead
    and judged by its distribution, which accepts more."""
    return spec.steps > 0 and (spec.topk > 1 or spec.ngram or spec.lossy)
