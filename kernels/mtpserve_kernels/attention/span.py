"""Paged attention of ragged spans, a chain or a tree, split over the keys; the keys are read once for all rows of a span.

The rows of one request and the query heads that share a key head lie behind each other in the matrix unit's M dimension, cut into
tiles of BM. A program has one tile of one key head and one split of the keys.

    request 0: 3 rows x group 4         request 1: 1 row           BM = 8
    m     0 1 2 3 4 5 6 7 | 8 9 10 11   0 1 2 3                    row = m // group, head = m % group
    tile  0               | 1           2                          request r's first: cu_q[r] * group // BM + r

Nothing of the grid depends on lengths, so that a captured graph serves all of them: the number of tiles is bounded by
T * group // BM + R, that of the splits is given. What a program has to do it reads from memory, and leaves at once if that is nothing.

A row sees column c (a place in its request) where c <= index[row], and, of the nodes of a tree, only those whose bit
c - tree_start is set in tree_bits[row].

Split softmax: Dao et al., "Flash-Decoding for long-context inference" (2023).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = tl.constexpr(1.4426950408889634)
MIN_BLOCKS = tl.constexpr(2)  # of keys in a split that is not empty: a combining pass over crumbs costs more than it saves


@triton.jit
def _request_of(i_tile, cu_q, requests, group: tl.constexpr, BM: tl.constexpr):
    """The last request whose first tile is not behind i_tile."""
    low = tl.full([], 0, tl.int32)
    high = low + requests
    while high - low > 1:
        middle = (low + high) // 2
        first = (tl.load(cu_q + middle) * group) // BM + middle
        low = tl.where(first <= i_tile, middle, low)
        high = tl.where(first <= i_tile, high, middle)
    return low


@triton.jit
def _blocks_per_split(columns, splits, BN: tl.constexpr):
    return tl.maximum(tl.cdiv(tl.cdiv(columns, BN), splits), MIN_BLOCKS)


@triton.jit
def _attend(
    b_q, b_qr, b_acc, b_max, b_sum, p_k, p_v, p_pages, i_block, columns, b_index, b_bits, tree_start, factor, stride_k, stride_v,
    D: tl.constexpr, E: tl.constexpr, ROPE: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr,
    PAGE: tl.constexpr, TREE: tl.constexpr,
):  # fmt: skip
    """One block of BN keys."""
    b_column = i_block * BN + tl.arange(0, BN)
    here = b_column < columns
    b_page = tl.load(p_pages + b_column // PAGE, mask=here, other=0)
    b_slot = b_page * PAGE + b_column % PAGE
    o_d, o_e = tl.arange(0, BD), tl.arange(0, BE)
    # Of the latent layout the first D numbers are key and value, and ROPE more are key alone.
    b_k = tl.load(p_k + b_slot[:, None] * stride_k + o_d[None, :], mask=here[:, None] & (o_d < D)[None, :], other=0.0).to(b_q.dtype)
    b_scores = tl.dot(b_q, tl.trans(b_k))
    if ROPE > 0:
        o_r = tl.arange(0, BR)
        p_r = p_k + b_slot[:, None] * stride_k + D + o_r[None, :]
        b_kr = tl.load(p_r, mask=here[:, None] & (o_r < ROPE)[None, :], other=0.0).to(b_q.dtype)
        b_scores = tl.dot(b_qr, tl.trans(b_kr), b_scores)
        b_v = b_k
    else:
        b_v = tl.load(p_v + b_slot[:, None] * stride_v + o_e[None, :], mask=here[:, None] & (o_e < E)[None, :], other=0.0).to(b_q.dtype)
    b_scores = b_scores * factor
    b_seen = b_column[None, :] <= b_index[:, None]
    if TREE:
        b_bit = b_column - tree_start
        b_set = (b_bits[:, None] >> tl.minimum(tl.maximum(b_bit, 0), 63)[None, :].to(tl.int64)) & 1
        b_seen = b_seen & ((b_bit < 0)[None, :] | (b_set == 1))
    b_scores = tl.where(b_seen, b_scores, float("-inf"))
    b_new = tl.maximum(b_max, tl.max(b_scores, 1))
    # A row that has seen nothing yet: its maximum is -inf, and -inf - -inf is no number.
    b_base = tl.where(b_new == float("-inf"), 0.0, b_new)
    b_p = tl.exp2(b_scores - b_base[:, None])
    b_shrink = tl.exp2(b_max - b_base)
    b_acc = b_acc * b_shrink[:, None]
    b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc)
    return b_acc, b_new, b_sum * b_shrink + tl.sum(b_p, 1)


@triton.jit
def span_kernel(
    p_q, p_k, p_v, p_out, p_partial, p_lse, p_page_table, p_seats, p_cu_q, p_kv_len, p_index, p_bits, p_tree_start,
    requests, stride_k, stride_v, stride_pages, factor, kv_scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, ROPE: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BE: tl.constexpr, BR: tl.constexpr, PAGE: tl.constexpr, SPLITS: tl.constexpr,
    TREE: tl.constexpr,
):  # fmt: skip
    i_tile, i_head, i_split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    r = _request_of(i_tile, p_cu_q, requests, GROUP, BM)
    first_row, end_row = tl.load(p_cu_q + r), tl.load(p_cu_q + r + 1)
    o_m = (i_tile - (first_row * GROUP // BM + r)) * BM + tl.arange(0, BM)
    b_row, b_head = first_row + o_m // GROUP, i_head * GROUP + o_m % GROUP
    m_row = b_row < end_row
    if tl.min(b_row) < end_row:
        b_index = tl.load(p_index + b_row, mask=m_row, other=-1).to(tl.int32)
        columns = tl.minimum(tl.max(b_index) + 1, tl.load(p_kv_len + r).to(tl.int32))
        per = _blocks_per_split(columns, SPLITS, BN)
        low, high = i_split * per, tl.minimum((i_split + 1) * per, tl.cdiv(columns, BN))
        if low < high:
            seat = tl.load(p_seats + r)
            p_pages = p_page_table + seat * stride_pages
            tree_start = columns
            b_bits = tl.full([BM], -1, tl.int64)
            if TREE:
                tree_start = tl.load(p_tree_start + r).to(tl.int32)
                b_bits = tl.load(p_bits + b_row, mask=m_row, other=-1)
            o_d, o_e = tl.arange(0, BD), tl.arange(0, BE)
            p_rows = p_q + (b_row * HEADS + b_head) * (D + ROPE)
            b_q = tl.load(p_rows[:, None] + o_d[None, :], mask=m_row[:, None] & (o_d < D)[None, :], other=0.0)
            b_qr = b_q
            if ROPE > 0:
                o_r = tl.arange(0, BR)
                b_qr = tl.load(p_rows[:, None] + D + o_r[None, :], mask=m_row[:, None] & (o_r < ROPE)[None, :], other=0.0)
            b_acc = tl.zeros([BM, BE], tl.float32)
            b_max = tl.full([BM], float("-inf"), tl.float32)
            b_sum = tl.zeros([BM], tl.float32)
            p_kh, p_vh = p_k + i_head * (D + ROPE), p_v + i_head * E
            # From 0: with a lower bound that is computed, Triton 3.9 loses the pointers' alignment and copies number by number.
            for i in range(high - low):
                b_acc, b_max, b_sum = _attend(
                    b_q, b_qr, b_acc, b_max, b_sum, p_kh, p_vh, p_pages, low + i, columns, b_index, b_bits, tree_start, factor,
                    stride_k, stride_v, D, E, ROPE, BD, BE, BR, BN, PAGE, TREE,
                )  # fmt: skip
            # A row may have seen nothing of this split.
            b_out = b_acc / tl.where(b_sum > 0, b_sum, 1.0)[:, None] * kv_scale
            o_row = b_row * HEADS + b_head
            m_out = m_row[:, None] & (o_e < E)[None, :]
            if SPLITS == 1:
                tl.store(p_out + o_row[:, None] * E + o_e[None, :], b_out.to(p_out.dtype.element_ty), mask=m_out)
            else:
                o_part = o_row * SPLITS + i_split
                tl.store(p_partial + o_part[:, None] * E + o_e[None, :], b_out, mask=m_out)
                b_lse = tl.where(b_sum > 0, b_max + tl.log2(tl.where(b_sum > 0, b_sum, 1.0)), float("-inf"))
                tl.store(p_lse + o_part, b_lse, mask=m_row)
        elif SPLITS > 1:
            tl.store(p_lse + (b_row * HEADS + b_head) * SPLITS + i_split, tl.full([BM], float("-inf"), tl.float32), mask=m_row)


@triton.jit
def combine_kernel(p_out, p_partial, p_lse, E: tl.constexpr, BE: tl.constexpr, SPLITS: tl.constexpr, BS: tl.constexpr):
    """One row of one head: its splits, weighted with their share of the softmax. Always added up in the same order."""
    i_row = tl.program_id(0).to(tl.int64)
    o_s, o_e = tl.arange(0, BS), tl.arange(0, BE)
    b_lse = tl.load(p_lse + i_row * SPLITS + o_s, mask=o_s < SPLITS, other=float("-inf"))
    b_weight = tl.exp2(b_lse - tl.max(b_lse))
    total = tl.sum(b_weight)
    # Filled splits come first, since the others are behind the last key.
    filled = tl.max(tl.where(b_lse > float("-inf"), o_s + 1, 0))
    b_acc = tl.zeros([BE], tl.float32)
    for s in range(filled):
        weight = tl.exp2(tl.load(p_lse + i_row * SPLITS + s) - tl.max(b_lse))
        b_part = tl.load(p_partial + (i_row * SPLITS + s) * E + o_e, mask=o_e < E, other=0.0)
        b_acc += weight * b_part
    tl.store(p_out + i_row * E + o_e, (b_acc / total).to(p_out.dtype.element_ty), mask=o_e < E)


@dataclass(frozen=True, slots=True)
class Tiling:
    """How the work is cut. BM rows x heads, BN keys."""

    BM: int
    BN: int
    warps: int
    stages: int


def tiling(heads_per_key: int, width: int, key_dim: int, latent: bool, fp8: bool = False, hip: bool = False) -> Tiling:
    """`width`: rows of the widest span. What does not spill registers on any chip, as tests/kernels/matrix.py sees it: the latent
    layout's accumulator is 512 wide, and 64 rows of it fit nowhere, so that two tiles read the same keys, the second from the cache."""
    rows = max(heads_per_key * width, 1)
    if latent:
        if hip:
            return Tiling(16 if rows <= 16 else 32, 16, 4, 1)
        return Tiling(16, 64, 8, 2) if rows <= 16 else Tiling(32, 16 if fp8 else 32, 8, 2)
    largest = 64 if key_dim <= 128 and not hip else 32
    BM = min(max(16, triton.next_power_of_2(rows)), largest)
    if hip:
        return Tiling(BM, 32, 4, 1)
    return Tiling(BM, 64, 4, 3 if key_dim <= 128 else 2)


