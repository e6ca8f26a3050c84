"""Products with weights whose rows have scales of their own, one per group of columns: float8 (e4m3), four-bit integers, MXFP4 or NVFP4.

    weight        float8 [N, K] or uint8 [N, K / 2], two numbers in a byte, the low half first
    scale         [N, groups]; float8 where four bits are e2m1: of MXFP4 (e8m0) exponents alone, of NVFP4 (e4m3) for 16 columns each
    zeros         [N, groups] uint8: the integer that stands for 0; None: 8
    global_scale  [N, 1] float32: NVFP4's second scale, of a whole matrix; rows may be those of several

Few rows: the weights are widened in registers, and each tile's product is scaled on its own, so that a step over the inputs never leaves
its group. NVFP4's groups are shorter than a step: its numbers are scaled one by one, which is exact in any type of x. The even and the
odd inputs of four-bit weights are multiplied apart, as they lie in memory. Moves N K bytes or half of it.
Many rows: `widen_rows` writes the weights in the rows' type, for the vendor's product; two further bytes are written and read per number.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpserve_kernels.fused.linear import MAX_ROWS, add_parts_kernel, splits_for, tiling

PLAIN, FLOAT8, INT4, MXFP4, NVFP4 = 0, 1, 2, 3, 4


@triton.jit
def twice_e2m1(b):
    """Four bits of sign, exponent (2) and mantissa (1) → twice the number, whole: 0 1 2 3 4 6 8 12."""
    b_size = b & 7
    b_out = tl.where(b_size < 2, b_size, ((2 | (b & 1)) << (b_size >> 1)) >> 1)
    return tl.where(b > 7, -b_out, b_out)


@triton.jit
def row_scale(p_scale, mask, FORM: tl.constexpr):
    """float32, halved where numbers are twice as large."""
    b_scale = tl.load(p_scale, mask=mask, other=0)
    if FORM == 3:
        return (b_scale.to(tl.int32) << 23).to(tl.float32, bitcast=True) * 0.5
    if FORM == 4:  # e4m3 by hand: chips before sm_89 do not convert it, and a scale has no sign
        b_scale = b_scale.to(tl.int32)
        b_exponent = (b_scale >> 3) & 15
        b_whole = tl.where(b_exponent > 0, 8, 0) + (b_scale & 7)
        return b_whole.to(tl.float32) * ((tl.maximum(b_exponent, 1) + 116) << 23).to(tl.float32, bitcast=True)
    return b_scale.to(tl.float32)


@triton.jit
def row_scaled_tile(
    p_x, p_w, p_scale, p_second, m_t, m_n, o_n, k, K: tl.constexpr, GROUPS: tl.constexpr, BK: tl.constexpr,
    FORM: tl.constexpr, ZEROS: tl.constexpr,
):  # fmt: skip
    """p_x [BT] where the rows of x begin, o_n [BN] rows of W → W[o_n, k … k + BK] times x^T, [BN, BT] float32. p_second: see `second_of`"""
    p_group = o_n * GROUPS + (k * GROUPS) // K
    if FORM >= 2:
        o_h = tl.arange(0, BK // 2)
        m_h = k + 2 * o_h < K
        o_w = o_n.to(tl.int64)[:, None] * (K // 2) + k // 2 + o_h[None, :]
        b_w = tl.load(p_w + o_w, mask=m_n[:, None] & m_h[None, :], other=0).to(tl.int32)
        p_even, m = p_x[:, None] + k + 2 * o_h[None, :], m_t[:, None] & m_h[None, :]
        b_even, b_odd = tl.load(p_even, mask=m, other=0.0), tl.load(p_even + 1, mask=m, other=0.0)
        if FORM >= 3:
            b_low, b_high = twice_e2m1(b_w & 15), twice_e2m1(b_w >> 4)
        elif ZEROS:
            b_zero = tl.load(p_second + p_group, mask=m_n, other=0).to(tl.int32)[:, None]
            b_low, b_high = (b_w & 15) - b_zero, (b_w >> 4) - b_zero
        else:
            b_low, b_high = (b_w & 15) - 8, (b_w >> 4) - 8
        if FORM == 4:
            p_halves = p_scale + o_n[:, None] * GROUPS + (k + 2 * o_h[None, :]) // 16
            b_scale = row_scale(p_halves, m_n[:, None] & m_h[None, :], FORM)
            b_low, b_high = b_low * b_scale, b_high * b_scale
        b_out = tl.dot(b_low.to(b_even.dtype), tl.trans(b_even), input_precision="ieee")
        b_out = tl.dot(b_high.to(b_odd.dtype), tl.trans(b_odd), b_out, input_precision="ieee")
    else:
        o_k = tl.arange(0, BK)
        m_k = k + o_k < K
        b_w = tl.load(p_w + o_n.to(tl.int64)[:, None] * K + k + o_k[None, :], mask=m_n[:, None] & m_k[None, :], other=0.0)
        b_x = tl.load(p_x[:, None] + k + o_k[None, :], mask=m_t[:, None] & m_k[None, :], other=0.0)
        b_out = tl.dot(b_w.to(b_x.dtype), tl.trans(b_x), input_precision="ieee")
    if FORM == 4:
        b_out *= tl.load(p_second + o_n, mask=m_n, other=0.0)[:, None]
    elif FORM > 0:
        b_out *= row_scale(p_scale + p_group, m_n, FORM)[:, None]
    return b_out


@triton.jit(do_not_specialize=["rows"])
def linear_rows_kernel(
    p_x, p_w, p_scale, p_second, p_bias, p_out, p_partial, rows, stride_x, N: tl.constexpr, K: tl.constexpr,
    GROUPS: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr, BIAS: tl.constexpr,
    FORM: tl.constexpr, ZEROS: tl.constexpr,
):  # fmt: skip
    i_n, i_split = tl.program_id(0), tl.program_id(1)
    o_n, o_t = i_n * BN + tl.arange(0, BN), tl.arange(0, BT)
    m_n, m_t = o_n < N, o_t < rows
    b_acc = tl.zeros([BN, BT], tl.float32)
    blocks = tl.cdiv(K, BK)
    per = tl.cdiv(blocks, SPLITS)
    start = i_split * per
    for i in range(tl.maximum(tl.minimum(per, blocks - start), 0)):
        b_acc += row_scaled_tile(
            p_x + o_t * stride_x, p_w, p_scale, p_second, m_t, m_n, o_n, (start + i) * BK, K=K, GROUPS=GROUPS, BK=BK,
            FORM=FORM, ZEROS=ZEROS,
        )  # fmt: skip
    m = m_n[:, None] & m_t[None, :]
    if SPLITS == 1:
        if BIAS:
            b_acc += tl.load(p_bias + o_n, mask=m_n, other=0.0).to(tl.float32)[:, None]
        tl.store(p_out + o_t[None, :] * N + o_n[:, None], b_acc.to(p_out.dtype.element_ty), mask=m)
    else:
        tl.store(p_partial + (i_split * rows + o_t)[None, :] * N + o_n[:, None], b_acc, mask=m)


@triton.jit
def widen_rows_kernel(
    p_w, p_scale, p_second, p_out, K: tl.constexpr, GROUPS: tl.constexpr, B: tl.constexpr, FORM: tl.constexpr, ZEROS: tl.constexpr
):  # fmt: skip
    i_n, o = tl.program_id(0).to(tl.int64), tl.program_id(1) * B + tl.arange(0, B)
    p_group = i_n * GROUPS + (o * GROUPS) // K
    if FORM >= 2:
        o_h = tl.program_id(1) * (B // 2) + tl.arange(0, B // 2)
        b_halves = tl.load(p_w + i_n * (K // 2) + o_h, mask=o_h < K // 2, other=0).to(tl.int32)
        b_w = tl.interleave(b_halves & 15, b_halves >> 4)
        if FORM >= 3:
            b_w = twice_e2m1(b_w)
        elif ZEROS:
            b_w -= tl.load(p_second + p_group, mask=o < K, other=0).to(tl.int32)
        else:
            b_w -= 8
    else:
        b_w = tl.load(p_w + i_n * K + o, mask=o < K, other=0.0)
    b_out = b_w.to(tl.float32) * row_scale(p_scale + p_group, o < K, FORM)
    if FORM == 4:
        b_out *= tl.load(p_second + i_n)
    tl.store(p_out + i_n * K + o, b_out.to(p_out.dtype.element_ty), mask=o < K)


def form_of(weight: Tensor, scale: Tensor | None) -> int:
    if scale is None:
        return PLAIN
    if weight.dtype == torch.float8_e4m3fn:
        return FLOAT8
    return {torch.float8_e8m0fnu: MXFP4, torch.float8_e4m3fn: NVFP4}.get(scale.dtype, INT4)


def as_bytes(scale: Any) -> Any:
    """Triton has no type of exponents alone, and not every chip float8."""
    return scale.view(torch.uint8) if scale is not None and scale.itemsize == 1 else scale


def second_of(zeros: Tensor | None, global_scale: Tensor | None) -> Tensor | None:
    """Beside its scales a form has zeros, or the global scales of NVFP4, or nothing."""
    return zeros if global_scale is None else global_scale


def step_of(most: int, columns: int, groups: int, form: int) -> int:
    """Inputs of one step: a power of two, within a group unless the form scales numbers one by one."""
    group = columns // groups
    step = most if groups == 1 or form == NVFP4 else min(most, group & -group)
    assert columns % groups == 0 and step >= 32, (columns, groups)
    return step


def check_rows(weight: Tensor, scale: Tensor | None, zeros: Tensor | None, global_scale: Tensor | None, columns: int) -> int:
    """→ the number of groups. weight [..., N, K], or K / 2 in bytes."""
    halves = weight.dtype == torch.uint8
    assert weight.shape[-1] * (2 if halves else 1) == columns and weight.is_contiguous(), (weight.shape, columns)
    if scale is None:
        assert weight.is_floating_point() and weight.itemsize > 1 and zeros is None, weight.dtype
        return 1
    assert scale.shape[:-1] == weight.shape[:-1] and scale.is_contiguous(), (weight.shape, scale.shape)
    assert zeros is None or (zeros.shape == scale.shape and zeros.dtype == torch.uint8 and zeros.is_contiguous())
    if form_of(weight, scale) == NVFP4:
        assert global_scale is not None and scale.shape[-1] * 16 == columns, (scale.shape, columns)
        assert global_scale.dtype == torch.float32 and global_scale.shape == (*scale.shape[:-1], 1) and global_scale.is_contiguous()
    return scale.shape[-1]


def linear_rows(
    x: Tensor, weight: Tensor, scale: Tensor, zeros: Tensor | None = None, global_scale: Tensor | None = None,
    bias: Tensor | None = None, *, splits: int | None = None,
) -> Tensor:  # fmt: skip
    """x [T, K] with T ≤ 64 → [T, N] of x's type. See reference.linear_rows."""
    (rows, inputs), outputs = x.shape, weight.shape[0]
    groups = check_rows(weight, scale, zeros, global_scale, inputs)
    assert rows <= MAX_ROWS and x.stride(1) == 1, x.shape
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    if not rows:
        return out
    cut = tiling(rows, x.element_size(), torch.version.hip is not None)
    halves, form = weight.dtype == torch.uint8, form_of(weight, scale)
    BN = 16 if halves and x.element_size() == 4 else cut.BN  # wider ones of halves in float32 spill
    BK = step_of(cut.BK, inputs, groups, form)
    if splits is None:
        count = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 4
        splits = splits_for(outputs, inputs, BN, BK, count)
    partial = out if splits == 1 else torch.empty(splits, rows, outputs, dtype=torch.float32, device=x.device)
    linear_rows_kernel[(triton.cdiv(outputs, BN), splits)](
        x, weight, as_bytes(scale), second_of(zeros, global_scale), bias, out, partial, rows, x.stride(0), N=outputs, K=inputs,
        GROUPS=groups, BT=cut.BT, BN=BN, BK=BK, SPLITS=splits, BIAS=bias is not None, FORM=form, ZEROS=zeros is not None,
        num_warps=4, num_stages=cut.stages,
    )  # fmt: skip
    if splits > 1:
        add_parts_kernel[(rows, triton.cdiv(outputs, 1024))](
            out, partial, bias, rows, N=outputs, B=1024, SPLITS=splits, BIAS=bias is not None
        )
    return out


def widen_rows(weight: Tensor, scale: Tensor, zeros: Tensor | None, global_scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """→ [N, K] of `dtype`, for a product with many rows. See reference.widen_rows."""
    outputs, inputs = weight.shape[0], weight.shape[1] * (2 if weight.dtype == torch.uint8 else 1)
    groups = check_rows(weight, scale, zeros, global_scale, inputs)
    out = torch.empty(outputs, inputs, dtype=dtype, device=weight.device)
    widen_rows_kernel[(outputs, triton.cdiv(inputs, 1024))](
        weight, as_bytes(scale), second_of(zeros, global_scale), out, K=inputs, GROUPS=groups, B=1024, FORM=form_of(weight, scale),
        ZEROS=zeros is not None, num_warps=4,
    )  # fmt: skip
    return out
