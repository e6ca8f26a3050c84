"""Shortcut-connected experts: beside the feed-forward block of one decoder layer, and their output is added
after the next layer (https://arxiv.org/abs/2404.05019, as LongCat-Flash has them).

    h = x + attention 1(norm(x))          n = norm(h)
    y = h + feed-forward 1(n)             z = y + attention 2(norm(y))
    output = z + feed-forward 2(norm(z)) + experts(n)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn

from mtpserve.core.arch.model import ModelArch
from mtpserve.core.protocols.attention import Context
from mtpserve.layers.decoder import DecoderLayer
from mtpserve.layers.kernels import Kernels, Residual
from mtpserve.layers.rope import Rotation


@dataclass(frozen=True, slots=True)
class Shortcut:
    """layers.kernels.Residual between the two layers."""

    residual: Residual
    experts: Tensor  # [T, hidden], what they gave, to be added after the second layer

    def __add__(self, x: Tensor) -> Tensor:
        """x [T, hidden] → the first layer's output."""
        return self.residual + x


class ShortcutStart(DecoderLayer):
    """The first of the two."""

    def __init__(
        self, arch: ModelArch, attention: nn.Module, mlp: nn.Module, experts: nn.Module, kernels: Kernels
    ) -> None:
        super().__init__(arch, attention, mlp, kernels)
        self.shortcut = experts

    def forward(
        self, x: Tensor, residual: Residual | None, rotation: Rotation, context: Context
    ) -> tuple[Tensor, Residual]:
        assert self.attention is not None and self.attention_norm is not None
        assert self.mlp is not None and self.mlp_norm is not None
        normed, residual = self.attention_norm.add(x, residual)
        normed, residual = self.mlp_norm.add(self.attention(normed, rotation, context), residual)
        return self.mlp(normed), Shortcut(residual, self.shortcut(normed))


class ShortcutEnd(DecoderLayer):
    """The second one."""

    def forward(
        self, x: Tensor, residual: Residual | None, rotation: Rotation, context: Context
    ) -> tuple[Tensor, Residual]:
        shortcut = cast(Shortcut, residual)
        x, stream = super().forward(x, shortcut.residual, rotation, context)
        return x + shortcut.experts, stream
