"""A pre-norm decoder layer, and the whole model around it: what the families have in common, parametrised by ModelArch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from mtpserve.core.arch import ModelArch
from mtpserve.core.batch import Hidden
from mtpserve.core.protocols import Context, LinearMethod
from mtpserve.layers.embedding import Embedding, TiedHead
from mtpserve.layers.kernels import Kernels
from mtpserve.layers.linear import Linear
from mtpserve.layers.mtp import MTPFusion
from mtpserve.layers.norm import RMSNorm
from mtpserve.layers.rope import Rope, Rotation

MakeBlock = Callable[[int], tuple[nn.Module, nn.Module]]  # number in arch.layers → attention, feed-forward


class DecoderLayer(nn.Module):
    def __init__(self, arch: ModelArch, attention: nn.Module, mlp: nn.Module, kernels: Kernels) -> None:
        super().__init__()
        self.attention_norm, self.attention = RMSNorm(arch.hidden, arch.norm_eps, kernels), attention
        self.mlp_norm, self.mlp = RMSNorm(arch.hidden, arch.norm_eps, kernels), mlp

    def forward(self, x: Tensor, residual: Tensor | None, rotation: Rotation, context: Context) -> tuple[Tensor, Tensor]:
        """The layer's input is residual + x, its output the sum of the two that it gives: a sum is always taken where it is normed."""
        normed, residual = self.attention_norm.add(x, residual)
        normed, residual = self.mlp_norm.add(self.attention(normed, rotation, context), residual)
        return self.mlp(normed), residual


class MTPHead(nn.Module):
    """One multi-token-prediction layer. Embedding and language-model head are the trunk's own objects and not held here."""

    def __init__(self, arch: ModelArch, attention: nn.Module, mlp: nn.Module, method: LinearMethod, kernels: Kernels) -> None:
        super().__init__()
        assert arch.mtp is not None
        self.fusion = MTPFusion(arch.hidden, arch.norm_eps, arch.mtp.fusion, method, kernels)
        self.layer = DecoderLayer(arch, attention, mlp, kernels)
        self.norm = RMSNorm(arch.hidden, arch.norm_eps, kernels)


class DecoderModel(nn.Module):
    """core.protocols.CausalModel. The context after those of the trunk's layers is the MTP layer's."""

    def __init__(
        self, arch: ModelArch, make_block: MakeBlock, method: LinearMethod, dtype: torch.dtype, positions: int, kernels: Kernels
    ) -> None:
        super().__init__()
        self.arch, self.method = arch, method
        self.embed = Embedding(arch.vocab, arch.hidden)
        self.layers = nn.ModuleList(DecoderLayer(arch, *make_block(i), kernels) for i in range(arch.num_layers))
        self.norm = RMSNorm(arch.hidden, arch.norm_eps, kernels)
        self.head = TiedHead(self.embed) if arch.tied_head else Linear(arch.hidden, (arch.vocab,), method)
        self.mtp_head = MTPHead(arch, *make_block(arch.num_layers), method, kernels) if arch.mtp else None
        self.rope = Rope(arch.rope, positions, dtype)

    def trunk(self, ids: Tensor, positions: Tensor, contexts: Sequence[Context]) -> Hidden:
        x, residual, rotation = self.embed(ids), None, self.rope(positions)
        for layer, context in zip(self.layers, contexts, strict=False):  # the MTP layer's context comes last
            x, residual = layer(x, residual, rotation, context)
        normed, x = self.norm.add(x, residual)
        feeds_raw = self.arch.mtp is not None and self.arch.mtp.hidden_in == "pre"
        return Hidden(normed, x if feeds_raw else normed)

    def mtp(self, ids: Tensor, positions: Tensor, hidden: Tensor, contexts: Sequence[Context]) -> Hidden:
        assert self.mtp_head is not None and self.arch.mtp is not None
        head, context = self.mtp_head, contexts[self.arch.num_layers]
        x, residual = head.layer(head.fusion(self.embed(ids), hidden), None, self.rope(positions), context)
        normed, x = head.norm.add(x, residual)
        return Hidden(normed, x if self.arch.mtp.recycle == "pre" else normed)

    def logits(self, head: Tensor) -> Tensor:
        return self.head(head).float()  # type: ignore[no-any-return]

    def logits_of(self, tokens: Tensor) -> Callable[[Tensor], Tensor]:
        """`logits` of these tokens [n] alone, [rows, hidden] → [rows, n] float32, by a copy of the head's rows."""
        part = Linear(self.arch.hidden, (len(tokens),), self.method)
        part.weight = nn.Parameter(self.head.rows(tokens), requires_grad=False)
        part.finish_loading()
        return lambda head: part(head).float()
