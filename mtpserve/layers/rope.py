"""Rotary position embedding, half-split or interleaved, plain or YaRN (https://arxiv.org/abs/2309.00071)."""

from __future__ import annotations

import math
from functools import cached_property

import torch
from torch import Tensor, nn

from mtpserve.core.arch import RopeArch, YarnArch


def yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def inverse_frequencies(arch: RopeArch) -> Tensor:
    """[dim / 2] float32"""
    exponents = torch.arange(0, arch.dim, 2, dtype=torch.float32, device="cpu") / arch.dim
    plain = arch.theta**-exponents
    if arch.scaling is None:
        return plain
    yarn = arch.scaling

    def dimension_of(turns: float) -> float:
        """The dimension that turns that often within the original context."""
        return arch.dim * math.log(yarn.original_length / (turns * 2 * math.pi)) / (2 * math.log(arch.theta))

    low = max(math.floor(dimension_of(yarn.beta_fast)), 0)
    high = min(math.ceil(dimension_of(yarn.beta_slow)), arch.dim - 1)
    ramp = ((torch.arange(arch.dim // 2, dtype=torch.float32, device="cpu") - low) / max(high - low, 0.001)).clamp(0, 1)
    # Fast dimensions are left alone, slow ones are stretched by the factor, those between are blended.
    return plain / yarn.factor * ramp + plain * (1 - ramp)


def rope_gain(yarn: YarnArch | None) -> float:
    """What cos and sin are multiplied with."""
    if yarn is None:
        return 1.0
    return yarn_mscale(yarn.factor, yarn.mscale) / yarn_mscale(yarn.factor, yarn.mscale_all_dim)


class Rope(nn.Module):
    """Tables for all positions."""

    def __init__(self, arch: RopeArch, length: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.interleaved = arch.interleaved
        angles = torch.outer(torch.arange(length, dtype=torch.float32, device="cpu"), inverse_frequencies(arch))
        cos, sin = angles.cos() * rope_gain(arch.scaling), angles.sin() * rope_gain(arch.scaling)
        if arch.interleaved:
            table = torch.stack([cos, sin], -1)  # [length, dim / 2, 2]: complex numbers, kept in float32
        else:
            # cos twice; sin with the sign that the swapped half takes: the rotation is then x * cos + swapped(x) * sin
            table = torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)], 1).to(dtype)  # [length, 2, dim]
        self.register_buffer("table", table, persistent=False)
        self.table: Tensor

    @cached_property
    def cos(self) -> Tensor:
        """[length, dim / 2] float32"""
        return (self.table[..., 0] if self.interleaved else self.table[:, 0, : self.table.shape[2] // 2]).float().contiguous()

    @cached_property
    def sin(self) -> Tensor:
        """[length, dim / 2] float32"""
        return (self.table[..., 1] if self.interleaved else self.table[:, 1, self.table.shape[2] // 2 :]).float().contiguous()

    def forward(self, positions: Tensor) -> Rotation:
        """[T] → the rotation of these rows, once per pass for all layers and heads. It computes nothing that is not asked for."""
        return Rotation(self, positions)


class Rotation:
    """Of the rows of one pass. Kernels read the tables at the rows' positions; plain torch gathers the tables' rows once for all layers."""

    def __init__(self, rope: Rope, positions: Tensor) -> None:
        self.positions, self.interleaved, self._rope = positions, rope.interleaved, rope

    @property
    def cos(self) -> Tensor:
        """[length, dim / 2] float32, of all positions"""
        return self._rope.cos

    @property
    def sin(self) -> Tensor:
        return self._rope.sin

    @cached_property
    def _rows(self) -> Tensor:
        rows = self._rope.table[self.positions]
        return torch.view_as_complex(rows).unsqueeze(1) if self.interleaved else rows.unsqueeze(2)

    def rotate(self, x: Tensor) -> Tensor:
        """x [T, heads, dim], in plain torch"""
        if self.interleaved:
            pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
            return torch.view_as_real(pairs * self._rows).flatten(-2).to(x.dtype)
        cos, sin = self._rows.unbind(1)
        return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)
