"""The gated feed-forward block: down(silu(gate(x)) * up(x)), gate and up in one matrix."""

from __future__ import annotations

from torch import Tensor, nn

from mtpserve.core.protocols import LinearMethod
from mtpserve.layers.kernels import Kernels
from mtpserve.layers.linear import Linear


class MLP(nn.Module):
    def __init__(self, hidden: int, size: int, method: LinearMethod, kernels: Kernels) -> None:
        super().__init__()
        self.gate_up = Linear(hidden, (size, size), method)
        self.down = Linear(size, (hidden,), method)
        self.kernels = kernels

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.kernels.gated(self.gate_up, x))  # type: ignore[no-any-return]
