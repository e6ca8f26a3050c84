"""The core.spec_sizes.SpecSizes of given options."""

from __future__ import annotations

from mtpserve.config import SpecConfig
from mtpserve.config.drafters import BLOCKS
from mtpserve.core.spec_sizes import SpecSizes

DEFERRED = 64  # rows of a request that are absorbed at once, where nothing is drafted
# drafts per request in addition to the algorithm's: what a grammar forces, or a client predicts
FREE_DRAFTS = 8


def spec_sizes(spec: SpecConfig, budget: int) -> SpecSizes:
    """`budget`: rows of a step, which must be enough for all drafts of one request."""
    if spec.steps == 0:
        return SpecSizes()
    return SpecSizes(
        steps=spec.steps,
        num_proposed=spec.nodes,
        # A tree's frontiers, topk nodes each, occupy consecutive slots.
        written=max(
            spec.nodes, spec.topk * (spec.steps - 1), spec.steps + 1 if spec.drafter in BLOCKS else 0
        ),
        free=min(FREE_DRAFTS, max(budget - spec.nodes - 1, 0)),
        always_free=spec.drafter is not None and spec.ngram,
        trees=spec.topk > 1,
        max_deferred_tokens=DEFERRED if spec.drafter is not None else 0,
    )


def coupled(spec: SpecConfig) -> bool:
    """True if all drafts are point masses coupled to the target's noise. A chain from one draft model alone
    is instead sampled and verified by rejection, which accepts more."""
    return spec.steps > 0 and (spec.topk > 1 or spec.ngram or spec.lossy)
