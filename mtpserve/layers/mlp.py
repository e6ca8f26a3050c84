"""The gated feed-forward block: down(silu(gate(x)) * up(x)), gate and up in one matrix."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from mtpserve.core.protocols import LinearMethod
from mtpserve.layers.kernels import Kernels
from mtpserve.layers.linear import Linear


def silu_mul(gate_up: Tensor) -> Tensor:
    """[…, 2 size] → […, size]"""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


class MLP(nn.Module):
    kernels: Kernels | None = None

    def __init__(self, hidden: int, size: int, method: LinearMethod) -> None:
        super().__init__()
        self.gate_up = Linear(hidden, (size, size), method)
        self.down = Linear(size, (hidden,), method)

    def forward(self, x: Tensor) -> Tensor:
        gated = silu_mul if self.kernels is None else self.kernels.silu_mul
        return self.down(gated(self.gate_up(x)))  # type: ignore[no-any-return]
