"""Paged attention of ragged spans, a chain or a tree, split over the keys; the keys are read once for all rows of a span.

The rows of one request and the query heads that share a key head follow one another in the matrix unit's M dimension, cut into
tiles of BM. A program has one tile of one key head and one split of the keys.

    request 0: 3 rows x group 4         request 1: 1 row           BM = 8
    m     0 1 2 3 4 5 6 7 | 8 9 10 11   0 1 2 3                    row = m // group, head = m % group
    tile  0               | 1           2                          request r's first: query_start_loc[r] * group // BM + r

The grid does not depend on lengths, so that a captured graph serves all of them: the number of tiles is bounded by
T * group // BM + R, that of the splits is given. A program reads from memory what it has to do, and returns at once if that is nothing.

A row sees column c (a place in its request) where all of these hold:

    c <= index[row]
    of the nodes of a tree, bit c - tree_start of tree_bits[row] is set
    with a window, c > position - window; the position is the index, and in a tree that of the root plus the row's ancestors

Only the blocks of keys that some row of the tile sees are read, and the splits share those: pages before the window may have been freed.
The key of column c is in the slot of token c + shift; index, seq_lens, tree_bits and tree_start count columns, without the shift.

Pages are looked up once per block of keys, as a block lies in one page, or in two where SHIFT moves it or a page is no multiple of it.
Looked up for each key, the page numbers are loads that the keys wait for, one after the other.

A split leaves its float32 part, and after it the logarithm of its sum: parts [T, heads, splits, E + 4]. Where the parts of a tile are few,
the program that ends last adds them up (arrivals.py). Otherwise a kernel of its own does, with a program for each row and head.

A head's sink is a score without a value. The first split starts from it: it has keys of every tile, and the splits are summed up once.

Split softmax: Dao et al., "Flash-Decoding for long-context inference" (2023).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpserve_kernels.arrivals import arrival_counters
from mtpserve_kernels.tiling import SHARED_BYTES, processors_of, shared_memory_of, type_name, with_table

LOG2_E = tl.constexpr(1.4426950408889634)
MIN_BLOCKS = tl.constexpr(2)  # of keys in a split that is not empty: combining many tiny splits costs more than it saves
PARTS_PER_LOAD = tl.constexpr(8)  # parts that combine_kernel reads at a time
# Parts of a tile, and their bytes, that the program that ends last adds up, at most: more take one processor longer than another launch.
LAST_SPLITS, LAST_BYTES = 16, 128 << 10
LAST_NUMBERS = tl.constexpr(4096)  # of one of these parts: more, in 4 warps, would not fit the registers
STAGES = 5
WIDE_SHARED = 150 << 10  # bytes of shared memory that all stages of heads of 512 numbers need
LATENT_SHARED = {16: 168 << 10, 32: 188 << 10}  # bytes of two buffers of 64 latent keys, and so many queries: more than sm_80 has
# Requests x key heads below which little runs at once, so that programs with fewer rows and keys end sooner. On an H200 a latent request
# of 256 keys took 8.7 us instead of 12.3, and four rows of 8 heads each with 64 wide keys 7.6 instead of 10.4.
FEW = 16
PAD = tl.constexpr(4)  # numbers after a part, the first of which is its logarithm; parts stay aligned


@triton.jit
def _request_of(i_tile, query_start_loc, requests, group: tl.constexpr, BM: tl.constexpr):
    """The last request whose first tile is not after i_tile."""
    low = tl.full([], 0, tl.int32)
    high = low + requests
    while high - low > 1:
        middle = (low + high) // 2
        first = (tl.load(query_start_loc + middle) * group) // BM + middle
        low = tl.where(first <= i_tile, middle, low)
        high = tl.where(first <= i_tile, high, middle)
    return low


@triton.jit
def _bits_set(b_bits):
    """Number of bits that are set in each int64 (Hacker's Delight, §5-1)."""
    b = b_bits - ((b_bits >> 1) & 0x5555555555555555)
    b = (b & 0x3333333333333333) + ((b >> 2) & 0x3333333333333333)
    b = (b + (b >> 4)) & 0x0F0F0F0F0F0F0F0F
    return (b * 0x0101010101010101) >> 56


@triton.jit
def _attend(
    b_q, b_q_rope, b_acc, b_max, b_sum, p_k, p_v, p_pages, start, first, columns, b_first, b_index, b_bits, tree_start, factor, kv_heads,
    BN: tl.constexpr, D: tl.constexpr, E: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr, SHIFT: tl.constexpr, TREE: tl.constexpr,
):  # fmt: skip
    """One block of BN keys from column `start` on. `first` … `columns` is what any row of the tile sees, from `b_first` what each does."""
    LATENT: tl.constexpr = p_v is None
    KEY: tl.constexpr = E if LATENT else D  # of the latent layout the first E numbers are key and value, the others are key alone
    ROPE: tl.constexpr = D - KEY
    b_column = start + tl.arange(0, BN)
    b_here = b_column < columns
    if WINDOW > 0:
        b_here = b_here & (b_column >= first)
    b_place = b_column + SHIFT
    if BN <= PAGE:
        i_page = (start + SHIFT) // PAGE
        b_page = tl.load(p_pages + i_page)
        if PAGE % BN != 0 or SHIFT % BN != 0:
            i_last = (tl.minimum(start + BN, columns) - 1 + SHIFT) // PAGE  # the same page, or the next one
            b_page = tl.where(b_place // PAGE == i_page, b_page, tl.load(p_pages + i_last))
        b_slot = b_page * PAGE + b_place % PAGE
    else:
        b_slot = tl.load(p_pages + b_place // PAGE, mask=b_here, other=0) * PAGE + b_place % PAGE
    o_k, o_e = tl.arange(0, b_q.shape[1]), tl.arange(0, b_acc.shape[1])
    p_key = p_k + b_slot[:, None] * (kv_heads * D)
    b_k = tl.load(p_key + o_k[None, :], mask=b_here[:, None] & (o_k < KEY)[None, :], other=0.0).to(b_q.dtype)
    b_scores = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
    if LATENT:
        if ROPE > 0:
            o_r = tl.arange(0, b_q_rope.shape[1])
            b_k_rope = tl.load(p_key + KEY + o_r[None, :], mask=b_here[:, None] & (o_r < ROPE)[None, :], other=0.0).to(b_q.dtype)
            b_scores = tl.dot(b_q_rope, tl.trans(b_k_rope), b_scores, input_precision="ieee")
        b_v = b_k
    else:
        p_value = p_v + b_slot[:, None] * (kv_heads * E) + o_e[None, :]
        b_v = tl.load(p_value, mask=b_here[:, None] & (o_e < E)[None, :], other=0.0).to(b_q.dtype)
    b_seen = b_column[None, :] <= b_index[:, None]
    if WINDOW > 0:
        b_seen = b_seen & (b_column[None, :] >= b_first[:, None])
    if TREE:
        b_bit = b_column - tree_start
        b_set = (b_bits[:, None] >> tl.minimum(tl.maximum(b_bit, 0), 63)[None, :].to(tl.int64)) & 1
        b_seen = b_seen & ((b_bit < 0)[None, :] | (b_set == 1))
    b_scores = tl.where(b_seen, b_scores * factor, float("-inf"))
    b_new = tl.maximum(b_max, tl.max(b_scores, 1))
    # The maximum of a row that has seen nothing yet is -inf, and -inf - -inf is NaN.
    b_base = tl.where(b_new == float("-inf"), 0.0, b_new)
    b_p = tl.exp2(b_scores - b_base[:, None])
    b_shrink = tl.exp2(b_max - b_base)
    b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc * b_shrink[:, None], input_precision="ieee")
    return b_acc, b_new, b_sum * b_shrink + tl.sum(b_p, 1)


@triton.jit
def _combine_splits(p_out, p_parts, b_out_row, m_row, filled, splits, E: tl.constexpr, BE: tl.constexpr):
    """The rows of a tile: their splits, weighted with their share of the softmax, added in their order. Only the last splits can be empty,
    and their parts were not written."""
    o_e = tl.arange(0, BE)
    m = m_row[:, None] & (o_e < E)[None, :]
    p_row = p_parts + b_out_row.to(tl.int64) * splits * (E + PAD)
    b_acc = tl.zeros([b_out_row.shape[0], BE], tl.float32)
    b_max = tl.full([b_out_row.shape[0]], float("-inf"), tl.float32)
    b_sum = tl.zeros([b_out_row.shape[0]], tl.float32)
    # As many parts on their way as the registers have room for.
    UNROLL: tl.constexpr = max(1, min(4, 2 * LAST_NUMBERS // (b_out_row.shape[0] * BE)))
    for split in tl.range(0, filled, loop_unroll_factor=UNROLL):
        # Not from the L1 cache: other processors have written them.
        b_lse = tl.load(p_row + split * (E + PAD) + E, mask=m_row, other=float("-inf"), volatile=True)
        p_part = p_row[:, None] + split * (E + PAD) + o_e[None, :]
        b_part = tl.load(p_part, mask=m, other=0.0, volatile=True)
        b_new = tl.maximum(b_max, b_lse)
        b_base = tl.where(b_new == float("-inf"), 0.0, b_new)
        b_shrink, b_weight = tl.exp2(b_max - b_base), tl.exp2(b_lse - b_base)
        b_acc = b_acc * b_shrink[:, None] + b_part * b_weight[:, None]
        b_sum = b_sum * b_shrink + b_weight
        b_max = b_new
    b_sum = tl.where(b_sum == 0, 1.0, b_sum)
    p_out_row = p_out + b_out_row.to(tl.int64)[:, None] * E + o_e[None, :]
    tl.store(p_out_row, (b_acc / b_sum[:, None]).to(p_out.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=["requests"])
def span_kernel(
    p_q, p_k, p_v, p_out, p_parts, p_arrivals, p_block_table, p_req_indices, p_query_start_loc, p_seq_lens, p_index, p_bits,
    p_tree_start, p_sinks,
    requests, stride_pages, factor,
    GROUP: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
    SHIFT: tl.constexpr,
):  # fmt: skip
    """The grid is [tiles, key heads, splits]. p_v is None for the latent layout, p_parts for a single split, p_arrivals where
    combine_kernel adds the parts up."""
    LATENT: tl.constexpr = p_v is None
    KEY: tl.constexpr = E if LATENT else D
    ROPE: tl.constexpr = D - KEY
    BK: tl.constexpr = triton.next_power_of_2(KEY) if KEY > 16 else 16
    BE: tl.constexpr = triton.next_power_of_2(E) if E > 16 else 16
    BR: tl.constexpr = triton.next_power_of_2(ROPE) if ROPE > 16 else 16
    SPLIT_BLOCKS: tl.constexpr = 1 if LATENT else MIN_BLOCKS  # a block of latent keys takes long
    i_tile, i_head, i_split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kv_heads, splits = 1 if LATENT else tl.num_programs(1), tl.num_programs(2)
    r = _request_of(i_tile, p_query_start_loc, requests, GROUP, BM)
    first_row, end_row = tl.load(p_query_start_loc + r).to(tl.int32), tl.load(p_query_start_loc + r + 1).to(tl.int32)
    o_m = (i_tile - (first_row * GROUP // BM + r)) * BM + tl.arange(0, BM)
    b_row = first_row + o_m // GROUP
    b_out_row = (b_row * kv_heads + i_head) * GROUP + o_m % GROUP
    m_row = b_row < end_row
    if tl.min(b_row) < end_row:
        b_index = tl.load(p_index + b_row, mask=m_row, other=-1).to(tl.int32)
        columns = tl.minimum(tl.max(b_index) + 1, tl.load(p_seq_lens + r).to(tl.int32))
        tree_start, b_bits = columns, tl.full([BM], -1, tl.int64)
        if p_bits is not None:
            tree_start = tl.load(p_tree_start + r).to(tl.int32)
            b_bits = tl.load(p_bits + b_row, mask=m_row, other=-1)
        first, b_first = tl.full([], 0, tl.int32), b_index
        if WINDOW > 0:
            if p_bits is not None:
                b_first = tl.where(b_bits == -1, b_index, tree_start + _bits_set(b_bits).to(tl.int32) - 1)
            b_first = tl.maximum(b_first - (WINDOW - 1), 0)
            first = tl.min(tl.where(m_row, b_first, columns))
        skipped, blocks = first // BN, tl.cdiv(columns, BN)
        per = tl.maximum(tl.cdiv(blocks - skipped, splits), SPLIT_BLOCKS)
        low = skipped + i_split * per
        high = tl.minimum(low + per, blocks)
        if low < high:
            p_pages = p_block_table + tl.load(p_req_indices + r) * stride_pages
            o_k, o_e, o_r = tl.arange(0, BK), tl.arange(0, BE), tl.arange(0, BR)
            p_rows = p_q + b_out_row.to(tl.int64)[:, None] * D
            b_q = tl.load(p_rows + o_k[None, :], mask=m_row[:, None] & (o_k < KEY)[None, :], other=0.0)
            b_q_rope = b_q
            if ROPE > 0:
                b_q_rope = tl.load(p_rows + KEY + o_r[None, :], mask=m_row[:, None] & (o_r < ROPE)[None, :], other=0.0)
            b_acc = tl.zeros([BM, BE], tl.float32)
            b_max = tl.full([BM], float("-inf"), tl.float32)
            b_sum = tl.zeros([BM], tl.float32)
            if p_sinks is not None:
                if i_split == 0:
                    b_max = tl.load(p_sinks + i_head * GROUP + o_m % GROUP) * LOG2_E
                    b_sum += 1.0
            p_v_head = None if LATENT else p_v + i_head * E
            # From 0: with a lower bound that is computed, Triton 3.9 loses the pointers' alignment and copies number by number.
            for i in range(high - low):
                b_acc, b_max, b_sum = _attend(
                    b_q, b_q_rope, b_acc, b_max, b_sum, p_k + i_head * D, p_v_head, p_pages, (low + i) * BN, first, columns, b_first,
                    b_index, b_bits, tree_start, factor, kv_heads, BN, D, E, PAGE, WINDOW, SHIFT, p_bits is not None,
                )  # fmt: skip
            # A row may have seen nothing of this split: its sum is 0. A sum that is NaN stays NaN.
            b_norm = tl.where(b_sum == 0, 1.0, b_sum)
            m = m_row[:, None] & (o_e < E)[None, :]
            if p_parts is not None:
                p_part = p_parts + (b_out_row * splits + i_split).to(tl.int64) * (E + PAD)
                tl.store(p_part + E, tl.where(b_sum == 0, float("-inf"), b_max + tl.log2(b_norm)), mask=m_row)
                tl.store(p_part[:, None] + o_e[None, :], b_acc / b_norm[:, None], mask=m)
            else:
                p_row = p_out + b_out_row.to(tl.int64)[:, None] * E + o_e[None, :]
                tl.store(p_row, (b_acc / b_norm[:, None]).to(p_out.dtype.element_ty), mask=m)
        elif p_parts is not None:
            p_part = p_parts + (b_out_row * splits + i_split).to(tl.int64) * (E + PAD)
            tl.store(p_part + E, tl.full([BM], float("-inf"), tl.float32), mask=m_row)
        if p_arrivals is not None:
            p_arrival = p_arrivals + i_tile * kv_heads + i_head
            tl.debug_barrier()  # all of this program's part is written before it is counted
            if tl.atomic_add(p_arrival, 1, sem="acq_rel") == splits - 1:
                tl.store(p_arrival, 0)
                _combine_splits(p_out, p_parts, b_out_row, m_row, tl.cdiv(blocks - skipped, per), splits, E, BE)


@triton.jit
def combine_kernel(p_out, p_parts, E: tl.constexpr, SPLITS: tl.constexpr):
    """One row of one head: its splits, weighted with their share of the softmax. Always added up in the same order."""
    BS: tl.constexpr = triton.next_power_of_2(SPLITS)
    BE: tl.constexpr = triton.next_power_of_2(E)
    i_row = tl.program_id(0).to(tl.int64)
    o_s, o_e, o_i = tl.arange(0, BS), tl.arange(0, BE), tl.arange(0, PARTS_PER_LOAD)
    p_row = p_parts + i_row * SPLITS * (E + PAD)
    b_lse = tl.load(p_row + o_s * (E + PAD) + E, mask=o_s < SPLITS, other=float("-inf"))
    largest = tl.max(b_lse)
    total = tl.sum(tl.exp2(b_lse - largest))
    # Only the last splits can be empty, and their parts were not written. NaN is not empty.
    filled = tl.max(tl.where(b_lse == float("-inf"), 0, o_s + 1))
    b_acc = tl.zeros([BE], tl.float32)
    for split in range(0, filled, PARTS_PER_LOAD):
        m = split + o_i < filled
        p_part = p_row + (split + o_i) * (E + PAD)
        b_weight = tl.exp2(tl.load(p_part + E, mask=m, other=float("-inf")) - largest)
        b_part = tl.load(p_part[:, None] + o_e[None, :], mask=m[:, None] & (o_e < E)[None, :], other=0.0)
        b_acc += tl.sum(b_weight[:, None] * b_part, 0)
    tl.store(p_out + i_row * E + o_e, (b_acc / total).to(p_out.dtype.element_ty), mask=o_e < E)


@dataclass(frozen=True, slots=True)
class SpanTiling:
    """How the work is cut. BM rows x heads, BN keys."""

    BM: int
    BN: int
    warps: int
    stages: int
    registers: int | None = None  # of a thread, at most; None: the compiler may spill to have more programs on a processor


def tiling(
    rows: int, key_dim: int, latent: bool, q_bytes: int, cache_bytes: int, hip: bool, shared: int = SHARED_BYTES, spans: int = FEW
) -> SpanTiling:  # fmt: skip
    """For `rows` rows x heads of the widest span that share keys of `key_dim` numbers; bytes of one number of q and of one of the cache;
    `shared`: bytes of shared memory that a program may have; `spans`: requests x key heads.

    What fits every chip's shared memory without spilling registers, as tests/kernels/matrix.py checks: the latent layout's accumulator is
    512 wide, and 64 rows of it fit nowhere, so that two tiles read the same keys, the second from the cache. float32 has no matrix
    unit of its own precision: its tiles are small. Five stages are two buffers of keys: the page number takes one, its use another.
    """
    wide_heads = key_dim > 256 and not latent
    if hip:
        BM = 16 if rows <= 16 or q_bytes == 4 or wide_heads else 32
        return SpanTiling(BM, 16 if latent or wide_heads else 32, 8 if wide_heads and q_bytes < 4 else 4, 1)
    if q_bytes == 4:
        return SpanTiling(16, 16, 8 if latent or wide_heads else 4, 1)
    if latent:
        BM = 16 if rows <= 16 or spans < FEW else 32
        wide = cache_bytes > 1 and shared >= LATENT_SHARED[BM] and not (rows <= 16 and spans < FEW)  # one program on a processor
        if BM == 16:
            return SpanTiling(16, 64 if wide else 32, 8, STAGES, registers=255 if wide or spans < FEW else None)
        return SpanTiling(32, 16 if cache_bytes == 1 else 64 if wide else 32, 8, STAGES)
    if wide_heads:
        return SpanTiling(16, 16, 4, 2) if cache_bytes == 1 else SpanTiling(16, 32, 8, STAGES if shared >= WIDE_SHARED else 3)
    if key_dim > 128:
        return SpanTiling(32, 32, 4, 2) if cache_bytes == 1 else SpanTiling(16 if rows <= 16 else 32, 32, 4, STAGES)
    BM = min(max(16, triton.next_power_of_2(rows)), 64)
    BM = 16 if BM == 32 and spans < FEW else BM
    return SpanTiling(BM, 32 if cache_bytes == 1 and BM == 16 else 64, 8 if BM == 64 else 4, STAGES)


def splits_for(programs: int, processors: int, most: int = 64) -> int:
    """Enough for two waves; a power of two, so that few variants are compiled."""
    wanted = max(1, 2 * processors // max(programs, 1))
    return min(most, 1 << (wanted.bit_length() - 1))


def span_gqa(
    q: Tensor, k: Tensor, v: Tensor, block_table: Tensor, seats: Tensor, query_start_loc: Tensor, seq_lens: Tensor, index: Tensor,
    tree_bits: Tensor | None, tree_start: Tensor | None, page_size: int, scale: float, *, window: int = 0, shift: int = 0,
    width: int = 1, splits: int | None = None, tile: SpanTiling | None = None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """q [T, heads, D], k [slots, kv_heads, D], v [slots, kv_heads, E] → [T, heads, E].

    block_table [seats, pages], seats [R], query_start_loc [R+1], seq_lens [R], index [T], tree_bits [T] or None, tree_start [R] or None:
    int64. `window`: how many columns a row sees, itself included; 0: all. With a tree it is larger than the tree is deep. `shift`: the key
    of column c is in the slot of token c + shift. `width`: rows of the widest span, which only chooses the tiles. sinks [heads] float32.
    """
    assert v.shape[:2] == k.shape[:2] and v.is_contiguous(), (k.shape, v.shape, v.stride())
    where = block_table, seats, query_start_loc, seq_lens, index, tree_bits, tree_start, page_size, scale
    return _span(q, k, v, v.shape[2], *where, sinks, window, shift, width, splits, tile)


def span_mla(
    q: Tensor, latent: Tensor, block_table: Tensor, seats: Tensor, query_start_loc: Tensor, seq_lens: Tensor, index: Tensor,
    tree_bits: Tensor | None, tree_start: Tensor | None, page_size: int, scale: float, value_dim: int, *, window: int = 0, shift: int = 0,
    width: int = 1, splits: int | None = None, tile: SpanTiling | None = None, sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """q [T, heads, D], latent [slots, 1, D] whose first `value_dim` numbers are the value → [T, heads, value_dim]; see `span_gqa`."""
    assert latent.shape[1] == 1 and value_dim <= latent.shape[2], (latent.shape, value_dim)
    where = block_table, seats, query_start_loc, seq_lens, index, tree_bits, tree_start, page_size, scale
    return _span(q, latent, None, value_dim, *where, sinks, window, shift, width, splits, tile)


def _span(
    q: Tensor, k: Tensor, v: Tensor | None, value_dim: int, block_table: Tensor, seats: Tensor, query_start_loc: Tensor, seq_lens: Tensor,
    index: Tensor, tree_bits: Tensor | None, tree_start: Tensor | None, page_size: int, scale: float, sinks: Tensor | None, window: int,
    shift: int, width: int, splits: int | None, tile: SpanTiling | None,
) -> Tensor:  # fmt: skip
    (rows, heads, dim), kv_heads, requests = q.shape, k.shape[1], len(seats)
    assert heads % kv_heads == 0 and k.shape[2] == dim and q.is_contiguous() and k.is_contiguous(), (
        q.shape,
        k.shape,
        q.stride(),
        k.stride(),
    )
    assert block_table.stride(1) == 1 and (tree_bits is None) == (tree_start is None) and window >= 0 and shift >= 0
    assert sinks is None or (sinks.shape == (heads,) and sinks.dtype == torch.float32 and sinks.is_contiguous())
    group = heads // kv_heads
    bytes_of_numbers = q.element_size(), k.element_size()
    hip, shared = torch.version.hip is not None, shared_memory_of(q.device)
    rule = tile or tiling(group * width, dim, v is None, *bytes_of_numbers, hip, shared, requests * kv_heads)
    op, shape = "span_mla" if v is None else "span_gqa", f"{type_name(k.dtype)} heads{heads} kv{kv_heads} D{dim}"
    cut, table_splits = with_table(rule, op, shape, width, q.device) if tile is None else (rule, None)
    tiles = rows * group // cut.BM + requests
    if splits is None:
        splits = table_splits or splits_for(tiles * kv_heads, processors_of(q.device))
        splits = min(splits, triton.next_power_of_2(triton.cdiv(block_table.shape[1] * page_size, cut.BN)))  # each has a block to read
    out = torch.empty(rows, heads, value_dim, dtype=q.dtype, device=q.device)
    parts, arrivals = None, None
    if splits > 1:
        parts = torch.empty(rows, heads, splits, value_dim + PAD.value, dtype=torch.float32, device=q.device)
        fits = cut.BM * triton.next_power_of_2(value_dim) <= LAST_NUMBERS.value * cut.warps // 4
        if fits and splits <= LAST_SPLITS and min(cut.BM, group * width) * splits * value_dim * 4 <= LAST_BYTES:
            arrivals = arrival_counters("span", tiles * kv_heads, q.device)
    span_kernel[(tiles, kv_heads, splits)](
        q, k, v, out, parts, arrivals, block_table, seats, query_start_loc, seq_lens, index, tree_bits, tree_start, sinks, requests,
        block_table.stride(0), scale * LOG2_E.value,
        GROUP=group, D=dim, E=value_dim, BM=cut.BM, BN=cut.BN, PAGE=page_size, WINDOW=window, SHIFT=shift,
        num_warps=cut.warps, num_stages=cut.stages, **({} if cut.registers is None else {"maxnreg": cut.registers}),
    )  # fmt: skip
    if parts is not None and arrivals is None:
        combine_kernel[(rows * heads,)](out, parts, E=value_dim, SPLITS=splits)
    return out
