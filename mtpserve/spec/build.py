"""From options to a drafter."""

from __future__ import annotations

import logging
from typing import cast

import torch

from mtpserve.config import SpecConfig
from mtpserve.core.arch import Features
from mtpserve.core.batch import Batch, Drafts, Hidden, Verdict, Want
from mtpserve.core.draft_sizes import DraftSizes
from mtpserve.core.drafters import DRAFTERS
from mtpserve.core.protocols import Drafter, DraftModel, Trunk
from mtpserve.layers.decoder import DecoderModel
from mtpserve.spec.chain import ChainDrafter
from mtpserve.spec.combined import CombinedDrafter
from mtpserve.spec.ngram import NGramDrafter
from mtpserve.spec.passes import DraftPasses, ReducedHead
from mtpserve.spec.sizes import coupled
from mtpserve.spec.tree import TreeDrafter

log = logging.getLogger(__name__)


class NullDrafter:
    """No drafts: with this drafter a step is ordinary decoding."""

    sizes = DraftSizes()
    features, lag = Features(), None
    coupled = False
    graph_safe = True

    def draft(self, batch: Batch, hidden: Hidden, verdict: Verdict, want: Want) -> Drafts | None:
        return None


def reduced_head(trunk: Trunk, token_map: list[int] | None) -> ReducedHead | None:
    if token_map is None:
        return None
    whole = cast(DecoderModel, trunk)
    tokens = torch.tensor(token_map, device=whole.norm.weight.device)
    log.info("the draft head has %d of %d tokens", len(tokens), trunk.arch.vocab)
    return ReducedHead(tokens, trunk.arch.vocab, whole.logits_of(tokens))


def make_draft_model(spec: SpecConfig, trunk: Trunk) -> DraftModel | None:
    return None if spec.drafter is None else DRAFTERS.get(spec.drafter).build(trunk)


def make_drafter(spec: SpecConfig, sizes: DraftSizes, passes: DraftPasses | None) -> Drafter:
    """A chain from one draft model alone is sampled and verified by rejection with its q, which accepts most; together with other sources,
    and in a tree, drafts are point masses coupled to the target's noise (spec/accept). `passes` None: no model drafts."""
    if spec.steps == 0:
        # A draft model's KV is still filled, as it is when a request or the load turns drafting off.
        return NullDrafter() if passes is None else ChainDrafter(passes, sizes)
    base: Drafter
    if passes is None:
        base = NGramDrafter(sizes)
    elif sizes.trees:
        base = TreeDrafter(passes, sizes, spec.topk)
    else:
        base = ChainDrafter(passes, sizes, coupled(spec))
    return CombinedDrafter(base)
