"""y = x W^T + b for one or two rows without the matrix unit, and how a program of a product of few rows writes its outputs.

A program has BN outputs. Its warps lie side by side along K, so that each reads 512 bytes of a row of W at a time, and the products of the
numbers of one load are summed in the thread that loaded them: a register per output and row of x. Threads are summed once, at the end.

Weights do not depend on the launch before: their first tiles are on their way into the L2 cache before this one waits for it.

A sum over K that is split leaves float32 parts [blocks of outputs, splits, BT, outputs of a block]. The program that arrives last adds
them in the order of the splits (arrivals.py), so that the bits do not depend on which one that is.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mtpserve_kernels.dependent_launch import grid_dependency_wait


@triton.jit
def prefetch_tiles(p_w, o_w, first, last_row, K, BK: tl.constexpr, TILES: tl.constexpr, launch_pdl: tl.constexpr):
    """The first TILES steps of the rows o_w [BM] of W, from column `first` on, into the L2 cache while the launch before ends: an
    instruction for each 64 bytes, as much as memory gives at once. Rows and columns that do not exist become the last ones."""
    if launch_pdl:
        LINE: tl.constexpr = 512 // p_w.dtype.element_ty.primitive_bitwidth
        LINES: tl.constexpr = max(BK // LINE, 1)
        p_rows = p_w + tl.minimum(o_w, last_row).to(tl.int64)[:, None] * K
        for tile in tl.static_range(TILES):
            o_line = tl.minimum(first + tile * BK + tl.arange(0, LINES) * LINE, K - 1)
            address = (p_rows + o_line[None, :]).to(tl.int64)
            tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [address], tl.int32, is_pure=False, pack=1)


@triton.jit
def store_outputs(b_acc, p_out, p_bias, o_w, o_n, o_t, rows, N, BN: tl.constexpr, GATED: tl.constexpr):
    """b_acc [BN, BT], where gates and ups are [2 BN, BT]; o_w: their rows of W, o_n [BN]: columns of the output."""
    if p_bias is not None:
        b_acc += tl.load(p_bias + o_w, mask=o_w < (2 * N if GATED else N), other=0.0).to(tl.float32)[:, None]
    if GATED:
        b_gate, b_up = tl.split(tl.permute(tl.reshape(b_acc, [2, BN, b_acc.shape[1]]), (1, 2, 0)))
        b_acc = b_gate / (1.0 + tl.exp(-b_gate)) * b_up
    m = (o_n < N)[:, None] & (o_t < rows)[None, :]
    tl.store(p_out + o_t[None, :] * N + o_n[:, None], b_acc.to(p_out.dtype.element_ty), mask=m)


@triton.jit
def store_or_add(
    b_acc, p_out, p_parts, p_arrivals, p_bias, i_n, i_split, o_w, o_n, o_t, rows, N, BN: tl.constexpr, GATED: tl.constexpr
):  # fmt: skip
    """The outputs of a whole sum; of a part (p_parts is not None) only where all others have arrived."""
    if p_parts is None:
        store_outputs(b_acc, p_out, p_bias, o_w, o_n, o_t, rows, N, BN, GATED)
    else:
        BM: tl.constexpr = b_acc.shape[0]
        BT: tl.constexpr = b_acc.shape[1]
        splits = tl.num_programs(1)
        m_t = (o_t < rows)[None, :]
        p_block = p_parts + (i_n * splits).to(tl.int64) * (BM * BT) + o_t[None, :] * BM + tl.arange(0, BM)[:, None]
        tl.store(p_block + i_split * (BM * BT), b_acc, mask=m_t)
        tl.debug_barrier()  # all of this program's part is written before it is counted
        if tl.atomic_add(p_arrivals + i_n, 1, sem="acq_rel") == splits - 1:
            tl.store(p_arrivals + i_n, 0)
            b_sum = tl.zeros([BM, BT], tl.float32)
            for split in tl.range(0, splits, loop_unroll_factor=4):
                # Not from the L1 cache: other processors have written them.
                b_sum += tl.load(p_block + split * (BM * BT), mask=m_t, other=0.0, volatile=True)
            store_outputs(b_sum, p_out, p_bias, o_w, o_n, o_t, rows, N, BN, GATED)


@triton.jit
def thread_sums(b_w, b_x):
    """b_w [BM, BK] times b_x [1, BK], summed over what one thread loads at a time → float32 [BM, BK / numbers of 16 bytes]"""
    NUMBERS: tl.constexpr = 128 // b_w.dtype.primitive_bitwidth
    b_products = b_w.to(tl.float32) * b_x.to(tl.float32)
    return tl.sum(tl.reshape(b_products, [b_w.shape[0], b_w.shape[1] // NUMBERS, NUMBERS]), 2)


@triton.jit
def gemv_kernel(
    p_x, p_w, p_bias, p_out, p_parts, p_arrivals, stride_x, N, K, BT: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    STAGES: tl.constexpr, GATED: tl.constexpr, launch_pdl: tl.constexpr,
):  # fmt: skip
    """The grid is [blocks of outputs, splits]; there are BT rows, 1 or 2. p_parts is None for a single split. With 1 STAGES a tile is
    loaded into registers while the one before is multiplied, with more they are copied ahead into shared memory."""
    i_n, i_split = tl.program_id(0), tl.program_id(1)
    BM: tl.constexpr = 2 * BN if GATED else BN
    o_m, o_t, o_k = tl.arange(0, BM), tl.arange(0, BT), tl.arange(0, BK)
    o_n = i_n * BN + tl.arange(0, BN)
    o_w = i_n * BN + o_m % BN + o_m // BN * N
    m_w = (i_n * BN + o_m % BN < N)[:, None]
    p_rows = p_w + o_w.to(tl.int64)[:, None] * K + o_k[None, :]
    b_first = tl.zeros([BM, BK * p_w.dtype.element_ty.primitive_bitwidth // 128], tl.float32)
    b_second = b_first
    blocks = tl.cdiv(K, BK)
    per = tl.cdiv(blocks, tl.num_programs(1))
    start = i_split * per
    steps = tl.maximum(tl.minimum(per, blocks - start), 0)
    end = tl.minimum((start + steps) * BK, K)
    if STAGES == 1:
        b_w = tl.load(p_rows + start * BK, mask=m_w & (start * BK + o_k < end)[None, :], other=0.0, eviction_policy="evict_first")
    else:
        prefetch_tiles(p_w, o_w, start * BK, (2 * N if GATED else N) - 1, K, BK, STAGES - 1, launch_pdl)
    grid_dependency_wait(launch_pdl)
    for i in tl.range(0, steps, num_stages=STAGES):
        k = (start + i) * BK
        m_k, m_next = (k + o_k < K)[None, :], (k + BK + o_k < end)[None, :]
        if STAGES == 1:
            b_next = tl.load(p_rows + k + BK, mask=m_w & m_next, other=0.0, eviction_policy="evict_first")
        else:
            b_w = tl.load(p_rows + k, mask=m_w & m_k, other=0.0, eviction_policy="evict_first")
        b_first += thread_sums(b_w, tl.load(p_x + k + o_k[None, :], mask=m_k, other=0.0))
        if BT == 2:
            b_second += thread_sums(b_w, tl.load(p_x + stride_x + k + o_k[None, :], mask=m_k, other=0.0))
        if STAGES == 1:
            b_w = b_next
    b_acc = tl.sum(b_first, 1)[:, None]
    if BT == 2:
        b_acc = tl.join(tl.sum(b_first, 1), tl.sum(b_second, 1))
    store_or_add(b_acc, p_out, p_parts, p_arrivals, p_bias, i_n, i_split, o_w, o_n, o_t, BT, N, BN, GATED)
