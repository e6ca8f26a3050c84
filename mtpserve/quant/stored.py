"""A quantised matrix in the form in which it is kept or widened, whatever the checkpoint's layout (see
published.py): numbers of few bits, their scales, and for integers their zeros.

    numbers       float8 (e4m3) or int8 [N, K] · whole numbers from 0 on, uint8: of eight bits [N, K], of four
                  bits [N, K / 2], two in a byte, the low half first · e2m1 in uint8 [N, K / 2], in the same
                  order, whose scales have one byte: MXFP4 and NVFP4, see e2m1.py
    scale         [N, groups]: of each row, the columns in equal groups; or [N / 128, K / 128] rounded up, of
                  blocks: see fp8.py
    zeros         [N, groups] uint8: the whole number that stands for 0; None: the middle of the range, 8 or
                  128
    group_of      [K]: the group of each column, where they are not in order (GPTQ's act order)
    global_scale  [N, 1] float32: NVFP4's second scale; one for a matrix, and rows may be those of several

    weight[n, k] = (numbers[n, k] - zeros[n, g]) * scale[n, g] * global_scale[n]     g: the group of column k
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mtpserve.quant.e2m1 import dequantize_e2m1
from mtpserve.quant.fp8 import BLOCK, FP8, SCALE, dequantize_block, in_blocks, is_finite

ZEROS, GLOBAL_SCALE = "_zeros", "_global_scale"  # suffixes of a matrix's name, in modules
MIDDLE = 8  # the number of four bits that stands for 0 where there are no zeros
# that are widened at a time: in float32, several times, a whole matrix would be the largest thing in memory
NUMBERS = 1 << 22


@dataclass(frozen=True, slots=True)
class QuantisedMatrix:
    numbers: Tensor
    scale: Tensor
    zeros: Tensor | None = None
    group_of: Tensor | None = None
    global_scale: Tensor | None = None

    @property
    def columns(self) -> int:
        """The columns of the matrix. Its integers, if it has any, have four bits."""
        return self.numbers.shape[-1] * (2 if self.numbers.dtype == torch.uint8 else 1)

    @property
    def in_blocks(self) -> bool:
        """A scale for each block of 128 x 128."""
        return self.numbers.dtype != torch.uint8 and in_blocks(self.numbers, self.scale)

    def rows(self, start: int, stop: int) -> QuantisedMatrix:
        """A part. In blocks it begins where a block begins."""
        block_rows = BLOCK[0] if self.in_blocks else 1
        scale = self.scale[start // block_rows : -(-stop // block_rows)]
        zeros, global_scale = (
            None if tensor is None else tensor[start:stop] for tensor in (self.zeros, self.global_scale)
        )
        return QuantisedMatrix(self.numbers[start:stop], scale, zeros, self.group_of, global_scale)

    def in_order(self, arrange: Callable[[Tensor], Tensor]) -> QuantisedMatrix:
        """The rows, of all experts where there are some, in the order to which `arrange` puts them."""
        assert self.zeros is None and self.group_of is None and self.global_scale is None
        numbers, scale = (arrange(tensor).reshape(tensor.shape) for tensor in (self.numbers, self.scale))
        return QuantisedMatrix(numbers, scale)

    def widen_to(self, target: Tensor, slices: tuple[slice, ...], columns: int) -> None:
        """Writes the `slices` of the matrix, or of those of experts [E, N, K], to `target`, a strip of rows
        at a time. `columns`: K."""
        if len(slices) == 3:
            for expert, to in zip(range(slices[0].start, slices[0].stop), target, strict=True):
                QuantisedMatrix(self.numbers[expert], self.scale[expert]).widen_to(to, slices[1:], columns)
            return
        rows, across = slices
        strip = max(1, NUMBERS // columns // BLOCK[0]) * BLOCK[0]
        # in blocks a part begins where one begins
        for first in range(rows.start - rows.start % BLOCK[0], rows.stop, strip):
            start, stop = max(first, rows.start), min(first + strip, rows.stop)
            wide = widen(self.rows(first, stop), columns)[start - first :, across]
            target[start - rows.start : stop - rows.start].copy_(wide)

    def is_finite(self) -> bool:
        if self.numbers.dtype == torch.float8_e4m3fn:
            return is_finite(self.numbers, self.scale.float())
        scales = (self.scale,) if self.global_scale is None else (self.scale, self.global_scale)
        return all(bool(torch.isfinite(scale.float()).all()) for scale in scales)


def widen(matrix: QuantisedMatrix, columns: int) -> Tensor:
    """→ [N, columns] float32"""
    numbers, scale = matrix.numbers, matrix.scale
    if scale.itemsize == 1 and numbers.dtype == torch.uint8:
        wide = dequantize_e2m1(numbers, scale)
        return wide if matrix.global_scale is None else wide.mul_(matrix.global_scale)
    if matrix.in_blocks:
        return dequantize_block(numbers, scale)
    is_integer = numbers.dtype == torch.uint8
    halves = is_integer and numbers.shape[-1] != columns
    middle = 0 if not is_integer else MIDDLE if halves else 128
    out = (unpacked(numbers) if halves else numbers).to(torch.float32, copy=True)
    scale, zeros = scale.float(), None if matrix.zeros is None else matrix.zeros.float()
    if matrix.group_of is not None:
        at = matrix.group_of.long()
        return out.sub_(middle if zeros is None else zeros[:, at]).mul_(scale[:, at])
    grouped = out.view(len(out), scale.shape[1], -1)
    if zeros is not None:
        grouped.sub_(zeros.unsqueeze(-1))
    elif middle:
        grouped.sub_(middle)
    return grouped.mul_(scale.unsqueeze(-1)).view(out.shape)


def make_room_by_row(
    module: nn.Module,
    name: str,
    bits: int,
    groups: int,
    zeros: bool,
    scales: torch.dtype,
    global_scale: bool = False,
) -> None:
    """Changes a module before loading: the parameter `name` [..., rows, columns] becomes float8, or numbers
    of four bits, with as many scales for each row. `name`_scale_inv is added and, where the format has them,
    `name`_zeros and `name`_global_scale."""
    old = module.get_parameter(name)
    shape, one = (*old.shape[:-1], groups), (*old.shape[:-1], old.shape[-1] * bits // 8)
    params = {name: (one, FP8 if bits == 8 else torch.uint8), name + SCALE: (shape, scales)}
    if zeros:
        params[name + ZEROS] = shape, torch.uint8
    if global_scale:
        params[name + GLOBAL_SCALE] = (*old.shape[:-1], 1), torch.float32
    for param_name, (size, dtype) in params.items():
        setattr(
            module,
            param_name,
            nn.Parameter(torch.empty(size, dtype=dtype, device=old.device), requires_grad=False),
        )


def unpacked(halves: Tensor) -> Tensor:
    """[..., K / 2] uint8 → [..., K] from 0 to 15, the low half of each byte first."""
    return torch.stack([halves & 15, halves >> 4], -1).flatten(-2)


def packed(numbers: Tensor) -> Tensor:
    """The inverse: [..., K] uint8 below 16 → [..., K / 2]."""
    return numbers[..., ::2] | numbers[..., 1::2] << 4
