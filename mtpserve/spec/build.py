"""The drafter of given options."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import cast

import torch

from mtpserve.cache.boundary import BoundaryRows
from mtpserve.config import SpecConfig
from mtpserve.config.drafters import DRAFTERS
from mtpserve.core.arch.model import Features
from mtpserve.core.batch import Batch, Drafts, Hidden, VerifyOutput
from mtpserve.core.errors import ConfigError
from mtpserve.core.protocols.models import Drafter, DraftModel, Trunk
from mtpserve.core.spec_sizes import SpecShape, SpecSizes
from mtpserve.layers.decoder import DecoderModel
from mtpserve.spec.draft.chain import ChainDrafter
from mtpserve.spec.draft.combined import CombinedDrafter
from mtpserve.spec.draft.ngram import NGramDrafter
from mtpserve.spec.draft.passes import DraftPasses
from mtpserve.spec.draft.propose import ReducedHead
from mtpserve.spec.draft.tree import TreeDrafter
from mtpserve.spec.sizes import coupled, spec_sizes

log = logging.getLogger(__name__)


class DraftersByShape:
    """Drafters over one draft model, made when they are asked for: none needs more room than `largest`, which
    the engine was built with."""

    def __init__(self, spec: SpecConfig, budget: int, passes: DraftPasses | None, largest: SpecSizes) -> None:
        self.spec, self.budget, self.passes, self.largest = spec, budget, passes, largest
        self.drafters: dict[SpecShape, Drafter] = {}

    @property
    def boundary(self) -> BoundaryRows | None:
        """The rows that the draft model has for each page."""
        return None if self.passes is None else self.passes.boundary

    def of(self, shape: SpecShape) -> Drafter:
        """Returns the drafter of a shape; without steps it drafts as if no draft model had been loaded.
        Raises ConfigError for more than the engine was built with."""
        if shape not in self.drafters:
            self.drafters[shape] = self.make(shape) if shape.steps else NullDrafter()
        return self.drafters[shape]

    def make(self, shape: SpecShape) -> Drafter:
        spec = replace(
            self.spec,
            speculative_num_steps=shape.steps, speculative_eagle_topk=shape.topk,
            speculative_num_draft_tokens=shape.nodes + 1,
        )  # fmt: skip
        sizes = spec_sizes(spec, self.budget)
        sizes = replace(
            sizes,
            free=min(sizes.free, self.largest.free),
            max_deferred_tokens=self.largest.max_deferred_tokens,
        )
        if not self.largest.holds(sizes):
            raise ConfigError(f"{shape} drafts more than the engine was built for: {self.largest}")
        return make_drafter(spec, sizes, self.passes)


class NullDrafter:
    """No drafts: with this drafter a step is ordinary decoding."""

    sizes = SpecSizes()
    features, lag = Features(), None
    coupled = False
    graph_safe = True

    def draft(self, batch: Batch, hidden: Hidden, verify_output: VerifyOutput) -> Drafts | None:
        return None

    def store_deferred_kv(self, batch: Batch) -> None:
        """There is no draft model."""


def reduced_head(trunk: Trunk, model: DraftModel, token_map: list[int] | None) -> ReducedHead | None:
    """Returns the head for drafting with fewer tokens than the vocabulary: by the operator's map, or because
    the draft model has no more. None: all tokens."""
    model_tokens = model.tokens
    if model_tokens is not None:
        return ReducedHead(model_tokens, trunk.arch.vocab, model.logits)
    if token_map is None:
        return None
    decoder = cast(DecoderModel, trunk)
    tokens = torch.tensor(token_map, device=decoder.norm.weight.device)
    log.info("the draft head has %d of the %d tokens", len(tokens), trunk.arch.vocab)
    multiply = decoder.logits_of(tokens)
    return ReducedHead(tokens, trunk.arch.vocab, lambda head, depth: multiply(head))


def make_draft_model(spec: SpecConfig, trunk: Trunk) -> DraftModel | None:
    return None if spec.drafter is None else DRAFTERS.get(spec.drafter).build(trunk)


def make_drafter(spec: SpecConfig, sizes: SpecSizes, passes: DraftPasses | None) -> Drafter:
    """A chain from one draft model alone is sampled and verified by rejection with its q, which accepts most;
    together with other sources, and in a tree, drafts are point masses coupled to the target's noise
    (spec/verify/accept). `passes` None: no model drafts."""
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
