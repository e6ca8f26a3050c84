"""DeepSeek-V3's storage of a matrix: float8 (e4m3) with one float32 scale per block of 128 x 128
(https://arxiv.org/abs/2412.19437 §3.3).

Not a linear method (see kept.py): the conversions, used when a checkpoint is loaded and by tools that write
one.

               columns: 128   128   44
    rows 128  |  s00  |  s01  | s02 |     weight[i, j] = float8[i, j] * scale_inv[i // 128, j // 128]
    rows  72  |  s10  |  s11  | s12 |     blocks at the edges are smaller, the scales' shape is rounded up
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mtpserve.core.arch.model import FP8_BLOCK

BLOCK = FP8_BLOCK
FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
SCALE = "_scale_inv"  # suffix of a matrix's name, in checkpoints and modules alike


def scale_shape(rows: int, columns: int, block: tuple[int, int] = BLOCK) -> tuple[int, int]:
    return -(-rows // block[0]), -(-columns // block[1])


def in_blocks(weight: Tensor, scale: Tensor) -> bool:
    """True if the scales are those of blocks of a matrix, or of the matrices of experts."""
    return tuple(scale.shape) == (*weight.shape[:-2], *scale_shape(*weight.shape[-2:]))


def dequantize_block(weight: Tensor, scale_inv: Tensor, block: tuple[int, int] = BLOCK) -> Tensor:
    """weight [rows, columns], scale_inv [rows / block, columns / block] rounded up → [rows, columns]
    float32"""
    rows, columns = weight.shape
    assert tuple(scale_inv.shape) == scale_shape(rows, columns, block), (weight.shape, scale_inv.shape)
    out = weight.to(torch.float32, copy=True)
    by_column = scale_inv.float().repeat_interleave(block[1], 1)[:, :columns]
    # One block row at a time: scales spread over the whole matrix would be a second matrix of its size.
    for strip, scales in zip(torch.split(out, block[0]), by_column, strict=True):
        strip.mul_(scales)
    return out


def quantize_block(weight: Tensor, block: tuple[int, int] = BLOCK) -> tuple[Tensor, Tensor]:
    """The inverse: weight [rows, columns] → (float8 e4m3 of the same shape, scale_inv float32); each block's
    largest number becomes 448."""
    rows, columns = weight.shape
    block_rows, block_columns = scale_shape(rows, columns, block)
    padded = weight.new_zeros(block_rows * block[0], block_columns * block[1], dtype=torch.float32)
    padded[:rows, :columns] = weight
    # [blocks down, rows, blocks across, columns]
    blocks = padded.view(block_rows, block[0], block_columns, block[1])
    largest = blocks.abs().amax((1, 3))
    scale_inv = torch.where(largest > 0, largest / LARGEST, 1.0)
    scaled = (blocks / scale_inv[:, None, :, None]).clamp_(-LARGEST, LARGEST)
    return scaled.view(padded.shape)[:rows, :columns].to(FP8), scale_inv


def make_room(module: nn.Module, name: str, parts: tuple[int, ...]) -> None:
    """Changes a module before loading: the parameter `name` [..., rows, columns] becomes float8 in blocks,
    and `name`_scale_inv is added. `parts`: the row counts of the matrices that are fused in it; each begins a
    new block."""
    old = module.get_parameter(name)
    *experts, _, columns = old.shape
    shape = *experts, sum(scale_shape(rows, columns)[0] for rows in parts), scale_shape(1, columns)[1]
    setattr(module, name, nn.Parameter(torch.empty_like(old, dtype=FP8), requires_grad=False))
    setattr(
        module,
        name + SCALE,
        nn.Parameter(torch.empty(shape, dtype=torch.float32, device=old.device), requires_grad=False),
    )


def is_finite(weight: Tensor, scale_inv: Tensor) -> bool:
    """e4m3 has no infinity, and one NaN for each sign."""
    return bool(torch.isfinite(scale_inv).all()) and not bool((weight.view(torch.uint8) & 0x7F == 0x7F).any())
