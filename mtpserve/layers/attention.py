"""Grouped-query attention around `attend`: projections and rotation, as Qwen2 and Llama have them."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn

from mtpserve.core.arch import ModelArch
from mtpserve.core.protocols import Attend, LinearMethod, PagedAttend
from mtpserve.layers.kernels import Kernels
from mtpserve.layers.linear import Linear
from mtpserve.layers.rope import Rope


class GQA(nn.Module):
    kernels: Kernels | None = None

    def __init__(self, arch: ModelArch, method: LinearMethod) -> None:
        super().__init__()
        q, kv = arch.heads * arch.head_dim, arch.kv.heads * arch.head_dim
        self.heads, self.kv_heads = arch.heads, arch.kv.heads
        self.qkv = Linear(arch.hidden, (q, kv, kv), method, bias=arch.qkv_bias)
        self.out = Linear(q, (arch.hidden,), method)

    def forward(self, x: Tensor, rope: Rope, turned: Tensor, attend: Attend, layer: int) -> Tensor:
        """x [T, hidden]; `turned` is what `rope` gave for the rows' positions."""
        qkv = self.qkv(x).unflatten(-1, (self.heads + 2 * self.kv_heads, -1))  # [T, heads + 2 kv_heads, head_dim]
        if self.kernels is not None:
            paged = cast(PagedAttend, attend)
            caches = paged.caches(layer)
            q = self.kernels.rope_store(qkv, turned, rope.cos, rope.sin, paged.slots, *caches, self.heads, interleaved=rope.interleaved)
            return self.out(paged.stored(q, layer).flatten(1))  # type: ignore[no-any-return]
        rotated = rope.rotate(qkv[:, : -self.kv_heads], turned)  # q and k side by side: one rotation for both
        q, k = rotated.split([self.heads, self.kv_heads], 1)
        return self.out(attend(q, k, qkv[:, -self.kv_heads :], layer).flatten(1))  # type: ignore[no-any-return]
