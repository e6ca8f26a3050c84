"""Products with DeepSeek's float8 weights (e4m3, one scale per 128 x 128 block; https://arxiv.org/abs/2412.19437 §3.3).

Few rows: W8A16, the weights widened in registers (fused/linear.py). Above: W8A8, the rows quantised per 128 columns. sm_90's float8
units keep some 14 bits of their sums, so that every 128 products are taken out and added in float32, which is where the scales
are multiplied in anyway.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpserve_kernels.fused.linear import MAX_ROWS, skinny_linear

BLOCK = 128


@triton.jit
def quantize_rows_kernel(p_x, p_out, p_scale, stride_x, K: tl.constexpr, GROUP: tl.constexpr):
    i_row, i_group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o = i_group * GROUP + tl.arange(0, GROUP)
    b_x = tl.load(p_x + i_row * stride_x + o).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(b_x)), 1e-10) / 448.0
    b_x = tl.minimum(tl.maximum(b_x / scale, -448.0), 448.0)
    tl.store(p_out + i_row * K + o, b_x.to(p_out.dtype.element_ty))
    tl.store(p_scale + i_row * (K // GROUP) + i_group, scale)


@triton.jit(do_not_specialize=["rows"])
def linear_fp8_kernel(
    p_x, p_x_scale, p_w, p_scale, p_bias, p_out, rows, N: tl.constexpr, K: tl.constexpr, stride_scale,
    BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    i_t, i_n = tl.program_id(0), tl.program_id(1)
    o_t, o_n, o_k = i_t * BT + tl.arange(0, BT).to(tl.int64), i_n * BN + tl.arange(0, BN), tl.arange(0, BK)
    m_t, m_n = o_t < rows, o_n < N
    p_rows, p_cols = p_x + o_t[:, None] * K + o_k[None, :], p_w + o_n.to(tl.int64)[:, None] * K + o_k[None, :]
    b_acc = tl.zeros([BT, BN], tl.float32)
    for i in range(K // BK):
        b_x = tl.load(p_rows + i * BK, mask=m_t[:, None], other=0.0)
        b_w = tl.load(p_cols + i * BK, mask=m_n[:, None], other=0.0)
        b_x_scale = tl.load(p_x_scale + o_t * (K // BK) + i, mask=m_t, other=0.0)
        scale = tl.load(p_scale + (i_n * BN // 128) * stride_scale + i)
        b_acc += tl.dot(b_x, tl.trans(b_w)) * (b_x_scale * scale)[:, None]
    if BIAS:
        b_acc += tl.load(p_bias + o_n, mask=m_n, other=0.0).to(tl.float32)[None, :]
    m = m_t[:, None] & m_n[None, :]
    tl.store(p_out + o_t[:, None] * N + o_n[None, :], b_acc.to(p_out.dtype.element_ty), mask=m)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """See reference.quantize_rows."""
    rows, inputs = x.shape
    assert inputs % BLOCK == 0 and x.stride(1) == 1, x.shape
    out = torch.empty(rows, inputs, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(rows, inputs // BLOCK, dtype=torch.float32, device=x.device)
    if rows:
        quantize_rows_kernel[(rows, inputs // BLOCK)](x, out, scale, x.stride(0), K=inputs, GROUP=BLOCK, num_warps=1)
    return out, scale


def linear_fp8(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, K], weight [N, K] float8, scale [N / 128, K / 128] rounded up → [T, N] of x's type"""
    (rows, inputs), outputs = x.shape, weight.shape[0]
    if rows <= MAX_ROWS or inputs % BLOCK:
        # A last block of columns that is not whole has no float8 product: such a layer is widened whatever the rows.
        return torch.cat([skinny_linear(part, weight, bias, scale) for part in x.split(MAX_ROWS)]) if rows else x.new_empty(0, outputs)
    return linear_fp8_both(*quantize_rows(x), weight, scale, bias, x.dtype)


def linear_fp8_both(x8: Tensor, x_scale: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """W8A8 of what `quantize_rows` gave → [T, N] of `dtype`"""
    (rows, inputs), outputs = x8.shape, weight.shape[0]
    assert inputs % BLOCK == 0 and weight.shape[1] == inputs and weight.is_contiguous(), (x8.shape, weight.shape)
    out = torch.empty(rows, outputs, dtype=dtype, device=x8.device)
    BT = 64 if rows <= 128 else 128
    linear_fp8_kernel[(triton.cdiv(rows, BT), triton.cdiv(outputs, 64))](
        x8, x_scale, weight, scale, bias, out, rows, N=outputs, K=inputs, stride_scale=scale.stride(0),
        BT=BT, BN=64, BK=BLOCK, BIAS=bias is not None, num_warps=4 if BT == 64 else 8, num_stages=3 if torch.version.hip is None else 2,
    )  # fmt: skip
    return out
