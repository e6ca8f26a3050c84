"""Grouped-query attention: projections and rotation, as Llama, Qwen and GLM have them, around what a context offers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mtpserve.core.arch import Attention, ModelArch
from mtpserve.core.protocols import Context, LinearMethod
from mtpserve.layers.kernels import HeadNorms, Kernels
from mtpserve.layers.linear import Linear
from mtpserve.layers.norm import RMSNorm
from mtpserve.layers.rope import Rotation


class GQA(nn.Module):
    def __init__(self, arch: ModelArch, kind: Attention, method: LinearMethod, kernels: Kernels) -> None:
        super().__init__()
        q, kv = arch.heads * arch.head_dim, kind.kv.heads * arch.head_dim
        self.heads, self.kernels = arch.heads, kernels
        self.all_heads = arch.heads + 2 * kind.kv.heads
        self.gated = arch.out_gate
        self.qkv = Linear(arch.hidden, ((1 + arch.out_gate) * q, kv, kv), method, bias=arch.qkv_bias)
        self.out = Linear(q, (arch.hidden,), method, bias=arch.out_bias)
        self.q_norm = RMSNorm(arch.head_dim, arch.norm_eps, kernels) if arch.head_norms else None
        self.k_norm = RMSNorm(arch.head_dim, arch.norm_eps, kernels) if arch.head_norms else None

    @property
    def norms(self) -> HeadNorms | None:
        return None if self.q_norm is None or self.k_norm is None else HeadNorms(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)

    def forward(self, x: Tensor, rotation: Rotation, context: Context) -> Tensor:
        """x [T, hidden]"""
        qkv, gate = self.projected(x)
        seen = context.attend(self.stored(qkv, rotation, context))
        return self.out((seen if gate is None else seen * gate.sigmoid()).flatten(1))  # type: ignore[no-any-return]

    def store(self, x: Tensor, rotation: Rotation, context: Context) -> Tensor:
        """x [T, hidden] → q [T, heads, head_dim]; keys and values are stored."""
        return self.stored(self.projected(x)[0], rotation, context)

    def projected(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """x [T, hidden] → [T, heads + 2 kv_heads, head_dim], and the gates of the heads [T, heads, head_dim]"""
        if not self.gated:
            return self.qkv(x).unflatten(-1, (self.all_heads, -1)), None
        # Each head's gate comes after its q.
        whole = self.qkv(x).unflatten(-1, (self.all_heads + self.heads, -1))
        q, gate = whole[:, : 2 * self.heads].unflatten(1, (self.heads, 2)).unbind(2)
        return torch.cat([q, whole[:, 2 * self.heads :]], 1), gate

    def stored(self, qkv: Tensor, rotation: Rotation, context: Context) -> Tensor:
        return self.kernels.rope_store(qkv, rotation, context.slots, context.keys, context.values, self.heads, self.norms)
