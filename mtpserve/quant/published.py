"""The way from the published layouts of quantised matrices to stored.py's. All widths are in numbers: N
outputs, K inputs.

A word of 32 bits holds 32 / bits numbers, the first in its lowest bits, as bytes in memory do too; AWQ's
words have an order of their own:

    GPTQ                qweight [K / 8, N], words down the inputs     qzeros [groups, N / 8]
                        scales [groups, N]   g_idx [K]
    AWQ                 qweight [K, N / 8], words along the outputs   qzeros [groups, N / 8]
                        scales [groups, N]
    compressed-tensors  weight_packed [N, K / 8]                      weight_zero_point [N / 8, groups]
                        weight_scale [N, groups]

NVFP4 has bytes: ModelOpt's weight [N, K / 2] with weight_scale_2, a factor, and compressed-tensors'
weight_packed [N, K / 2] with weight_global_scale, a divisor; both weight_scale [N, K / 16].

AWQ (https://arxiv.org/abs/2306.00978): the eight numbers of a word are those of outputs 0 2 4 6 1 3 5 7. GPTQ
(https://arxiv.org/abs/2210.17323): its first version stores zeros minus one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mtpserve.quant.fp8 import BLOCK, in_blocks
from mtpserve.quant.stored import QuantisedMatrix, packed, unpacked

AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # where in a word output 0, 1, 2, … of its eight is


def scaled(weight: Tensor, scale: Tensor, zeros: Tensor | None = None) -> QuantisedMatrix:
    """weight float8 or int8 [N, K]; one scale, or [N], [N, groups], or of blocks, and these also of experts
    [E, N, K]; zeros as the scales, int8."""
    if scale.dim() == 4:  # ModelOpt's [N / 128, 1, K / 128, 1]
        scale = scale[:, 0, :, 0]
    rows, scale = len(weight), numbers_of(scale)
    if in_blocks(weight, scale):
        return QuantisedMatrix(weight, scale)
    if zeros is None:
        return QuantisedMatrix(weight, by_row(scale, rows))
    # Numbers from -128 on become whole numbers from 0 on.
    weight, zeros = (weight.short() + 128).byte(), (zeros.short() + 128).byte()
    return QuantisedMatrix(weight, by_row(scale, rows), by_row(zeros, rows))


def in_chunks(weight: Tensor, scale: Tensor, chunks: int) -> QuantisedMatrix:
    """weight float8 [N, K]; scale of blocks of 128 x 128 that begin anew with each of the `chunks` of rows →
    with a scale for each row of a block, so that rows can be put in another order."""
    by_chunk = (
        numbers_of(scale)
        .unflatten(0, (chunks, -1))
        .repeat_interleave(BLOCK[0], 1)[:, : len(weight) // chunks]
    )
    return QuantisedMatrix(weight, by_chunk.flatten(0, 1).contiguous())


def numbers_of(scale: Tensor) -> Tensor:
    """Exponents alone, one byte each, as numbers."""
    return (
        (scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale).float()
        if scale.itemsize == 1
        else scale
    )


def by_row(scale: Tensor, rows: int) -> Tensor:
    """One number, or one for each row, or [rows, groups] → [rows, groups]"""
    if scale.numel() == 1:
        return scale.reshape(1, 1).expand(rows, 1).contiguous()
    return scale.reshape(rows, -1).contiguous()


def gptq(
    qweight: Tensor, scales: Tensor, qzeros: Tensor | None, g_idx: Tensor | None, bits: int, below: int
) -> QuantisedMatrix:
    """`below`: how much less than the zeros is stored, 1 in the first version of the format and 0 in the
    second."""
    zeros = None if qzeros is None else (of_words(qzeros, bits) + below).t().contiguous()
    return QuantisedMatrix(
        qweight.t().contiguous().view(torch.uint8),
        scales.t().contiguous(),
        zeros,
        None if in_order(g_idx, scales) else g_idx,
    )


def in_order(g_idx: Tensor | None, scales: Tensor) -> bool:
    """Columns are in groups of equal size, one group after the other."""
    if g_idx is None:
        return True
    columns, groups = len(g_idx), len(scales)
    return columns % groups == 0 and torch.equal(
        g_idx.long(), torch.arange(columns, device=g_idx.device) // (columns // groups)
    )


def awq(qweight: Tensor, scales: Tensor, qzeros: Tensor | None) -> QuantisedMatrix:
    """Four bits."""
    zeros = None if qzeros is None else in_awq_order(qzeros).t().contiguous()
    return QuantisedMatrix(packed(in_awq_order(qweight).t().contiguous()), scales.t().contiguous(), zeros)


def in_awq_order(words: Tensor) -> Tensor:
    """[rows, W] int32 → [rows, 8 W] uint8"""
    eights: Tensor = of_words(words, 4).unflatten(-1, (-1, 8))
    return eights[..., list(AWQ_PLACES)].flatten(-2)


def compressed(
    packed_words: Tensor,
    scale: Tensor,
    zeros: Tensor | None,
    group_of: Tensor | None,
    columns: int,
    bits: int,
) -> QuantisedMatrix:
    """Words may reach beyond the last column. Zeros are packed along the rows, or int8 as they are; as the
    numbers they are stored above the smallest one."""
    numbers, rows = packed_words.contiguous().view(torch.uint8)[:, : columns * bits // 8], len(packed_words)
    if zeros is not None:
        unsigned_zeros = (
            zeros.short().add_(1 << (bits - 1)).byte()
            if zeros.dtype == torch.int8
            else of_words(zeros.t(), bits).t()[:rows]
        )
        zeros = by_row(unsigned_zeros, rows)
    scale = by_row(scale, rows)
    return QuantisedMatrix(
        numbers.contiguous(), scale, zeros, None if in_order(group_of, scale.t()) else group_of
    )


def of_words(words: Tensor, bits: int) -> Tensor:
    """[rows, W] int32 → [rows, W * 32 / bits] uint8"""
    as_bytes = words.contiguous().view(torch.uint8)
    return unpacked(as_bytes) if bits == 4 else as_bytes


def nvfp4(halves: Tensor, scale: Tensor, global_scale: Tensor) -> QuantisedMatrix:
    """halves [N, K / 2], scale [N, K / 16] float8, global_scale: one number."""
    by_row = global_scale.float().reshape(1, 1).expand(len(halves), 1).contiguous()
    return QuantisedMatrix(halves, scale, global_scale=by_row)


def mxfp4(blocks: Tensor, exponents: Tensor) -> QuantisedMatrix:
    """blocks [..., groups, 16] or [..., K / 2], exponents [..., groups]: one byte each"""
    numbers = blocks.flatten(-2) if blocks.dim() > exponents.dim() else blocks
    return QuantisedMatrix(numbers, exponents.view(torch.float8_e8m0fnu))
