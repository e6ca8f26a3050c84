"""y = x W^T + b for a few rows: the weights are read once, at the speed of memory.

The weights are the matrix unit's M operand and the rows, padded to 16, its N: a tile of W [BN, BK] times x^T [BK, BT]. A table's tiling
whose BT is 1 or 2 multiplies one or two rows without the unit (gemv.py). The sum over K is split over programs where N alone does not
fill the processor; the parts are added in a fixed order. Moves N K + T (K + N) numbers, 2 T N K FLOPs.

`skinny_gated` has rows of gates and rows of ups in one tile, and writes silu(gate) * up.

float8 weights (e4m3, one scale per 128 x 128 block) are widened in registers, and each block's product is scaled on its own.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpserve_kernels import dependent_launch, tuned
from mtpserve_kernels.arrivals import arrival_counters
from mtpserve_kernels.dependent_launch import grid_dependency_wait
from mtpserve_kernels.fused.gemv import gemv_kernel, prefetch_tiles, store_or_add
from mtpserve_kernels.tiling import Tiling, processors_of, type_name, with_table

MAX_ROWS, GEMV_ROWS = 64, 2
BLOCK = 128  # of float8 scales


@triton.jit(do_not_specialize=["rows"])
def skinny_kernel(
    p_x, p_w, p_scale, p_bias, p_out, p_parts, p_arrivals, rows, stride_x, N, K, stride_scale, BT: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, STAGES: tl.constexpr, GATED: tl.constexpr, launch_pdl: tl.constexpr,
):  # fmt: skip
    """The grid is [blocks of outputs, splits]. p_scale is None but for float8, p_parts for a single split."""
    i_n, i_split = tl.program_id(0), tl.program_id(1)
    BM: tl.constexpr = 2 * BN if GATED else BN
    o_m, o_t, o_k = tl.arange(0, BM), tl.arange(0, BT), tl.arange(0, BK)
    o_n = i_n * BN + tl.arange(0, BN)
    o_w = i_n * BN + o_m % BN + o_m // BN * N
    m_w, m_t = i_n * BN + o_m % BN < N, o_t < rows
    p_rows = p_w + o_w.to(tl.int64)[:, None] * K + o_k[None, :]
    p_cols = p_x + o_t[:, None] * stride_x + o_k[None, :]
    b_acc = tl.zeros([BM, BT], tl.float32)
    blocks = tl.cdiv(K, BK)
    per = tl.cdiv(blocks, tl.num_programs(1))
    start = i_split * per
    prefetch_tiles(p_w, o_w, start * BK, (2 * N if GATED else N) - 1, K, BK, max(STAGES - 1, 1), launch_pdl)
    grid_dependency_wait(launch_pdl)
    for i in range(tl.maximum(tl.minimum(per, blocks - start), 0)):
        k = (start + i) * BK
        m_k = k + o_k < K
        b_x = tl.load(p_cols + k, mask=m_t[:, None] & m_k[None, :], other=0.0)
        b_w = tl.load(p_rows + k, mask=m_w[:, None] & m_k[None, :], other=0.0, eviction_policy="evict_first")
        if p_scale is not None:
            scale = tl.load(p_scale + (i_n * BN // 128) * stride_scale + k // 128)
            b_acc += tl.dot(b_w.to(b_x.dtype), tl.trans(b_x), input_precision="ieee") * scale
        else:
            b_acc = tl.dot(b_w, tl.trans(b_x), b_acc, input_precision="ieee")
    store_or_add(b_acc, p_out, p_parts, p_arrivals, p_bias, i_n, i_split, o_w, o_n, o_t, rows, N, BN, GATED)


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
    return few_rows("skinny_linear", x, weight, bias, scale, splits)


def skinny_gated(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, splits: int | None = None) -> Tensor:
    """x [T, K] with T ≤ 64, weight [2 S, K]: gates, then ups; bias [2 S] or None → silu(gate) * up [T, S]"""
    return few_rows("skinny_gated", x, weight, bias, None, splits)


def has_tiling(op: str, x: Tensor, weight: Tensor) -> bool:
    """Whether the table of x's chip has one for this product: `op` was measured there, and was faster than the library."""
    if x.dim() != 2 or len(x) > MAX_ROWS or x.dtype != weight.dtype or x.stride(1) != 1 or not weight.is_contiguous():
        return False
    return tuned.tiling(op, shape_of(weight), len(x), x.device) is not None


def shape_of(weight: Tensor) -> str:
    """As the tables have it."""
    return f"{type_name(weight.dtype)} N{weight.shape[0]} K{weight.shape[1]}"


def few_rows(op: str, x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None, splits: int | None) -> Tensor:
    """`op`: skinny_linear or skinny_gated, the tables' name and the product. See these."""
    (rows, inputs), gated = x.shape, op == "skinny_gated"
    outputs = weight.shape[0] // 2 if gated else weight.shape[0]
    assert rows <= MAX_ROWS and weight.shape[1] == inputs and weight.is_contiguous() and x.stride(1) == 1, (x.shape, weight.shape)
    assert not gated or weight.shape[0] % 2 == 0, weight.shape
    assert scale is None or scale.shape == (triton.cdiv(outputs, BLOCK), triton.cdiv(inputs, BLOCK)), (weight.shape, scale)
    assert scale is not None or weight.dtype == x.dtype, (x.dtype, weight.dtype)
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    if not rows:
        return out
    rule = tiling(rows, x.element_size(), torch.version.hip is not None)
    if rule.BT > 16:
        rule = replace(rule, warps=8)  # four spill on sm_80
    if gated:
        rule = replace(rule, BN=rule.BN // 2)
    cut, table_splits = with_table(rule, op, shape_of(weight), rows, x.device)
    if splits is None:
        splits = table_splits or splits_for(outputs, inputs, cut.BN, cut.BK, processors_of(x.device))
    blocks = triton.cdiv(outputs, cut.BN)
    parts = arrivals = None
    if splits > 1:
        parts = torch.empty(blocks * splits * cut.BT * cut.BN * (2 if gated else 1), dtype=torch.float32, device=x.device)
        arrivals = arrival_counters(op, blocks, x.device)
    constants = {"N": outputs, "K": inputs, "BN": cut.BN, "BK": cut.BK, "BT": cut.BT, "STAGES": cut.stages, "GATED": gated}
    options = {"num_warps": cut.warps, "launch_pdl": dependent_launch.enabled(x.device)}
    if cut.BT <= GEMV_ROWS:
        assert rows == cut.BT and scale is None, (rows, cut)
        gemv_kernel[(blocks, splits)](x, weight, bias, out, parts, arrivals, x.stride(0), **constants, **options)
    else:
        skinny_kernel[(blocks, splits)](
            x, weight, scale, bias, out, parts, arrivals, rows, x.stride(0), stride_scale=0 if scale is None else scale.stride(0),
            num_stages=cut.stages, **constants, **options,
        )  # fmt: skip
    return out
