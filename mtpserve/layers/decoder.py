"""A pre-norm decoder layer, and the whole model around it: what the families have in common, parametrised by
ModelArch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from mtpserve.core.arch.model import Features, ModelArch
from mtpserve.core.batch import Hidden
from mtpserve.core.protocols.attention import Context
from mtpserve.core.protocols.linear import LinearMethod
from mtpserve.layers.embedding import Embedding, TiedHead, VocabularyHead, capped, head_of_tokens
from mtpserve.layers.fusion import Fusion, StreamFusion
from mtpserve.layers.kernels import Kernels, Residual, RunFusedLayer, RunLayers
from mtpserve.layers.moe import TokenMoE
from mtpserve.layers.rope import Rope, Rotation
from mtpserve.layers.streams import norm_after, norm_before

HeadProduct = Callable[[Tensor], Tensor]
# attention, or what stands in its place, and feed-forward; one of them may be None
Blocks = tuple[nn.Module | None, nn.Module | None]
MakeBlock = Callable[[int], Blocks]  # number in arch.layers → its blocks
MakeLayer = Callable[[int], Blocks | nn.Module]  # the same of the trunk's, or a layer of another form


@dataclass(frozen=True, slots=True)
class Methods:
    """The methods that store and multiply a model's matrices."""

    layers: LinearMethod  # the trunk's
    head: LinearMethod
    draft: LinearMethod  # the checkpoint's own draft model's
    # a copy of the head for drafting alone; None: it multiplies the trunk's
    draft_head: LinearMethod | None = None

    @classmethod
    def all(cls, method: LinearMethod) -> Methods:
        """The same for all."""
        return cls(method, method, method)

    def of(self, drafts: bool) -> LinearMethod:
        return self.draft if drafts else self.layers


# what an attention module offers in addition to its call: x [T, hidden]; the rows' keys and values are
# stored, and nothing is attended to
StoreRows = Callable[[Tensor, Rotation, Context], object]


class DecoderLayer(nn.Module):
    """Blocks that are there, each with its norm before it."""

    def __init__(
        self, arch: ModelArch, attention: nn.Module | None, mlp: nn.Module | None, kernels: Kernels
    ) -> None:
        super().__init__()
        assert attention is not None or mlp is not None
        self.attention_norm = None if attention is None else norm_before(arch, kernels)
        self.attention = attention
        self.mlp_norm, self.mlp = None if mlp is None else norm_before(arch, kernels), mlp

    def forward(
        self, x: Tensor, residual: Residual | None, rotation: Rotation, context: Context
    ) -> tuple[Tensor, Residual]:
        """The layer's input is residual + x, its output the sum of the two that it gives: a sum is always
        taken where it is normed."""
        if self.attention is not None and self.attention_norm is not None:
            normed, residual = self.attention_norm.add(x, residual)
            x = self.attention(normed, rotation, context)
        if self.mlp is not None and self.mlp_norm is not None:
            normed, residual = self.mlp_norm.add(x, residual)
            x = self.mlp(normed, rotation.ids) if isinstance(self.mlp, TokenMoE) else self.mlp(normed)
        assert residual is not None
        return x, residual

    def store(self, x: Tensor, rotation: Rotation, context: Context) -> None:
        """Stores keys and values, the part of `forward` that other rows need."""
        assert self.attention is not None and self.attention_norm is not None
        store = cast(StoreRows, self.attention.store)
        store(self.attention_norm(x), rotation, context)


class DraftHead(nn.Module):
    """A copy of the language-model head by another method, for drafting alone. It is a part of the head, so
    that it is made before the head's weight is packed in place. `method` makes numbers of its own from the
    weight, as int8 does: it must not pack it in place."""

    def __init__(self, head: VocabularyHead | TiedHead, arch: ModelArch, method: LinearMethod) -> None:
        super().__init__()
        # in a list: the head holds it, and not the other way round
        self.head, self.arch, self.method = [head], arch, method
        self.product: VocabularyHead | None = None

    def finish_loading(self) -> None:
        self.product = VocabularyHead(
            self.arch.hidden, self.arch.vocab, self.method, self.head[0].vocabulary.ranks
        )
        self.product.weight = self.head[0].weight
        self.product.finish_loading()

    def forward(self, head: Tensor) -> Tensor:
        assert self.product is not None
        return capped(self.product(head, torch.float32), self.arch.logit_cap)


def shared_head(trunk: DecoderModel, methods: Methods) -> HeadProduct:
    """The trunk's language-model head as a draft model multiplies it: [rows, hidden] → [rows, vocabulary]
    float32."""
    if methods.draft_head is None:
        return trunk.logits
    trunk.head.add_module("draft", DraftHead(trunk.head, trunk.arch, methods.draft_head))
    return cast(DraftHead, trunk.head.draft).forward  # not the module, which has its place already


