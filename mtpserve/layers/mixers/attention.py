"""Grouped-query attention: projections and rotation, as Llama, Qwen and GLM have them, around what a context
offers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mtpserve.core.arch.model import Attention, ModelArch
from mtpserve.core.protocols.attention import Context
from mtpserve.core.protocols.linear import LinearMethod
from mtpserve.layers.devices.torch_kernels import rope_store_apart
from mtpserve.layers.kernels import HeadNorms, Kernels
from mtpserve.layers.linear import Linear
from mtpserve.layers.norm import RMSNorm, RowNorms
from mtpserve.layers.rope import Rotation


class GQA(nn.Module):
    """`inputs`: numbers of a row that it gets; None: the hidden size, which it always gives."""

    def __init__(
        self,
        arch: ModelArch,
        kind: Attention,
        method: LinearMethod,
        kernels: Kernels,
        inputs: int | None = None,
    ) -> None:
        super().__init__()
        heads = arch.heads_of(kind)
        q, k, v = heads * arch.head_dim, kind.kv.heads * arch.head_dim, kind.kv.heads * kind.kv.value_dim
        self.heads, self.kernels = heads, kernels
        self.all_heads = heads + 2 * kind.kv.heads
        self.gated, self.kv, self.value_scale = arch.out_gate, kind.kv, arch.value_scale
        self.in_window = kind.window is not None and arch.window_rope is not None  # its rotation
        self.qkv = Linear(inputs or arch.hidden, ((1 + arch.out_gate) * q, k, v), method, bias=arch.qkv_bias)
        # one number for each head
        self.gate = Linear(arch.hidden, (heads,), method) if arch.head_gate else None
        self.out = Linear(heads * kind.kv.value_dim, (arch.hidden,), method, bias=arch.out_bias)
        self.out.added_once = ("bias",)
        self.q_norm = RMSNorm(arch.head_dim, arch.norm_eps, kernels) if arch.head_norms else None
        self.k_norm = RMSNorm(arch.head_dim, arch.norm_eps, kernels) if arch.head_norms else None
        self.row_norms = RowNorms(q, k, arch.norm_eps, kernels) if arch.row_norms else None
        has_sinks = arch.sinks == "all" or (arch.sinks == "windows" and kind.window is not None)
        self.sinks = (
            nn.Parameter(torch.empty(heads, dtype=torch.float32), requires_grad=False) if has_sinks else None
        )

    @property
    def ordinary(self) -> bool:
        """It has nothing that the op for whole layers lacks."""
        same = self.kv.key_dim == self.kv.value_dim and self.value_scale == 1
        plain = not self.gated and self.gate is None and self.row_norms is None
        return same and not self.in_window and plain

    @property
    def norms(self) -> HeadNorms | None:
        return (
            None
            if self.q_norm is None or self.k_norm is None
            else HeadNorms(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        )

    def forward(self, x: Tensor, rotation: Rotation, context: Context) -> Tensor:
        """x [T, hidden]"""
        qkv, gate = self.projected(x)
        attended = context.attend(self.rotate_and_store(qkv, rotation, context), self.sinks)
        if self.gate is not None:
            gate = self.gate(x).unsqueeze(-1)
        if gate is not None:
            attended = attended * gate.sigmoid()
        # Scaled values would give the same.
        return self.kernels.ranks.sum(
            self.out((attended if self.value_scale == 1 else attended * self.value_scale).flatten(1))
        )

    def store(self, x: Tensor, rotation: Rotation, context: Context) -> Tensor:
        """x [T, hidden] → q [T, heads, head_dim]; keys and values are stored."""
        return self.rotate_and_store(self.projected(x)[0], rotation, context)

    def projected(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """x [T, hidden] → q, k and v of all heads [T, numbers], and the gates that come with them [T, heads,
        head_dim]"""
        if not self.gated:
            return self.qkv(x) if self.row_norms is None else self.row_norms(self.qkv(x)), None
        # Each head's gate comes after its q.
        q, kv = self.qkv(x).split([self.qkv.parts[0], sum(self.qkv.parts[1:])], -1)
        q, gate = q.unflatten(-1, (self.heads, 2, -1)).unbind(2)
        return torch.cat([q.flatten(1), kv], -1), gate

    def rotate_and_store(self, qkv: Tensor, rotation: Rotation, context: Context) -> Tensor:
        rotation = rotation.in_window if self.in_window else rotation
        if self.kv.key_dim != self.kv.value_dim:
            qk_size = (self.heads + self.kv.heads) * self.kv.key_dim
            qk, v = qkv.split([qk_size, qkv.shape[-1] - qk_size], -1)
            heads = qk.unflatten(-1, (-1, self.kv.key_dim)), v.unflatten(-1, (self.kv.heads, -1))
            return rope_store_apart(*heads, rotation, context.slots, context.keys, context.values, self.heads)
        qkv = qkv.unflatten(-1, (self.all_heads, -1))  # [T, heads + 2 kv_heads, head_dim]
        return self.kernels.rope_store(
            qkv, rotation, context.slots, context.keys, context.values, self.heads, self.norms
        )
