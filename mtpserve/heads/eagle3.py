"""EAGLE-3's heads (https://arxiv.org/abs/2503.01840): a projection of the outputs of a low, a middle and a
high layer of the trunk, and a layer whose attention gets [norm(next token's embedding); norm(projected)].
Later drafts get its output in the place of the projected. The language-model head has the most frequent
tokens alone: row i is token i + d2t[i].

Published in three layouts:

    the authors', SpecForge's    midlayer.*   config: of a Llama with draft_vocab_size; eagle_config
    speculators'                 layers.0.*   config: transformer_layer_config; EAGLE-3's fields beside it

EAGLE 3.1 norms what is tapped, each layer's apart (fc_norm) or all together (norm_before_fc), and lets later
drafts get the normed output (norm_output). `eagle_aux_hidden_state_layer_ids` at the top counts, as in vLLM,
inputs of layers, so that 2 is the output of layer 1; in eagle_config it counts outputs, as in SGLang.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from mtpserve.config import EngineConfig
from mtpserve.core.arch.model import Attention, DraftArch, Features, ModelArch
from mtpserve.core.batch import Hidden
from mtpserve.core.errors import LoadError
from mtpserve.core.protocols.attention import Context
from mtpserve.heads import gqa
from mtpserve.heads.head import Head, Separate, opened, same
from mtpserve.layers.decoder import DecoderLayer, DecoderModel, Methods, shared_head
from mtpserve.layers.embedding import Embedding
from mtpserve.layers.kernels import Kernels, Residual
from mtpserve.layers.linear import Linear
from mtpserve.layers.mixers.attention import GQA
from mtpserve.layers.mlp import MLP
from mtpserve.layers.norm import RMSNorm
from mtpserve.layers.rope import Rope, Rotation
from mtpserve.models.family import one_layer
from mtpserve.models.gqa import layer_names
from mtpserve.weights.checkpoint.checkpoint import Checkpoint
from mtpserve.weights.checkpoint.hf import read_config
from mtpserve.weights.checkpoint.hf_config import HFConfig
from mtpserve.weights.rules import Copy, Rule

IDS = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, slots=True)
class Eagle3Arch:
    """`layers`: the head's own, in its own sizes."""

    layers: ModelArch
    trunk: int  # hidden size of the model
    # layers whose outputs are tapped; none: the last hidden state, which is not projected
    taps: tuple[int, ...]
    drafts: int  # tokens of its language-model head
    mapped: bool  # it has d2t
    own_embedding: bool
    own_head: bool
    fuse_bias: bool
    norms: str | None  # norms of tapped layers: "each" apart, "all" together
    norm_output: bool
    norm_before_residual: bool

    @property
    def features(self) -> Features:
        return Features(taps=self.taps) if self.taps else Features(last="post")