def splits_for(programs: int, processors: int, most: int = 64) -> int:
    """Enough for two waves; a power of two, so that few variants are compiled."""
    wanted = max(1, 2 * processors // max(programs, 1))
    return min(most, 1 << (wanted.bit_length() - 1))


def span_gqa(
    q: Tensor, k: Tensor, v: Tensor, page_table: Tensor, seats: Tensor, cu_q: Tensor, kv_len: Tensor, index: Tensor,
    tree_bits: Tensor | None, tree_start: Tensor | None, page_size: int, scale: float, kv_scale: float = 1.0, *,
    width: int = 1, splits: int | None = None, rope: int = 0, tile: Tiling | None = None,
) -> Tensor:  # fmt: skip
    """q [T, heads, D], k [slots, kv_heads, D], v [slots, kv_heads, E] → [T, heads, E].

    page_table [seats, pages], seats [R], cu_q [R+1], kv_len [R], index [T], tree_bits [T] or None, tree_start [R] or None: int64.
    `width` is the rows of the widest span, which only chooses the tiles. `rope` > 0: the last `rope` numbers of q and k are key alone
    and v is the first part of k. `kv_scale`: what stored keys and values are multiplied with (fp8).
    """
    rows, heads, dim = q.shape
    kv_heads, value_dim = v.shape[1], v.shape[2]
    assert heads % kv_heads == 0 and k.shape[1] == kv_heads and k.shape[2] == dim, (q.shape, k.shape, v.shape)
    assert q.is_contiguous() and k.stride(-1) == 1 and v.stride(-1) == 1 and k.stride(1) == dim and v.stride(1) in (value_dim, dim)
    assert not rope or (kv_heads == 1 and value_dim == dim - rope)
    assert page_table.stride(1) == 1 and (tree_bits is None) == (tree_start is None)
    group, requests = heads // kv_heads, len(seats)
    cut = tile or tiling(group, width, dim, rope > 0, k.element_size() == 1, torch.version.hip is not None)
    tiles = rows * group // cut.BM + requests
    if splits is None:
        splits = splits_for(tiles * kv_heads, processors_of(q.device))
    out = torch.empty(rows, heads, value_dim, dtype=q.dtype, device=q.device)
    partial = torch.empty(rows * heads * splits * value_dim if splits > 1 else 1, dtype=torch.float32, device=q.device)
    lse = torch.empty(rows * heads * splits if splits > 1 else 1, dtype=torch.float32, device=q.device)
    key_part = dim - rope
    BD, BE, BR = (max(triton.next_power_of_2(size), 16) for size in (key_part, value_dim, rope))
    span_kernel[(tiles, kv_heads, splits)](
        q, k, v, out, partial, lse, page_table, seats, cu_q, kv_len, index, tree_bits, tree_start,
        requests, k.stride(0), v.stride(0), page_table.stride(0), scale * kv_scale * LOG2_E.value, kv_scale,
        HEADS=heads, GROUP=group, D=key_part, E=value_dim, ROPE=rope,
        BM=cut.BM, BN=cut.BN, BD=BD, BE=BE, BR=BR,
        PAGE=page_size, SPLITS=splits, TREE=tree_bits is not None, num_warps=cut.warps, num_stages=cut.stages,
    )  # fmt: skip
    if splits > 1:
        combine_kernel[(rows * heads,)](out, partial, lse, E=value_dim, BE=BE, SPLITS=splits, BS=triton.next_power_of_2(splits))
    return out


def span_mla(
    q: Tensor, latent: Tensor, page_table: Tensor, seats: Tensor, cu_q: Tensor, kv_len: Tensor, index: Tensor,
    tree_bits: Tensor | None, tree_start: Tensor | None, page_size: int, scale: float, value_dim: int, kv_scale: float = 1.0, *,
    width: int = 1, splits: int | None = None, tile: Tiling | None = None,
) -> Tensor:  # fmt: skip
    """q [T, heads, D], latent [slots, 1, D] whose first `value_dim` numbers are the value → [T, heads, value_dim]"""
    return span_gqa(
        q, latent, latent[..., :value_dim], page_table, seats, cu_q, kv_len, index, tree_bits, tree_start, page_size, scale, kv_scale,
        width=width, splits=splits, rope=q.shape[-1] - value_dim, tile=tile,
    )  # fmt: skip


def processors_of(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 4
