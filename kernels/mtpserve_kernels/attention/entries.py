"""Attention to a window of tokens and, in the same softmax, to entries that stand for several tokens each (DeepSeek-V4).

Keys are latent rows that are the values, too, in two memories: tokens in the pages of their window, and entries. A program has one row,
BM of its heads and one split of the blocks of BN keys: first those of the window, then those of the entries.

    tokens     columns first … index of the row's request, of the nodes of a tree those whose bit is set: see span.py
    entries    columns before end[row]; of those from start[row] on, which are nodes of a tree, where bit c - start of bits[row] is set

Where entries were selected, a row has a list of its own: a page table with pages of one entry. The parts of splits are added up as span.py
adds them, and a head's sink is counted by the first one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpserve_kernels.attention.span import LOG2_E, PAD, _attend, _bits_set, combine_kernel, splits_for, tiling
from mtpserve_kernels.tiling import processors_of


@triton.jit
def entries_kernel(
    p_q, p_out, p_parts, p_tokens, p_block_table, p_entries, p_entry_table, p_table_rows, p_index, p_bits, p_starts, p_ends, p_entry_bits,
    p_entry_starts, p_sinks, stride_pages, stride_entries, factor,
    HEADS: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr,
    ENTRY_PAGE: tl.constexpr,
):  # fmt: skip
    """The grid is [rows, tiles of heads, splits]; p_table_rows [2, T]: the row of each table that a row of the batch has."""
    BD: tl.constexpr = triton.next_power_of_2(D) if D > 16 else 16
    i_row, i_split, splits, rows = tl.program_id(0), tl.program_id(2), tl.num_programs(2), tl.num_programs(0)
    o_m, o_d = tl.program_id(1) * BM + tl.arange(0, BM), tl.arange(0, BD)
    m_row, b_out_row = o_m < HEADS, i_row.to(tl.int64) * HEADS + o_m
    index, end = tl.load(p_index + i_row).to(tl.int32), tl.load(p_ends + i_row).to(tl.int32)
    columns, position = index + 1, index
    start, b_bits = columns, tl.full([BM], -1, tl.int64)
    if p_bits is not None:
        bits, start = tl.load(p_bits + i_row), tl.load(p_starts + i_row).to(tl.int32)
        position = tl.where(bits == -1, index, start + _bits_set(bits).to(tl.int32) - 1)
        b_bits += bits + 1
    entry_start, b_entry_bits = end, tl.full([BM], -1, tl.int64)
    if p_entry_bits is not None:
        entry_start = tl.load(p_entry_starts + i_row).to(tl.int32)
        b_entry_bits += tl.load(p_entry_bits + i_row) + 1
    first = tl.maximum(position - (WINDOW - 1), 0)
    skipped = first // BN
    blocks = tl.cdiv(columns, BN) - skipped
    total = blocks + tl.cdiv(end, BN)
    per = tl.cdiv(total, splits)
    low = i_split * per
    high = tl.minimum(low + per, total)
    b_acc = tl.zeros([BM, BD], tl.float32)
    b_max, b_sum = tl.full([BM], float("-inf"), tl.float32), tl.zeros([BM], tl.float32)
    if i_split == 0:
        b_max = tl.load(p_sinks + o_m, mask=m_row, other=0.0) * LOG2_E
        b_sum += 1.0
    if low < high:
        b_zero = tl.zeros([BM], tl.int32)
        b_q = tl.load(p_q + b_out_row[:, None] * D + o_d[None, :], mask=m_row[:, None] & (o_d < D)[None, :], other=0.0)
        p_pages = p_block_table + tl.load(p_table_rows + i_row) * stride_pages
        for i in range(tl.maximum(tl.minimum(high, blocks) - low, 0)):
            b_acc, b_max, b_sum = _attend(
                b_q, b_q, b_acc, b_max, b_sum, p_tokens, None, p_pages, (skipped + low + i) * BN, first, columns, b_zero + first,
                b_zero + index, b_bits, start, factor, 1, BN, D, D, PAGE, WINDOW, 0, p_bits is not None,
            )  # fmt: skip
        p_list = p_entry_table + tl.load(p_table_rows + rows + i_row) * stride_entries
        after = tl.maximum(low - blocks, 0)
        for i in range(tl.maximum(high - blocks - after, 0)):
            b_acc, b_max, b_sum = _attend(
                b_q, b_q, b_acc, b_max, b_sum, p_entries, None, p_list, (after + i) * BN, 0, end, b_zero, b_zero + end - 1, b_entry_bits,
                entry_start, factor, 1, BN, D, D, ENTRY_PAGE, 0, 0, p_entry_bits is not None,
            )  # fmt: skip
    b_norm = tl.where(b_sum == 0, 1.0, b_sum)
    m = m_row[:, None] & (o_d < D)[None, :]
    if p_parts is not None:
        p_part = p_parts + (b_out_row * splits + i_split) * (D + PAD)
        tl.store(p_part + D, tl.where(b_sum == 0, float("-inf"), b_max + tl.log2(b_norm)), mask=m_row)
        tl.store(p_part[:, None] + o_d[None, :], b_acc / b_norm[:, None], mask=m)
    else:
        tl.store(p_out + b_out_row[:, None] * D + o_d[None, :], (b_acc / b_norm[:, None]).to(p_out.dtype.element_ty), mask=m)


def window_and_entries(
    q: Tensor, tokens: Tensor, block_table: Tensor, entries: Tensor, entry_table: Tensor, table_rows: Tensor, index: Tensor,
    bits: Tensor | None, starts: Tensor | None, ends: Tensor, entry_bits: Tensor | None, entry_starts: Tensor | None, sinks: Tensor,
    page_size: int, entry_page_size: int, window: int, scale: float, *, splits: int | None = None,
) -> Tensor:  # fmt: skip
    """See reference.window_and_entries. `splits`: of each row."""
    rows, heads, dim = q.shape
    assert tokens.shape[1:] == entries.shape[1:] == (1, dim) and tokens.is_contiguous() and entries.is_contiguous(), tokens.shape
    assert q.is_contiguous() and sinks.shape == (heads,) and sinks.dtype == torch.float32 and table_rows.shape == (2, rows)
    assert block_table.stride(1) == entry_table.stride(1) == 1 and table_rows.is_contiguous(), (block_table.stride(), entry_table.stride())
    assert all(part is None or part.is_contiguous() for part in (index, bits, starts, ends, entry_bits, entry_starts))
    hip = torch.version.hip is not None
    tile = tiling(max(heads, 32), dim, True, q.element_size(), tokens.element_size(), hip)
    tiles = triton.cdiv(heads, tile.BM)
    if splits is None:
        most = triton.cdiv(window, tile.BN) + 1 + triton.cdiv(entry_table.shape[1] * entry_page_size, tile.BN)
        splits = min(splits_for(rows * tiles, processors_of(q.device)), triton.next_power_of_2(most))
    out = torch.empty_like(q)
    parts = None if splits == 1 else torch.empty(rows, heads, splits, dim + PAD.value, dtype=torch.float32, device=q.device)
    entries_kernel[(rows, tiles, splits)](
        q, out, parts, tokens, block_table, entries, entry_table, table_rows, index, bits, starts, ends, entry_bits, entry_starts, sinks,
        block_table.stride(0), entry_table.stride(0), scale * LOG2_E.value, HEADS=heads, D=dim, BM=tile.BM, BN=tile.BN, PAGE=page_size,
        WINDOW=window, ENTRY_PAGE=entry_page_size, num_warps=tile.warps, num_stages=min(tile.stages, 2),
    )  # fmt: skip
    if parts is not None:
        combine_kernel[(rows * heads,)](out, parts, E=dim, SPLITS=splits)
    return out
