"""y = x W^T + b for a few rows: the weights are read once, at the speed of memory.

The weights are the matrix unit's M operand and the rows, padded to 16, its N: a tile of W [BN, BK] times x^T [BK, BT]. The sum over K
is split over programs where N alone does not fill the processor; the parts are added in a fixed order, so that the result does not
depend on which program ends first. Moves N K + T (K + N) numbers, 2 T N K FLOPs.

float8 weights (e4m3, one scale per 128 x 128 block) are widened in registers, and each block's product is scaled on its own.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpserve_kernels.tiling import Tiling, processors_of, type_name, with_table

MAX_ROWS = 64
BLOCK = 128  # of float8 scales


@triton.jit(do_not_specialize=["rows"])
def skinny_kernel(
    p_x, p_w, p_scale, p_bias, p_out, p_partial, rows, stride_x, N: tl.constexpr, K: tl.constexpr, stride_scale,
    BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLITS: tl.constexpr, BIAS: tl.constexpr, FP8: tl.constexpr,
):  # fmt: skip
    i_n, i_split = tl.program_id(0), tl.program_id(1)
    o_n, o_t, o_k = i_n * BN + tl.arange(0, BN), tl.arange(0, BT), tl.arange(0, BK)
    m_n, m_t = o_n < N, o_t < rows
    p_rows = p_w + o_n.to(tl.int64)[:, None] * K + o_k[None, :]
    p_cols = p_x + o_t[:, None] * stride_x + o_k[None, :]
    b_acc = tl.zeros([BN, BT], tl.float32)
    blocks = tl.cdiv(K, BK)
    per = tl.cdiv(blocks, SPLITS)
    start = i_split * per
    for i in range(tl.maximum(tl.minimum(per, blocks - start), 0)):
        k = (start + i) * BK
        m_k = k + o_k < K
        b_x = tl.load(p_cols + k, mask=m_t[:, None] & m_k[None, :], other=0.0)
        b_w = tl.load(p_rows + k, mask=m_n[:, None] & m_k[None, :], other=0.0)
        if FP8:
            scale = tl.load(p_scale + (i_n * BN // 128) * stride_scale + k // 128)
            b_acc += tl.dot(b_w.to(b_x.dtype), tl.trans(b_x), input_precision="ieee") * scale
        else:
            b_acc = tl.dot(b_w, tl.trans(b_x), b_acc, input_precision="ieee")
    m = m_n[:, None] & m_t[None, :]
    if SPLITS == 1:
        if BIAS:
            b_acc += tl.load(p_bias + o_n, mask=m_n, other=0.0).to(tl.float32)[:, None]
        tl.store(p_out + o_t[None, :] * N + o_n[:, None], b_acc.to(p_out.dtype.element_ty), mask=m)
    else:
        tl.store(p_partial + (i_split * rows + o_t)[None, :] * N + o_n[:, None], b_acc, mask=m)


@triton.jit(do_not_specialize=["rows"])
def add_parts_kernel(p_out, p_partial, p_bias, rows, N: tl.constexpr, B: tl.constexpr, SPLITS: tl.constexpr, BIAS: tl.constexpr):
    i_row, o = tl.program_id(0), tl.program_id(1) * B + tl.arange(0, B)
    m = o < N
    b_sum = tl.zeros([B], tl.float32)
    for s in tl.static_range(SPLITS):
        b_sum += tl.load(p_partial + (s * rows + i_row) * N + o, mask=m, other=0.0)
    if BIAS:
        b_sum += tl.load(p_bias + o, mask=m, other=0.0).to(tl.float32)
    tl.store(p_out + i_row * N + o, b_sum.to(p_out.dtype.element_ty), mask=m)


def tiling(rows: int, x_bytes: int, hip: bool) -> Tiling:
    """float32, which no matrix unit multiplies in full precision, gets small tiles. BK divides a block of float8 scales."""
    BT = max(16, triton.next_power_of_2(rows))
    if x_bytes == 4:
        return Tiling(BT, 32, 32, 2)
    return Tiling(BT, 64, BLOCK, 2 if hip else 4)


def splits_for(outputs: int, inputs: int, block_n: int, block_k: int, processors: int) -> int:
    """Two waves of programs, but no part shorter than four blocks."""
    programs = triton.cdiv(outputs, block_n)
    wanted = max(1, 2 * processors // programs)
    return int(min(1 << (wanted.bit_length() - 1), max(1, triton.cdiv(inputs, block_k) // 4), 16))


def skinny_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None, *, splits: int | None = None
) -> Tensor:
    """x [T, K] with T ≤ 64, weight [N, K], bias [N] or None, scale [N / 128, K / 128] rounded up for float8 weights → [T, N]"""
    (rows, inputs), outputs = x.shape, weight.shape[0]
    fp8 = scale is not None
    assert rows <= MAX_ROWS and weight.shape[1] == inputs and weight.is_contiguous() and x.stride(1) == 1, (x.shape, weight.shape)
    assert scale is None or scale.shape == (triton.cdiv(outputs, BLOCK), triton.cdiv(inputs, BLOCK)), (weight.shape, scale)
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    if not rows:
        return out
    shape = f"{type_name(weight.dtype)} N{outputs} K{inputs}"
    cut, table_splits = with_table(tiling(rows, x.element_size(), torch.version.hip is not None), "skinny_linear", shape, rows, x.device)
    if splits is None:
        splits = table_splits or splits_for(outputs, inputs, cut.BN, cut.BK, processors_of(x.device))
    partial = out if splits == 1 else torch.empty(splits, rows, outputs, dtype=torch.float32, device=x.device)
    skinny_kernel[(triton.cdiv(outputs, cut.BN), splits)](
        x, weight, scale, bias, out, partial, rows, x.stride(0), N=outputs, K=inputs, stride_scale=0 if scale is None else scale.stride(0),
        BT=cut.BT, BN=cut.BN, BK=cut.BK, SPLITS=splits, BIAS=bias is not None, FP8=fp8, num_warps=cut.warps, num_stages=cut.stages,
    )  # fmt: skip
    if splits > 1:
        add_parts_kernel[(rows, triton.cdiv(outputs, 1024))](
            out, partial, bias, rows, N=outputs, B=1024, SPLITS=splits, BIAS=bias is not None
        )
    return out
