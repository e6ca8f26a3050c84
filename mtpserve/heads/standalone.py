"""A model of its own as the draft model (https://arxiv.org/abs/2211.17192): any family that keeps all it
knows of a text in pages, with the target's tokens. It gets no features of the target, and its rows are stored
in the same pages.

Models of one tokenizer may pad their embeddings to different sizes (Qwen2.5: 151,936 rows up to 3B, 152,064
from 7B on). What only the target has is never drafted, and what only the draft model has is left out."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from mtpserve.config import EngineConfig
from mtpserve.core.arch.model import Attention, DraftArch, Features, LayerKind, ModelArch
from mtpserve.core.batch import Hidden
from mtpserve.core.errors import UnsupportedModel
from mtpserve.core.protocols.attention import Context
from mtpserve.heads.head import Head, Separate, opened
from mtpserve.layers.decoder import DecoderModel, Methods
from mtpserve.layers.kernels import Kernels
from mtpserve.models.family import Family, as_stored, without_mtp
from mtpserve.models.registry import family_of
from mtpserve.weights.checkpoint.hf import read_config
from mtpserve.weights.checkpoint.layouts import mtp_layers

log = logging.getLogger(__name__)


class StandaloneModel(nn.Module):
    """core.protocols.models.DraftModel."""

    lag, at_once, mask, features = 0, False, None, Features()

    def __init__(self, model: DecoderModel, layers: tuple[LayerKind, ...], vocab: int) -> None:
        """`vocab`: the target's."""
        super().__init__()
        self.model, self.layers, self.vocab = model, layers, vocab

    @property
    def tokens(self) -> Tensor | None:
        vocab_size = self.model.arch.vocab
        return (
            None
            if vocab_size >= self.vocab
            else torch.arange(vocab_size, device=self.model.norm.weight.device)
        )

    def extend(
        self, ids: Tensor, positions: Tensor, features: Tensor | None, contexts: Sequence[Context]
    ) -> Hidden:
        if self.model.arch.vocab < self.vocab:  # padding that the target has said
            ids = ids.clamp(max=self.model.arch.vocab - 1)
        return self.model.trunk(ids, positions, contexts, self.features)

    def step(
        self, ids: Tensor, positions: Tensor, state: Tensor | None, contexts: Sequence[Context]
    ) -> Hidden:
        return self.extend(ids, positions, state, contexts)

    def store_kv(
        self, ids: Tensor, positions: Tensor, features: Tensor | None, contexts: Sequence[Context]
    ) -> None:
        """A layer's keys need the output of the one before it, so that nothing but the last layer's output
        could be left out."""
        self.extend(ids, positions, features, contexts)

    def logits(self, head: Tensor, depth: int) -> Tensor:
        return self.model.logits(head)[:, : self.vocab]


class Standalone(Separate):
    """core.protocols.DraftSource."""

    def open(self, directory: Path, config: EngineConfig, trunk: ModelArch) -> Head:
        values = read_config(directory)
        family, checkpoint = family_of(values), opened(directory, config)
        arch = as_stored(family, family.arch(values, 0), checkpoint)
        longest = config.model.context_length or trunk.max_positions
        if arch.max_positions < longest:
            log.warning(
                "%s: the draft model has %d positions and requests may have %d tokens: drafts after "
                "that may be worse",
                values.path,
                arch.max_positions,
                longest,
            )
        layers = tuple(
            replace(kind, heads=arch.heads_of(kind))
            for kind in arch.layers
            if isinstance(kind, Attention) and paged(kind)
        )
        if len(layers) < len(arch.layers) or arch.streams is not None:
            why = (
                "a draft model keeps nothing but keys and values of each token, no states and no "
                "entries of several tokens"
            )
            raise UnsupportedModel(
                f"{values.path}: a {arch.family} model cannot draft for another one: {why}"
            )
        mtp = mtp_layers(checkpoint.tensors, arch.num_layers)
        rules = family.trunk_rules(arch) + without_mtp(values, mtp, arch.num_layers)
        rules = [
            rule if rule.target is None else replace(rule, target=f"model.{rule.target}") for rule in rules
        ]
        kind = f"draft model ({arch.family}, {arch.num_layers} layers of {arch.hidden})"
        drafts = DraftArch(kind, layers, scale=arch.scale, own_head=True)
        return Head(checkpoint, drafts, rules, partial(make, family, arch, layers), vocab=arch.vocab)


def paged(kind: Attention) -> bool:
    return kind.compressed is None


def make(
    family: Family, arch: ModelArch, layers: tuple[LayerKind, ...], trunk: DecoderModel, methods: Methods,
    dtype: torch.dtype,
    positions: int, kernels: Kernels,
) -> StandaloneModel:  # fmt: skip
    draft_methods = Methods(methods.draft, methods.draft_head or methods.head, methods.draft)
    return StandaloneModel(
        family.build(arch, draft_methods, dtype, positions, kernels), layers, trunk.arch.vocab
    )


STANDALONE = Standalone()
