"""Which tokens a row attends to: those whose index keys have the best scores, as lists of slots (DeepSeek-V3.2's lightning indexer).

    score(row, column) = scale of the key * sum over the index heads of  weight * relu(q · key)       https://arxiv.org/abs/2512.02556 §2.1

`index_score_kernel` has a row and a split of its columns, and multiplies all heads of the row with a block of keys. `choose_kernel` has a
row: it finds the score of the last column that is taken by its bits, eight at a time from the highest, as a radix select does, and then
walks the columns once more and writes the slots of those that are above, and of the first of those that are equal. The order of a row's
slots is that of its columns, and nothing depends on other rows.

A row of at most `best` columns is not scored: it gets all that it sees. What it sees is said row by row, as `span.py` says it:

    columns before end[row]; of those from start[row] on, which are nodes of a tree, where bit c - start of bits[row] is set

The lists are page tables with pages of one token, of a request for each row: that is all that `selected_mla` does with them.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpserve_kernels.attention.span import span_mla, splits_for, tiling
from mtpserve_kernels.tiling import MAX_SCORES, processors_of

BLOCK = 4096  # columns that choose_kernel reads at a time


@triton.jit
def _is_seen(o_column, end, bits, start, TREE: tl.constexpr):
    b_seen = o_column < end
    if TREE:
        b_bit = o_column - start
        b_set = (bits >> tl.minimum(tl.maximum(b_bit, 0), 63).to(tl.int64)) & 1
        b_seen = b_seen & ((b_bit < 0) | (b_set == 1))
    return b_seen


@triton.jit
def _slot_of(p_pages, o_column, m, PAGE: tl.constexpr, SHIFT: tl.constexpr):
    o_place = o_column + SHIFT
    return tl.load(p_pages + o_place // PAGE, mask=m, other=0) * PAGE + o_place % PAGE


@triton.jit
def _ordered(b_scores):
    """Integers without a sign in the order of the numbers."""
    b_bits = b_scores.to(tl.uint32, bitcast=True)
    # Triton's interpreter before 3.9 has no ~ of such integers where NumPy is 2.
    return tl.where((b_bits >> 31) == 1, b_bits ^ 0xFFFFFFFF, b_bits | 0x80000000)


@triton.jit(do_not_specialize=["first", "stride_scores"])
def index_score_kernel(
    p_q, p_weights, p_keys, p_scales, p_scores, p_block_table, p_req_indices, p_ends, p_bits, p_starts, first, stride_pages, stride_scores,
    HEADS: tl.constexpr, D: tl.constexpr, BN: tl.constexpr, PAGE: tl.constexpr, SHIFT: tl.constexpr, BEST: tl.constexpr,
):  # fmt: skip
    BH: tl.constexpr = triton.next_power_of_2(HEADS) if HEADS > 16 else 16
    BD: tl.constexpr = triton.next_power_of_2(D) if D > 16 else 16
    i_split, splits = tl.program_id(1), tl.num_programs(1)
    i_row = first + tl.program_id(0).to(tl.int64)
    end = tl.load(p_ends + i_row).to(tl.int32)
    if end > BEST:
        bits, start = tl.full([], -1, tl.int64), end
        if p_bits is not None:
            bits, start = tl.load(p_bits + i_row), tl.load(p_starts + i_row).to(tl.int32)
        o_h, o_d = tl.arange(0, BH), tl.arange(0, BD)
        p_rows = p_q + (i_row * HEADS + o_h[:, None]) * D
        b_q = tl.load(p_rows + o_d[None, :], mask=(o_h < HEADS)[:, None] & (o_d < D)[None, :], other=0.0)
        b_weight = tl.load(p_weights + i_row * HEADS + o_h, mask=o_h < HEADS, other=0.0)
        p_pages = p_block_table + tl.load(p_req_indices + i_row) * stride_pages
        p_out = p_scores + tl.program_id(0).to(tl.int64) * stride_scores
        blocks = tl.cdiv(end, BN)
        per = tl.cdiv(blocks, splits)
        low = i_split * per
        for i in range(tl.minimum(per, blocks - low)):
            o_column = (low + i) * BN + tl.arange(0, BN)
            b_seen = _is_seen(o_column, end, bits, start, p_bits is not None)
            b_slot = _slot_of(p_pages, o_column, b_seen, PAGE, SHIFT)
            b_k = tl.load(p_keys + b_slot[:, None] * D + o_d[None, :], mask=b_seen[:, None] & (o_d < D)[None, :], other=0.0)
            b_products = tl.dot(b_q, tl.trans(b_k.to(b_q.dtype)), input_precision="ieee")
            # NaN is not less than 0, and must not be lost: it becomes the best score, so that it is attended to.
            b_score = tl.sum(tl.where(b_products <= 0, 0.0, b_products) * b_weight[:, None], 0)
            if p_scales is not None:
                b_score *= tl.load(p_scales + b_slot, mask=b_seen, other=0.0)
            b_score = tl.where(b_score != b_score, float("inf"), tl.where(b_score == 0, 0.0, b_score))  # no -0
            tl.store(p_out + o_column, tl.where(b_seen, b_score, float("-inf")), mask=o_column < end)


@triton.jit
def _threshold(p_row, end, best, B: tl.constexpr):
    """→ the score, as `_ordered` gives it, of the last column that is taken, and how many with this score are."""
    o_digit, left, found = tl.arange(0, 256), best, tl.full([], 0, tl.uint32)
    for low in tl.static_range(24, -1, -8):  # the digit's lowest bit
        b_counts = tl.zeros([256], tl.int32)
        for i in range(tl.cdiv(end, B)):
            o_column = i * B + tl.arange(0, B)
            b_order = _ordered(tl.load(p_row + o_column, mask=o_column < end, other=float("-inf")))
            m = o_column < end
            if low < 24:
                m = m & ((b_order >> (low + 8)) == (found >> (low + 8)))
            b_counts += tl.histogram(tl.where(m, (b_order >> low) & 255, 0).to(tl.int32), 256)
            b_counts -= tl.where(o_digit == 0, B - tl.sum(m.to(tl.int32)), 0)
        b_from = tl.cumsum(b_counts, reverse=True)  # columns with this digit, or a larger one
        taken = tl.sum((b_from >= left).to(tl.int32)) - 1
        left -= tl.sum(tl.where(o_digit > taken, b_counts, 0))
        found = found | (taken.to(tl.uint32) << low)
    return found, left


@triton.jit(do_not_specialize=["first", "stride_scores"])
def choose_kernel(
    p_scores, p_slots, p_counts, p_block_table, p_req_indices, p_ends, p_bits, p_starts, first, stride_pages, stride_scores,
    PAGE: tl.constexpr, SHIFT: tl.constexpr, BEST: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    i_row = first + tl.program_id(0).to(tl.int64)
    end = tl.load(p_ends + i_row).to(tl.int32)
    bits, start = tl.full([], -1, tl.int64), end
    if p_bits is not None:
        bits, start = tl.load(p_bits + i_row), tl.load(p_starts + i_row).to(tl.int32)
    p_pages = p_block_table + tl.load(p_req_indices + i_row) * stride_pages
    p_row = p_scores + tl.program_id(0).to(tl.int64) * stride_scores
    # Every number is above 0, in its place in the order: where nothing was scored all that is seen is taken.
    scored, least, equals = tl.full([], 0, tl.int32), tl.full([], 0, tl.uint32), tl.full([], 0, tl.int32)
    if end > BEST:
        scored = end
        least, equals = _threshold(p_row, end, BEST, B)
    taken, met = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    for i in range(tl.cdiv(end, B)):
        o_column = i * B + tl.arange(0, B)
        b_seen = _is_seen(o_column, end, bits, start, p_bits is not None)
        b_order = _ordered(tl.load(p_row + o_column, mask=b_seen & (o_column < scored), other=float("-inf")))
        b_equal = (b_seen & (b_order == least)).to(tl.int32)
        b_taken = b_seen & ((b_order > least) | ((b_equal == 1) & (met + tl.cumsum(b_equal) <= equals)))
        b_place = taken + tl.cumsum(b_taken.to(tl.int32)) - 1
        tl.store(p_slots + i_row * BEST + b_place, _slot_of(p_pages, o_column, b_taken, PAGE, SHIFT), mask=b_taken)
        taken += tl.sum(b_taken.to(tl.int32))
        met += tl.sum(b_equal)
    tl.store(p_counts + i_row, taken.to(tl.int64))


def select(
    q: Tensor, weights: Tensor, keys: Tensor, block_table: Tensor, seats: Tensor, ends: Tensor, bits: Tensor | None, starts: Tensor | None,
    page_size: int, best: int, *, scales: Tensor | None = None, shift: int = 0, splits: int | None = None,
    scores: int = MAX_SCORES, block: int = BLOCK,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See reference.select. `scores`: how many of them are in memory at a time, for as many rows as that is. `splits`: of each row."""
    rows, heads, dim = q.shape
    assert keys.shape[1:] == (1, dim) and keys.is_contiguous() and q.is_contiguous() and weights.is_contiguous(), (q.shape, keys.shape)
    assert weights.shape == (rows, heads) and weights.dtype == torch.float32 and block_table.stride(1) == 1, (weights.shape, weights.dtype)
    assert scales is None or (scales.numel() == len(keys) and scales.is_contiguous() and scales.dtype == torch.float32), scales
    columns = block_table.shape[1] * page_size
    each = max(1, min(scores // columns, rows))
    slots = torch.empty(rows, best, dtype=torch.int64, device=q.device)
    counts = torch.empty(rows, dtype=torch.int64, device=q.device)
    # Where no request can have more columns than are taken there is nothing to score.
    made = torch.empty(each, columns if columns > best else 1, dtype=torch.float32, device=q.device)
    where = block_table, seats, ends, bits, starts
    for first in range(0, rows, each):
        part = min(each, rows - first)
        if columns > best:
            BN, warps = (16, 8) if q.dtype == torch.float32 else (128, 4)
            index_score_kernel[(part, splits or splits_for(part, processors_of(q.device)))](
                q, weights, keys, scales, made, *where, first, block_table.stride(0), made.stride(0), HEADS=heads, D=dim, BN=BN,
                PAGE=page_size, SHIFT=shift, BEST=best, num_warps=warps, num_stages=2,
            )  # fmt: skip
        choose_kernel[(part,)](
            made, slots, counts, *where, first, block_table.stride(0), made.stride(0), PAGE=page_size, SHIFT=shift, BEST=best, B=block,
            num_warps=8,
        )  # fmt: skip
    return slots, counts


def selected_mla(
    q: Tensor, latent: Tensor, slots: Tensor, counts: Tensor, scale: float, value_dim: int, *, splits: int | None = None
) -> Tensor:  # fmt: skip
    """See reference.selected_mla. `splits`: of each row."""
    heads, dim = q.shape[1:]
    rows = torch.arange(len(q) + 1, device=q.device)
    # The slot of each key takes registers, too: a second buffer of keys would spill.
    tile = tiling(max(heads, 32), dim, True, q.element_size(), latent.element_size(), torch.version.hip is not None)
    tile = replace(tile, stages=min(tile.stages, 2))
    return span_mla(q, latent, slots, rows[:-1], rows, counts, counts - 1, None, None, 1, scale, value_dim, splits=splits, tile=tile)
