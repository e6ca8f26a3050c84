"""Grouped-query attention around `attend`: projections and rotation, as Qwen2 and Llama have them."""

from __future__ import annotations

from torch import Tensor, nn

from mtpserve.core.arch import ModelArch
from mtpserve.core.protocols import Attend, LinearMethod
from mtpserve.layers.linear import Linear
from mtpserve.layers.rope import Rope


class GQA(nn.Module):
    def __init__(self, arch: ModelArch, method: LinearMethod) -> None:
        super().__init__()
        q, kv = arch.heads * arch.head_dim, arch.kv.heads * arch.head_dim
        self.heads, self.kv_heads = arch.heads, arch.kv.heads
        self.qkv = Linear(arch.hidden, (q, kv, kv), method, bias=arch.qkv_bias)
        self.out = Linear(q, (arch.hidden,), method)

    def forward(self, x: Tensor, rope: Rope, turned: Tensor, attend: Attend, layer: int) -> Tensor:
        """x [T, hidden]; `turned` is what `rope` gave for the rows' positions."""
        qkv = self.qkv(x).unflatten(-1, (self.heads + 2 * self.kv_heads, -1))  # [T, heads + 2 kv_heads, head_dim]
        rotated = rope.rotate(qkv[:, : -self.kv_heads], turned)  # q and k side by side: one rotation for both
        q, k = rotated.split([self.heads, self.kv_heads], 1)
        return self.out(attend(q, k, qkv[:, -self.kv_heads :], layer).flatten(1))  # type: ignore[no-any-return]
