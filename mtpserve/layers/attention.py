"""Grouped-query attention: projections and rotation, as Llama, Qwen and GLM have them, around what a context offers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mtpserve.core.arch import LayerKind, ModelArch
from mtpserve.core.protocols import Context, LinearMethod
from mtpserve.layers.kernels import HeadNorms, Kernels
from mtpserve.layers.linear import Linear
from mtpserve.layers.norm import RMSNorm
from mtpserve.layers.rope import Rotation


class GQA(nn.Module):
    def __init__(self, arch: ModelArch, kind: LayerKind, method: LinearMethod, kernels: Kernels) -> None:
        super().__init__()
        q, kv = arch.heads * arch.head_dim, kind.kv.heads * arch.head_dim
        self.heads, self.kernels = arch.heads, kernels
        self.all_heads = arch.heads + 2 * kind.kv.heads
        self.qkv = Linear(arch.hidden, (q, kv, kv), method, bias=arch.qkv_bias)
        self.out = Linear(q, (arch.hidden,), method, bias=arch.out_bias)
        self.q_norm = RMSNorm(arch.head_dim, arch.norm_eps, kernels) if arch.head_norms else None
        self.k_norm = RMSNorm(arch.head_dim, arch.norm_eps, kernels) if arch.head_norms else None
        has_sinks = arch.sinks == "all" or (arch.sinks == "windows" and kind.window is not None)
        self.sinks = nn.Parameter(torch.empty(arch.heads, dtype=torch.float32), requires_grad=False) if has_sinks else None

    @property
    def norms(self) -> HeadNorms | None:
        return None if self.q_norm is None or self.k_norm is None else HeadNorms(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)

    def forward(self, x: Tensor, rotation: Rotation, context: Context) -> Tensor:
        """x [T, hidden]"""
        q = self.store(x, rotation, context)
        return self.out(context.attend(q, self.sinks).flatten(1))  # type: ignore[no-any-return]

    def store(self, x: Tensor, rotation: Rotation, context: Context) -> Tensor:
        """x [T, hidden] → q [T, heads, head_dim]; keys and values are stored."""
        qkv = self.qkv(x).unflatten(-1, (self.all_heads, -1))  # [T, heads + 2 kv_heads, head_dim]
        return self.kernels.rope_store(qkv, rotation, context.slots, context.keys, context.values, self.heads, self.norms)
