"""The feed-forward block: down(silu(gate(x)) * up(x)), gate and up in one matrix; with another activation
of the gate; or without a gate, down(relu(up(x))^2)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from mtpserve.core.arch.gates import ClampedGate, GeluGate, Ungated
from mtpserve.core.protocols.linear import LinearMethod
from mtpserve.core.protocols.parallel import ALONE
from mtpserve.layers.kernels import Kernels
from mtpserve.layers.linear import Linear


class MLP(nn.Module):
    """`gate`: with limits, or "relu2" where there is none and `gate_up` is up alone, in plain torch on every
    device. None: silu(gate) * up. `partial`: what it gives is a rank's own part of the sum."""

    def __init__(
        self, hidden: int, size: int, method: LinearMethod, kernels: Kernels,
        gate: ClampedGate | Ungated | GeluGate | None = None,
        partial: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        self.gated = gate != "relu2"
        self.gate_up = Linear(hidden, (size, size) if self.gated else (size,), method)
        self.down = Linear(size, (hidden,), method)
        self.kernels, self.gate, self.ranks = kernels, gate, ALONE if partial else kernels.ranks

    def forward(self, x: Tensor) -> Tensor:
        inner = (
            self.kernels.gated(self.gate_up, x, self.gate)
            if self.gate != "relu2"
            else F.relu(self.gate_up(x)).square()
        )
        return self.ranks.sum(self.down(inner))
