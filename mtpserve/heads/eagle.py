"""EAGLE's heads: a layer that continues the trunk's hidden states (https://arxiv.org/abs/2401.15077; with
dynamic trees, EAGLE-2, https://arxiv.org/abs/2406.16858). A projection of the next token's embedding and the
hidden state after the trunk's final norm, and decoder layers, of which the first has no norm before its
attention. Their output stands for the next hidden state: the trunk's language-model head multiplies it as it
is, and the next draft is made from it.

SGLang and vLLM call it EAGLE, too, where a model drafts with its own MTP layer, and where the head that is
named is one for EAGLE-3.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from mtpserve.config import EngineConfig
from mtpserve.core.arch.model import Attention, DraftArch, Features, ModelArch
from mtpserve.core.batch import Hidden
from mtpserve.core.protocols.attention import Context
from mtpserve.core.protocols.linear import LinearMethod
from mtpserve.core.protocols.models import DraftModel, Trunk
from mtpserve.heads import gqa
from mtpserve.heads.assistant import FROZEN_KV_MTP
from mtpserve.heads.eagle3 import EAGLE3
from mtpserve.heads.head import Head, Separate, opened, same
from mtpserve.heads.kinds import FROZEN, STANDALONE, algorithm_of
from mtpserve.layers.decoder import DecoderLayer, DecoderModel, Methods, shared_head
from mtpserve.layers.kernels import Kernels, Residual
from mtpserve.layers.linear import Linear
from mtpserve.layers.mixers.attention import GQA
from mtpserve.layers.mlp import MLP
from mtpserve.layers.rope import Rope, Rotation
from mtpserve.models.family import one_layer
from mtpserve.models.gqa import layer_names
from mtpserve.weights.checkpoint.hf import read_config

THE_TRUNKS = "the trunk's"


class FirstLayer(DecoderLayer):
    """A layer without a norm before the attention."""

    def __init__(self, arch: ModelArch, attention: nn.Module, mlp: nn.Module, kernels: Kernels) -> None:
        super().__init__(arch, attention, mlp, kernels)
        self.attention_norm = None

    def forward(
        self, x: Tensor, residual: Residual | None, rotation: Rotation, context: Context
    ) -> tuple[Tensor, Residual]:
        assert (
            residual is None
            and self.attention is not None
            and self.mlp is not None
            and self.mlp_norm is not None
        )
        normed, residual = self.mlp_norm.add(self.attention(x, rotation, context), x)
        return self.mlp(normed), residual

    def store(self, x: Tensor, rotation: Rotation, context: Context) -> None:
        cast(GQA, self.attention).store(x, rotation, context)


class EagleHead(nn.Module):
    """core.protocols.models.DraftModel. Embedding and language-model head are the trunk's own objects,
    borrowed and not held as children."""

    lag, at_once, mask, tokens, features = 1, False, None, None, Features(last="post")

    def __init__(
        self,
        arch: ModelArch,
        bias: bool,
        trunk: DecoderModel,
        methods: Methods,
        dtype: torch.dtype,
        positions: int,
        kernels: Kernels,
    ) -> None:
        super().__init__()
        self.borrowed, self.layers = [trunk], arch.layers
        self.fuse = Linear(2 * arch.hidden, (arch.hidden,), methods.draft, bias=bias)
        self.blocks = nn.ModuleList(
            (FirstLayer if number == 0 else DecoderLayer)(
                arch, *blocks(arch, number, methods.draft, kernels), kernels
            )
            for number in range(len(arch.layers))
        )
        self.rope = Rope(arch.rope, positions, dtype, None)
        self.trunk_head = shared_head(trunk, methods)

    def extend(
        self, ids: Tensor, positions: Tensor, features: Tensor | None, contexts: Sequence[Context]
    ) -> Hidden:
        x = self.passed(len(self.blocks), ids, self.rope(positions), features, contexts)
        return Hidden(x, x)

    step = extend

    def store_kv(
        self, ids: Tensor, positions: Tensor, features: Tensor | None, contexts: Sequence[Context]
    ) -> None:
        rotation = self.rope(positions)
        x = self.passed(len(self.blocks) - 1, ids, rotation, features, contexts)
        cast(DecoderLayer, self.blocks[-1]).store(x, rotation, contexts[-1])

    def passed(
        self,
        number: int,
        ids: Tensor,
        rotation: Rotation,
        features: Tensor | None,
        contexts: Sequence[Context],
    ) -> Tensor:
        """→ the output of so many of the layers."""
        assert features is not None
        x: Tensor = self.fuse(torch.cat([self.borrowed[0].embed(ids), features], -1))
        residual: Tensor | None = None
        for block, context in list(zip(self.blocks, contexts, strict=True))[:number]:
            x, residual = block(x, residual, rotation, context)
        return x if residual is None else x + residual

    def logits(self, head: Tensor, depth: int) -> Tensor:
        return self.trunk_head(head)


def blocks(arch: ModelArch, number: int, method: LinearMethod, kernels: Kernels) -> tuple[GQA, MLP]:
    kind = arch.layers[number]
    assert isinstance(kind, Attention)
    return GQA(arch, kind, method, kernels), MLP(arch.hidden, arch.intermediate, method, kernels)


class Eagle(Separate):
    """core.protocols.DraftSource."""

    def in_checkpoint(self, path: str | None) -> bool:
        return path is None or algorithm_of(Path(path)) in ("NEXTN", STANDALONE)

    def build(self, trunk: Trunk) -> DraftModel:
        layer = cast(DecoderModel, trunk).mtp_head
        return super().build(trunk) if layer is None else cast(DraftModel, layer)

    def open(self, directory: Path, config: EngineConfig, trunk: ModelArch) -> Head:
        if (kind := algorithm_of(directory)) in ("EAGLE3", FROZEN):
            return (EAGLE3 if kind == "EAGLE3" else FROZEN_KV_MTP).open(directory, config, trunk)
        values, checkpoint = read_config(directory), opened(directory, config)
        arch = gqa.arch(values, checkpoint, "eagle", trunk)
        same("hidden_size", values, arch.hidden, trunk.hidden)
        same("vocab_size", values, arch.vocab, trunk.vocab)
        bias = gqa.stores(checkpoint, "fc.bias", values.get_bool("bias", True))
        prefix, numbers = gqa.prefix_of(checkpoint), range(len(arch.layers))
        fuse = [(r"fc\.weight", "fuse.weight")] + ([(r"fc\.bias", "fuse.bias")] if bias else [])
        rules = gqa.rules(prefix, fuse, [(r"embed_tokens\.weight", THE_TRUNKS)]) + gqa.rules(
            "", [], [(r"lm_head\.weight", THE_TRUNKS)]
        )
        without = [entry for entry in layer_names(arch) if entry[1] != "attention_norm.weight"]
        for number in numbers:
            names = layer_names(arch) if number else without
            rules += one_layer(f"{prefix}layers.{number}.", f"blocks.{number}.", names)
        layers = "a layer" if len(numbers) == 1 else f"{len(numbers)} layers"
        drafts = DraftArch(f"EAGLE head ({layers})", arch.layers, EagleHead.features, scale=arch.scale)
        return Head(checkpoint, drafts, rules, partial(EagleHead, arch, bias))


EAGLE = Eagle()