class MTPHead(nn.Module):
    """core.protocols.models.DraftModel: the checkpoint's own multi-token-prediction layer. Embedding, head
    and rotary tables are the trunk's own objects, borrowed and not held as children."""

    lag, at_once, mask, tokens = 1, False, None, None

    def __init__(
        self, arch: ModelArch, blocks: Blocks, methods: Methods, kernels: Kernels, trunk: DecoderModel
    ) -> None:
        super().__init__()
        assert arch.mtp is not None
        self.arch, self.borrowed = arch.mtp, [trunk]
        self.features = Features(last=arch.mtp.hidden_in)
        self.layers = arch.layers[arch.num_layers :]
        self.fusion: nn.Module
        if arch.mtp.fusion == "sum":
            self.fusion = StreamFusion(arch, methods.draft, kernels)
        else:
            self.fusion = Fusion(arch.hidden, arch.norm_eps, arch.mtp.fusion, methods.draft, kernels)
        self.layer = DecoderLayer(arch, *blocks, kernels)
        self.norm = norm_after(arch, kernels) if arch.mtp.norm == "own" else None
        self.kernels, self.methods = kernels, methods
        self.run_layer: RunFusedLayer
        has_head = arch.mtp.head == "own"
        self.head = (
            VocabularyHead(arch.hidden, arch.vocab, methods.draft_head or methods.head, kernels.ranks)
            if has_head
            else None
        )
        self.trunk_head = None if has_head else shared_head(trunk, methods)

    @property
    def product(self) -> VocabularyHead | TiedHead:
        """The module whose product its logits are."""
        if self.head is not None:
            return self.head
        shared = self.borrowed[0].head
        return (
            shared
            if self.methods.draft_head is None
            else cast(VocabularyHead, cast(DraftHead, shared.draft).product)
        )

    def finish_loading(self) -> None:
        trunk = self.borrowed[0]
        self.run_layer = self.kernels.pack_fused_layer(
            trunk.embed, self.fusion, self.layer, self.norm or trunk.norm
        )

    def extend(
        self, ids: Tensor, positions: Tensor, features: Tensor | None, contexts: Sequence[Context]
    ) -> Hidden:
        """Its row at position p predicts token p + 2."""
        assert features is not None
        normed, x = self.run_layer(ids, features, self.borrowed[0].rope(positions), contexts)
        return Hidden(normed, x if self.arch.recycle == "pre" else normed)

    step = extend

    def store_kv(
        self, ids: Tensor, positions: Tensor, features: Tensor | None, contexts: Sequence[Context]
    ) -> None:
        assert features is not None
        self.run_layer.store(ids, features, self.borrowed[0].rope(positions), contexts)

    def logits(self, head: Tensor, depth: int) -> Tensor:
        if self.trunk_head is not None:
            return self.trunk_head(head)
        assert self.head is not None
        return self.head(head, torch.float32)  # type: ignore[no-any-return]


class DecoderModel(nn.Module):
    """core.protocols.Trunk, and what was loaded together with it: the checkpoint's own MTP layer, or another
    draft model."""

    def __init__(
        self,
        arch: ModelArch,
        make_block: MakeLayer,
        methods: Methods,
        dtype: torch.dtype,
        positions: int,
        kernels: Kernels,
    ) -> None:
        super().__init__()
        self.arch, self.methods = arch, methods
        self.embed = Embedding(arch.vocab, arch.hidden, kernels.ranks, arch.embed_scale)
        blocks = map(make_block, range(arch.num_layers))
        self.layers = nn.ModuleList(
            block if isinstance(block, nn.Module) else DecoderLayer(arch, *block, kernels) for block in blocks
        )
        self.norm = norm_after(arch, kernels)
        self.head: VocabularyHead | TiedHead = TiedHead(self.embed, methods.head)
        if not arch.tied_head:
            self.head = VocabularyHead(arch.hidden, arch.vocab, methods.head, kernels.ranks)
        self.rope: nn.Module = Rope(arch.rope, positions, dtype, arch.window_rope)
        self.mtp_head: nn.Module | None = None  # the checkpoint's own MTP layers, see layers/mtp_modules
        self.draft: nn.Module | None = None  # a draft model of another kind, see heads/
        self.kernels = kernels
        self.subset_heads: list[tuple[nn.Module, Callable[[], nn.Module]]] = []  # see logits_of
        self.run_layers: RunLayers

    def finish_loading(self) -> None:
        self.run_layers = self.kernels.pack_layers(list(self.layers), self.norm)

    def trunk(
        self, ids: Tensor, positions: Tensor, contexts: Sequence[Context], features: Features
    ) -> Hidden:
        normed, x, aux_hidden_states = self.run_layers(
            self.embed(ids), self.rope(positions, ids), contexts, features.taps
        )
        if features.last is not None:
            aux_hidden_states.append(x if features.last == "pre" else normed)
        if len(aux_hidden_states) < 2:
            return Hidden(normed, aux_hidden_states[0] if aux_hidden_states else None)
        return Hidden(normed, torch.cat(aux_hidden_states, -1))

    def logits(self, head: Tensor) -> Tensor:
        return capped(self.head.forward(head, torch.float32), self.arch.logit_cap)  # a module's call is slow

    def logits_of(self, tokens: Tensor) -> HeadProduct:
        """Returns the product for drafting: `logits` of these tokens [n] alone, [rows, hidden] → [rows, n]
        float32, by a copy of the head's rows."""
        method, dtype = self.methods.draft_head or self.methods.head, self.norm.weight.dtype
        make = partial(head_of_tokens, self.head, tokens, self.arch.hidden, dtype, method)
        head = make()
        self.subset_heads.append((head, make))
        return lambda hidden: capped(head(hidden, torch.float32), self.arch.logit_cap)