class JoiningLayer(nn.Module):
    """The first layer. Its residual is the hidden state before or after its norm."""

    def __init__(self, arch: Eagle3Arch, methods: Methods, kernels: Kernels) -> None:
        super().__init__()
        layer = arch.layers
        self.norm_before_residual = arch.norm_before_residual
        self.attention_norm, self.hidden_norm, self.mlp_norm = (
            RMSNorm(layer.hidden, layer.norm_eps, kernels) for _ in range(3)
        )
        self.attention = GQA(layer, layer.attention(0), methods.draft, kernels, inputs=2 * layer.hidden)
        self.mlp = MLP(layer.hidden, layer.intermediate, methods.draft, kernels)

    def forward(
        self, embedded: Tensor, hidden: Tensor, rotation: Rotation, context: Context
    ) -> tuple[Tensor, Residual]:
        joined, normed = self.joined(embedded, hidden)
        residual = normed if self.norm_before_residual else hidden
        x, residual = self.mlp_norm.add(self.attention(joined, rotation, context), residual)
        return self.mlp(x), residual

    def store(self, embedded: Tensor, hidden: Tensor, rotation: Rotation, context: Context) -> None:
        """Stores keys and values, the part of `forward` that other rows need."""
        self.attention.store(self.joined(embedded, hidden)[0], rotation, context)

    def joined(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """→ the attention's input, and its second half."""
        normed = self.hidden_norm(hidden)
        return torch.cat([self.attention_norm(embedded), normed], -1), normed


class Projection(nn.Module):
    """The projection from tapped layers to the head's hidden size."""

    def __init__(self, arch: Eagle3Arch, methods: Methods, kernels: Kernels) -> None:
        super().__init__()
        width, eps = len(arch.taps) * arch.trunk, arch.layers.norm_eps
        self.trunk = arch.trunk
        self.all_norm = RMSNorm(width, eps, kernels) if arch.norms == "all" else None
        num_norms = len(arch.taps) if arch.norms == "each" else 0
        self.each_norm = nn.ModuleList(RMSNorm(arch.trunk, eps, kernels) for _ in range(num_norms))
        self.project = Linear(width, (arch.layers.hidden,), methods.draft, bias=arch.fuse_bias)

    def forward(self, tapped: Tensor) -> Tensor:
        """[T, taps * trunk] → [T, hidden]"""
        if self.all_norm is not None:
            tapped = self.all_norm(tapped)
        if len(self.each_norm):
            parts = zip(self.each_norm, tapped.split(self.trunk, -1), strict=True)
            tapped = torch.cat([norm(chunk.contiguous()) for norm, chunk in parts], -1)
        return self.project(tapped)  # type: ignore[no-any-return]


class Eagle3Head(nn.Module):
    """core.protocols.models.DraftModel. What it has not of its own is the trunk's, borrowed and not held as a
    child."""

    lag, at_once, mask = 1, False, None

    def __init__(
        self,
        arch: Eagle3Arch,
        trunk: DecoderModel,
        methods: Methods,
        dtype: torch.dtype,
        positions: int,
        kernels: Kernels,
    ) -> None:
        super().__init__()
        layer = arch.layers
        self.arch, self.features, self.layers = arch, arch.features, layer.layers
        self.embed = Embedding(layer.vocab, layer.hidden) if arch.own_embedding else None
        self.borrowed = [trunk]
        self.fuse = Projection(arch, methods, kernels) if arch.taps else None
        self.first = JoiningLayer(arch, methods, kernels)
        self.blocks = nn.ModuleList(
            DecoderLayer(
                layer,
                GQA(layer, kind, methods.draft, kernels),
                MLP(layer.hidden, layer.intermediate, methods.draft, kernels),
                kernels,
            )
            for kind in layer.layers[1:]
            if isinstance(kind, Attention)
        )
        self.norm = RMSNorm(layer.hidden, layer.norm_eps, kernels)
        self.rope = Rope(layer.rope, positions, dtype, None)
        self.d2t = (
            nn.Parameter(torch.empty(arch.drafts, dtype=torch.int64), requires_grad=False)
            if arch.mapped
            else None
        )
        self.head = (
            Linear(layer.hidden, (arch.drafts,), methods.draft_head or methods.head)
            if arch.own_head
            else None
        )
        self.trunk_head = None if arch.own_head else shared_head(trunk, methods)

    @property
    def tokens(self) -> Tensor | None:
        if self.arch.drafts == self.arch.layers.vocab:
            return None
        rows = torch.arange(self.arch.drafts, device=self.norm.weight.device)
        return rows if self.d2t is None else rows + self.d2t

    def finish_loading(self) -> None:
        tokens, vocab = self.tokens, self.arch.layers.vocab
        if tokens is not None and not (
            bool((tokens.diff() > 0).all()) and tokens[0] >= 0 and tokens[-1] < vocab
        ):
            raise LoadError(f"d2t of the EAGLE-3 head must give ascending tokens below {vocab}")

    def extend(
        self, ids: Tensor, positions: Tensor, features: Tensor | None, contexts: Sequence[Context]
    ) -> Hidden:
        return self.step(ids, positions, self.fused(features), contexts)

    def step(
        self, ids: Tensor, positions: Tensor, state: Tensor | None, contexts: Sequence[Context]
    ) -> Hidden:
        assert state is not None
        rotation = self.rope(positions)
        x, residual = self.first(self.embedded(ids), state, rotation, contexts[0])
        for block, context in zip(self.blocks, contexts[1:], strict=True):
            x, residual = block(x, residual, rotation, context)
        normed, x = self.norm.add(x, residual)
        return Hidden(normed, normed if self.arch.norm_output else x)

    def store_kv(
        self, ids: Tensor, positions: Tensor, features: Tensor | None, contexts: Sequence[Context]
    ) -> None:
        rotation, embedded, hidden = self.rope(positions), self.embedded(ids), self.fused(features)
        if len(contexts) == 1:
            self.first.store(embedded, hidden, rotation, contexts[0])
            return
        x, residual = self.first(embedded, hidden, rotation, contexts[0])
        *inner, last = self.blocks
        for block, context in zip(inner, contexts[1:-1], strict=True):
            x, residual = block(x, residual, rotation, context)
        cast(DecoderLayer, last).store(x + residual, rotation, contexts[-1])

    def embedded(self, ids: Tensor) -> Tensor:
        embed = self.borrowed[0].embed if self.embed is None else self.embed
        return embed(ids)  # type: ignore[no-any-return]

    def fused(self, features: Tensor | None) -> Tensor:
        assert features is not None
        return features if self.fuse is None else self.fuse(features)

    def logits(self, head: Tensor, depth: int) -> Tensor:
        if self.trunk_head is not None:
            return self.trunk_head(head)
        assert self.head is not None
        return self.head(head, torch.float32)  # type: ignore[no-any-return]


class Eagle3(Separate):
    """core.protocols.DraftSource."""

    def open(self, directory: Path, config: EngineConfig, trunk: ModelArch) -> Head:
        values, checkpoint = read_config(directory), opened(directory, config)
        arch = arch_of(values, checkpoint, trunk)
        kind = f"EAGLE-3 head ({describe(arch)})"
        drafts = DraftArch(
            kind, arch.layers.layers, arch.features, scale=arch.layers.scale, own_head=arch.own_head
        )
        return Head(checkpoint, drafts, rules(arch, checkpoint), partial(Eagle3Head, arch))


def describe(arch: Eagle3Arch) -> str:
    taps = f"taps {', '.join(map(str, arch.taps))}" if arch.taps else "last hidden state"
    return f"{taps}, {arch.drafts:,} tokens"


def arch_of(values: HFConfig, checkpoint: Checkpoint, trunk: ModelArch) -> Eagle3Arch:
    """Raises LoadError, UnsupportedModel, or ConfigError where head and trunk do not fit together."""
    inner, eagle = values.section("transformer_layer_config"), values.section("eagle_config")
    flat = HFConfig(values.path, eagle.values | values.values | inner.values)
    layers = gqa.arch(flat, checkpoint, "eagle3", trunk)
    same("vocab_size", values, layers.vocab, trunk.vocab)
    apart = flat.has("target_hidden_size")
    same(
        "target_hidden_size" if apart else "hidden_size",
        values,
        flat.get_int("target_hidden_size", layers.hidden),
        trunk.hidden,
    )
    drafts = flat.get_int("draft_vocab_size", layers.vocab, at_least=1)
    flat.require(drafts <= layers.vocab, "draft_vocab_size", f"at most vocab_size = {layers.vocab}")
    dummy = not checkpoint.tensors
    mapped = drafts < layers.vocab and not dummy
    if mapped and "d2t" not in checkpoint.tensors:
        raise LoadError(
            f"{checkpoint.directory}: d2t is missing: draft_vocab_size is {drafts}, and nothing "
            f"says which tokens these are"
        )
    own_embedding = gqa.stores(checkpoint, "embed_tokens.weight", layers.hidden != trunk.hidden)
    own_head = gqa.stores(checkpoint, "lm_head.weight", True)
    for name, is_stored in (("embed_tokens.weight", own_embedding), ("lm_head.weight", own_head)):
        shared = layers.hidden == trunk.hidden and (name != "lm_head.weight" or drafts == trunk.vocab)
        if not is_stored and not shared:
            raise LoadError(
                f"{checkpoint.directory}: {name} is missing, and the model's has another size than "
                f"the head needs"
            )
    fc_norm, together = flat.get_bool("fc_norm", False), flat.get_bool("norm_before_fc", False)
    flat.require(not (fc_norm and together), "fc_norm", "false together with norm_before_fc")
    return Eagle3Arch(
        layers=layers,
        trunk=trunk.hidden,
        taps=taps_of(flat, values, eagle, trunk.num_layers),
        drafts=drafts,
        mapped=mapped,
        own_embedding=own_embedding,
        own_head=own_head,
        fuse_bias=gqa.stores(checkpoint, "fc.bias", flat.get_bool("bias", False)),
        norms="each" if fc_norm else "all" if together else None,
        norm_output=flat.get_bool("norm_output", False),
        norm_before_residual=flat.get_bool("norm_before_residual", False),
    )


def taps_of(flat: HFConfig, top: HFConfig, eagle: HFConfig, layers: int) -> tuple[int, ...]:
    """Layers of the trunk whose outputs are tapped, ascending."""
    if not flat.get_bool("use_aux_hidden_state", True):
        return ()
    layer_ids: Any = top.raw(IDS) or eagle.raw(IDS)
    where, before = (top, 1) if top.raw(IDS) else (eagle, 0)
    if not layer_ids:
        # The authors' choice.
        layer_ids, before = [2, layers // 2, layers - 3], 1
    numbers = isinstance(layer_ids, list) and all(type(number) is int for number in layer_ids)
    good = (
        numbers
        and layer_ids == sorted(set(layer_ids))
        and all(0 <= number - before < layers for number in layer_ids)
    )
    requirement = (
        f"ascending numbers of layers in [{before}, {layers - 1 + before}], for a model of {layers} layers"
    )
    where.require(good, IDS, requirement)
    return tuple(number - before for number in layer_ids)


def rules(arch: Eagle3Arch, checkpoint: Checkpoint) -> list[Rule]:
    prefix = gqa.prefix_of(checkpoint)
    middle = any(name.startswith(f"{prefix}midlayer.") for name in checkpoint.tensors)
    weights = [(r"norm\.weight", "norm.weight")]
    if arch.taps:
        weights.append((r"fc\.weight", "fuse.project.weight"))
    if arch.fuse_bias:
        weights.append((r"fc\.bias", "fuse.project.bias"))
    if arch.norms == "each":
        weights.append((r"fc_norm\.(?P<tap>\d+)\.weight", "fuse.each_norm.{tap}.weight"))
    if arch.norms == "all":
        weights.append((r"input_norm\.weight", "fuse.all_norm.weight"))
    if arch.own_embedding:
        weights.append((r"embed_tokens\.weight", "embed.weight"))
    head_rules = gqa.rules(prefix, weights, [])
    outside = [(r"lm_head\.weight", "head.weight")] + ([("d2t", "d2t")] if arch.mapped else [])
    dropped = [("t2d", "the other way round"), (r"verifier_(?:norm|lm_head)\.weight", "the trunk's")]
    head_rules += gqa.rules(
        "", outside, dropped if arch.mapped else [*dropped, ("d2t", "each token is its own")]
    )
    names = layer_names(arch.layers)
    first = [*names, (r"hidden_norm\.weight", "hidden_norm.weight", Copy())]
    head_rules += one_layer(prefix + ("midlayer." if middle else "layers.0."), "first.", first)
    for number in range(1, len(arch.layers.layers)):
        head_rules += one_layer(f"{prefix}layers.{number}.", f"blocks.{number - 1}.", names)
    return head_rules


EAGLE3 = Eagle3()
