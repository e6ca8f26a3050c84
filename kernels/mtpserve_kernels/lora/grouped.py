"""Low-rank adapters in Triton: reference.py says what is computed.

Both kernels take tiles of rows in the order of their adapters, and multiply a tile once for each adapter that it has: mostly one. A row
gets the sum of its own adapter alone, so that no number of another one reaches it, and a tile without adapters ends at once. Moves
A and B of an adapter once per tile of its rows, from the cache after the first; 2 T R (parts K + N) FLOPs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpserve_kernels import dependent_launch
from mtpserve_kernels.dependent_launch import grid_dependency_wait
from mtpserve_kernels.lora.reference import RowAdapters, check
from mtpserve_kernels.tiling import Tiling

MAX_PARTS = 3


@triton.jit
def rows_of_tile(p_slots, p_order, i_t, rows, BT: tl.constexpr):
    """→ the tile's rows, their adapters (-1: none, or no row), and the first and last adapter among them."""
    o_t = i_t * BT + tl.arange(0, BT)
    b_rows = tl.load(p_order + o_t, mask=o_t < rows, other=0)
    b_slots = tl.load(p_slots + b_rows, mask=o_t < rows, other=-1).to(tl.int32)
    first = tl.min(tl.where(b_slots < 0, 1 << 30, b_slots), 0)
    return b_rows, b_slots, first, tl.max(b_slots, 0)


@triton.jit(do_not_specialize=["rows"])
def shrink_kernel(
    p_x, p_a, p_low, p_slots, p_order, rows, stride_x, K, J, BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    launch_pdl: tl.constexpr,
):  # fmt: skip
    """low [T, J] = A x; J = parts R. The grid is [tiles of rows, blocks of J]."""
    grid_dependency_wait(launch_pdl)
    b_rows, b_slots, first, last = rows_of_tile(p_slots, p_order, tl.program_id(0), rows, BT)
    o_n, o_k = tl.program_id(1) * BN + tl.arange(0, BN), tl.arange(0, BK)
    m_n = o_n < J
    b_low = tl.zeros([BT, BN], tl.float32)
    for slot in range(first, last + 1):
        m_t = b_slots == slot
        if tl.max(m_t.to(tl.int32), 0) > 0:
            p_rows = p_a + (slot * J + o_n).to(tl.int64)[None, :] * K
            b_acc = tl.zeros([BT, BN], tl.float32)
            for k in range(0, K, BK):
                m_k = k + o_k < K
                b_x = tl.load(p_x + b_rows[:, None] * stride_x + (k + o_k)[None, :], mask=m_t[:, None] & m_k[None, :], other=0.0)
                b_a = tl.load(p_rows + (k + o_k)[:, None], mask=m_n[None, :] & m_k[:, None], other=0.0)
                b_acc = tl.dot(b_x, b_a, b_acc, input_precision="ieee")
            b_low = tl.where(m_t[:, None], b_acc, b_low)
    p_out = p_low + b_rows[:, None] * J + o_n[None, :]
    tl.store(p_out, b_low.to(p_low.dtype.element_ty), mask=(b_slots >= 0)[:, None] & m_n[None, :])


@triton.jit(do_not_specialize=["rows"])
def expand_kernel(
    p_y, p_low, p_b, p_slots, p_order, rows, end_0, end_1, N, R, BT: tl.constexpr, BN: tl.constexpr, BR: tl.constexpr,
    PARTS: tl.constexpr, launch_pdl: tl.constexpr,
):  # fmt: skip
    """y [T, N] += B low. Outputs before end_0 are the first part's, those before end_1 the second's. The grid is [tiles of rows, blocks
    of N]."""
    grid_dependency_wait(launch_pdl)
    b_rows, b_slots, first, last = rows_of_tile(p_slots, p_order, tl.program_id(0), rows, BT)
    i_n, o_r = tl.program_id(1) * BN, tl.arange(0, BR)
    o_n = i_n + tl.arange(0, BN)
    m_n, m_r = o_n < N, o_r < R
    b_sum = tl.zeros([BT, BN], tl.float32)
    for slot in range(first, last + 1):
        m_t = b_slots == slot
        if tl.max(m_t.to(tl.int32), 0) > 0:
            p_up = p_b + (slot * R + o_r).to(tl.int64)[:, None] * N + o_n[None, :]
            b_up = tl.load(p_up, mask=m_r[:, None] & m_n[None, :], other=0.0)
            for part in tl.static_range(PARTS):
                start = 0 if part == 0 else end_0 if part == 1 else end_1
                end = N if part == PARTS - 1 else end_0 if part == 0 else end_1
                if (start < i_n + BN) & (end > i_n):
                    p_own = p_low + b_rows[:, None] * (PARTS * R) + (part * R + o_r)[None, :]
                    b_own = tl.load(p_own, mask=m_t[:, None] & m_r[None, :], other=0.0)
                    b_acc = tl.dot(b_own, b_up, input_precision="ieee")
                    m_own = (o_n >= start) & (o_n < end)
                    b_sum = tl.where(m_t[:, None] & m_own[None, :], b_acc, b_sum)
    p_out = p_y + b_rows[:, None] * N + o_n[None, :]
    m_out = (b_slots >= 0)[:, None] & m_n[None, :]
    b_y = tl.load(p_out, mask=m_out, other=0.0).to(tl.float32)
    tl.store(p_out, (b_y + b_sum).to(p_y.dtype.element_ty), mask=m_out)


def tiling(rows: int, x_bytes: int) -> Tiling:
    """float32, which no matrix unit multiplies in full precision, gets small tiles."""
    if x_bytes == 4:
        return Tiling(16, 16, 32, 2)
    return Tiling(16 if rows <= 256 else 64, 64, 128, 3)


def add_lora(x: Tensor, y: Tensor, adapters: RowAdapters, a: Tensor, b: Tensor, parts: Sequence[int]) -> Tensor:
    """See reference.add_lora: x [T, K], y [T, N] in place, a [slots, parts R, K], b [slots, R, N]; at most three parts."""
    rank, (rows, outputs) = check(x, y, a, b, parts), y.shape
    assert len(parts) <= MAX_PARTS and a.is_contiguous() and b.is_contiguous(), (parts, a.stride(), b.stride())
    if not rows:
        return y
    all_ranks, cut = a.shape[1], tiling(rows, x.element_size())
    low = torch.empty(rows, all_ranks, dtype=x.dtype, device=x.device)
    ends = (parts[0], parts[0] + parts[1] if len(parts) > 1 else outputs)
    tiles, pdl = triton.cdiv(rows, cut.BT), dependent_launch.enabled(x.device)
    shrink_kernel[(tiles, triton.cdiv(all_ranks, 16))](
        x, a, low, *adapters, rows, x.stride(0), x.shape[1], all_ranks, BT=cut.BT, BN=16, BK=cut.BK, launch_pdl=pdl,
        num_stages=cut.stages, num_warps=cut.warps,
    )  # fmt: skip
    expand_kernel[(tiles, triton.cdiv(outputs, cut.BN))](
        y, low, b, *adapters, rows, *ends, outputs, rank, BT=cut.BT, BN=cut.BN, BR=max(16, triton.next_power_of_2(rank)),
        PARTS=len(parts), launch_pdl=pdl, num_stages=cut.stages, num_warps=cut.warps,
    )  # fmt: skip
    return y
