"""Rotary position embedding, half-split or interleaved, with the scalings for longer contexts that models are
published with."""

from __future__ import annotations

import math
from functools import cached_property

import torch
from torch import Tensor, nn

from mtpserve.core.arch.rope import LinearRopeArch, Llama3RopeArch, PartialRopeArch, RopeArch, YarnArch


def yarn_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def inverse_frequencies(arch: RopeArch) -> Tensor:
    """[dim / 2] float32"""
    exponents = torch.arange(0, arch.dim, 2, dtype=torch.float32, device="cpu") / arch.dim
    plain = arch.theta**-exponents
    match arch.scaling:
        case None:
            return plain
        case LinearRopeArch(factor):
            return plain / factor
        case PartialRopeArch(turning, factor):
            return plain.masked_fill(torch.arange(len(plain), device="cpu") >= turning // 2, 0) / factor
        case Llama3RopeArch() as llama:
            turns = llama.original_length * plain / (2 * math.pi)  # in the original context
            smooth = ((turns - llama.low) / (llama.high - llama.low)).clamp(0, 1)
            return plain / llama.factor * (1 - smooth) + plain * smooth
        case YarnArch() as yarn:
            return yarn_frequencies(arch, yarn, plain)


def yarn_frequencies(arch: RopeArch, yarn: YarnArch, plain: Tensor) -> Tensor:
    def dimension_of(turns: float) -> float:
        """The dimension that turns that often within the original context."""
        return arch.dim * math.log(yarn.original_length / (turns * 2 * math.pi)) / (2 * math.log(arch.theta))

    low, high = dimension_of(yarn.beta_fast), dimension_of(yarn.beta_slow)
    if yarn.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, arch.dim - 1)
    ramp = (
        (torch.arange(arch.dim // 2, dtype=torch.float32, device="cpu") - low) / max(high - low, 0.001)
    ).clamp(0, 1)
    # Fast dimensions are left alone, slow ones are stretched by the factor, those between are blended.
    return plain / yarn.factor * ramp + plain * (1 - ramp)


def rope_gain(arch: RopeArch) -> float:
    """What cos and sin are multiplied with."""
    yarn = arch.scaling
    if not isinstance(yarn, YarnArch):
        return 1.0
    return yarn_mscale(yarn.factor, yarn.mscale) / yarn_mscale(yarn.factor, yarn.mscale_all_dim)


def table_of(arch: RopeArch, length: int) -> Tensor:
    angles = torch.outer(torch.arange(length, dtype=torch.float32, device="cpu"), inverse_frequencies(arch))
    gain = rope_gain(arch)
    cos, sin = angles.cos() * gain, angles.sin() * gain
    if arch.interleaved:
        return torch.stack([cos, sin], -1)
    # cos twice; sin with the sign that the swapped half takes: the rotation is then x * cos + swapped(x) *
    # sin
    return torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)], 1)


class Rope(nn.Module):
    """Tables for all positions."""

    def __init__(
        self, arch: RopeArch, length: int, dtype: torch.dtype, windowed: RopeArch | None = None
    ) -> None:
        """`windowed`: of layers with a window, where it is another."""
        super().__init__()
        self.windowed = None if windowed is None else Rope(windowed, length, dtype)
        self.interleaved, self.dim = arch.interleaved, arch.dim
        # [length, dim / 2, 2]: complex numbers, kept in float32; or [length, 2, dim]
        shape, table_dtype = (
            ((length, arch.dim // 2, 2), torch.float32)
            if arch.interleaved
            else ((length, 2, arch.dim), dtype)
        )
        table = torch.empty(shape, dtype=table_dtype)
        if table.device.type != "meta":
            table = table_of(arch, length).to(table_dtype)
        self.register_buffer("table", table, persistent=False)
        self.table: Tensor

    @cached_property
    def cos(self) -> Tensor:
        """[length, dim / 2] float32"""
        return (
            (self.table[..., 0] if self.interleaved else self.table[:, 0, : self.table.shape[2] // 2])
            .float()
            .contiguous()
        )

    @cached_property
    def sin(self) -> Tensor:
        """[length, dim / 2] float32"""
        return (
            (self.table[..., 1] if self.interleaved else self.table[:, 1, self.table.shape[2] // 2 :])
            .float()
            .contiguous()
        )

    def forward(self, positions: Tensor, ids: Tensor | None = None) -> Rotation:
        """[T] → the rotation of these rows, once per pass for all layers and heads. It computes nothing that
        is not asked for."""
        return Rotation(self, positions, ids)


class Rotation:
    """The rotation of the rows of one pass. Kernels read the tables at the rows' positions; plain torch
    gathers the tables' rows once for all layers.

    `ids`: the rows' tokens, for layers that look something up by them."""

    def __init__(self, rope: Rope, positions: Tensor, ids: Tensor | None = None) -> None:
        self.positions, self.interleaved, self.ids, self._rope = positions, rope.interleaved, ids, rope

    @cached_property
    def in_window(self) -> Rotation:
        """The rotation of layers with a window."""
        return self if self._rope.windowed is None else Rotation(self._rope.windowed, self.positions)

    def at(self, positions: Tensor) -> Rotation:
        """Returns the rotation of other rows."""
        return Rotation(self._rope, positions)

    @property
    def cos(self) -> Tensor:
        """[length, dim / 2] float32, of all positions"""
        return self._rope.cos

    @property
    def sin(self) -> Tensor:
        return self._rope.sin

    @cached_property
    def _halves(self) -> tuple[Tensor, Tensor]:
        """cos and sin [T, 1, dim / 2] float32"""
        return self.cos[self.positions].unsqueeze(1), self.sin[self.positions].unsqueeze(1)

    @cached_property
    def _rows(self) -> Tensor:
        rows = self._rope.table[self.positions]
        return torch.view_as_complex(rows).unsqueeze(1) if self.interleaved else rows.unsqueeze(2)

    def rotate_halves(self, x: Tensor) -> Tensor:
        """Does what `rotate` does, with the halves of the first dim numbers side by side, however the tables
        are interleaved."""
        cos, sin = self._halves
        half = cos.shape[-1]
        first, second = x[..., :half].float(), x[..., half : 2 * half].float()
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
        return torch.cat([turned.to(x.dtype), x[..., 2 * half :]], -1)

    def rotate_last(self, x: Tensor, back: bool = False) -> Tensor:
        """x [T, heads, dim or more]: neighbours among the last dim numbers, in plain torch. `back`: the other
        way round. Each product is rounded by itself, so that a row's numbers do not depend on the other
        rows."""
        first, last = x.split([x.shape[-1] - self._rope.dim, self._rope.dim], -1)
        cos, sin = self._halves
        even, odd = last.float().unflatten(-1, (-1, 2)).unbind(-1)
        sin = -sin if back else sin
        turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)
        return torch.cat([first, turned.to(x.dtype)], -1)

    def rotate(self, x: Tensor) -> Tensor:
        """x [T, heads, dim or more], in plain torch; numbers after the first dim stay as they are."""
        dim = self._rope.dim
        if not dim:
            return x
        if x.shape[-1] > dim:
            return torch.cat([self.rotate(x[..., :dim]), x[..., dim:]], -1)
        if self.interleaved:
            pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
            return torch.view_as_real(pairs * self._rows).flatten(-2).to(x.dtype)
        cos, sin = self._rows.unbind(1)
        return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)
