"""From options to a drafter."""

from __future__ import annotations

import logging
from typing import cast

import torch

from mtpserve.config import SpecConfig
from mtpserve.core.draft_sizes import DraftSizes
from mtpserve.core.protocols import AttentionBackend, CausalModel, Drafter
from mtpserve.layers.decoder import DecoderModel
from mtpserve.spec.combined import CombinedDrafter
from mtpserve.spec.mtp import MTPDrafter
from mtpserve.spec.ngram import NGramDrafter
from mtpserve.spec.null import NullDrafter
from mtpserve.spec.reduced import ReducedHead
from mtpserve.spec.sizes import coupled
from mtpserve.spec.tree import MTPTreeDrafter

log = logging.getLogger(__name__)


def reduced_head(model: CausalModel, token_map: list[int] | None) -> ReducedHead | None:
    if token_map is None:
        return None
    whole = cast(DecoderModel, model)
    tokens = torch.tensor(token_map, device=whole.embed.weight.device)
    log.info("drafting looks at %d of %d tokens", len(tokens), model.arch.vocab)
    return ReducedHead(tokens, model.arch.vocab, whole.logits_of(tokens))


def make_drafter(
    spec: SpecConfig, sizes: DraftSizes, model: CausalModel, attention: AttentionBackend, token_map: list[int] | None = None
) -> Drafter:
    """A chain of the MTP layer's own is sampled and judged by its q, which accepts most; beside other sources, and in a tree, drafts
    are point masses that follow the target's own noise (spec/accept)."""
    if spec.steps == 0:
        # The layer's KV is filled all the same where there is one: per-request and load control may ask for nothing, too.
        return MTPDrafter(model, attention, sizes) if "mtp" in spec.sources else NullDrafter()
    reduced = reduced_head(model, token_map)
    base: Drafter
    if "mtp" not in spec.sources:
        base = NGramDrafter(sizes)
    elif sizes.trees:
        base = MTPTreeDrafter(model, attention, sizes, spec.topk, reduced)
    else:
        base = MTPDrafter(model, attention, sizes, coupled(spec), reduced)
    return CombinedDrafter(base)
