"""Activations of feed-forward blocks other than silu(gate) * up: read by the family files, used by
layers/mlp and layers/moe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# a feed-forward block without a gate: down(relu(up)^2) (https://arxiv.org/abs/2109.08668)
Ungated = Literal["relu2"]
# a gated block whose gate is no silu: down(gelu(gate) * up), gelu by its approximation with tanh
GeluGate = Literal["gelu_tanh"]


@dataclass(frozen=True, slots=True)
class ClampedGate:
    """A gated activation with limits: gate * sigmoid(alpha * gate) * (up + plus), gate at most `gate_limit`,
    up between -limit and limit (gpt-oss's has plus 1, https://arxiv.org/abs/2508.10925 §2; with alpha 1 and
    plus 0 it is silu(gate) * up)."""

    alpha: float
    gate_limit: float
    limit: float
    plus: float

    @property
    def numbers(self) -> tuple[float, float, float, float]:
        return self.alpha, self.gate_limit, self.limit, self.plus


@dataclass(frozen=True, slots=True)
class LayerGates:
    """The gated activations of one layer that differ from those of the others; None: silu(gate) * up."""

    dense: ClampedGate | None  # a dense block's, or the shared expert's
    routed: ClampedGate | None
