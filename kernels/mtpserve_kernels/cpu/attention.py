"""Attention of ragged spans over pages in place: src/attention.h. What a row sees: mtpserve_kernels.attention.span.

A row's numbers depend on nothing but its own query, and the keys and values that it sees: not on the rows beside it, nor on where a tree
has its ancestors, nor on the number of threads.
"""

from __future__ import annotations

from ctypes import POINTER, Structure, byref, c_float, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from mtpserve_kernels.cpu.library import Op
from mtpserve_kernels.cpu.linear import TYPES, Heads, heads_of


class Spans(Structure):
    """src/attention.h. `tensors` keeps what it points to."""

    _fields_ = [
        ("block_table", c_void_p), ("seats", c_void_p), ("query_start_loc", c_void_p), ("seq_lens", c_void_p), ("index", c_void_p),
        ("tree_bits", c_void_p), ("tree_start", c_void_p),
        ("table_stride", c_int64), ("requests", c_int64), ("page_size", c_int64), ("window", c_int64), ("shift", c_int64),
        ("heads", c_int64), ("kv_heads", c_int64), ("key_dim", c_int64), ("value_dim", c_int64),
        ("key_stride", c_int64), ("key_head_stride", c_int64), ("value_stride", c_int64), ("value_head_stride", c_int64),
        ("scale", c_float), ("type", c_int32),
    ]  # fmt: skip
    tensors: tuple[Tensor | None, ...]


_attention = Op("mtp_attention", POINTER(Spans), POINTER(Heads), POINTER(Heads), c_void_p, c_void_p, c_void_p)


def layout_of(keys: Tensor, values: Tensor, heads: int, page_size: int, scale: float, window: int = 0) -> Spans:
    """What batches have in common whose layers' keys [slots, kv_heads, D] and values [slots, kv_heads, E] look like these: float32 or
    bfloat16, each head's numbers side by side. D is even. `heads`: of the queries."""
    kv_heads, key_dim = keys.shape[1:]
    assert keys.dtype == values.dtype and keys.dtype in TYPES, (keys.dtype, values.dtype)
    assert keys.stride(2) == 1 and values.stride(2) == 1 and values.shape[1] == kv_heads, (keys.stride(), values.stride(), values.shape)
    assert heads % kv_heads == 0 and key_dim % 2 == 0 and window >= 0, (heads, kv_heads, key_dim, window)
    return Spans(
        page_size=page_size, window=window, heads=heads, kv_heads=kv_heads, key_dim=key_dim, value_dim=values.shape[2],
        key_stride=keys.stride(0), key_head_stride=keys.stride(1), value_stride=values.stride(0), value_head_stride=values.stride(1),
        scale=scale, type=TYPES[keys.dtype],
    )  # fmt: skip


def plan(
    layout: Spans, block_table: Tensor, seats: Tensor, query_start_loc: Tensor, seq_lens: Tensor, index: Tensor,
    tree_bits: Tensor | None = None,
    tree_start: Tensor | None = None, shift: int = 0,
) -> Spans:  # fmt: skip
    """A batch. The arguments are those of `span_gqa`."""
    lists = seats, query_start_loc, seq_lens, index, tree_bits, tree_start
    for x in lists:
        assert x is None or (x.dtype == torch.int64 and x.is_contiguous()), (x.dtype, x.stride())
    assert block_table.dtype == torch.int64, block_table.dtype
    assert block_table.stride(1) == 1 and (tree_bits is None) == (tree_start is None) and shift >= 0, (block_table.stride(), shift)
    spans = Spans.from_buffer_copy(layout)
    spans.block_table = block_table.data_ptr()
    spans.table_stride = block_table.stride(0)
    spans.requests = seats.shape[0]
    spans.shift = shift
    spans.seats, spans.query_start_loc, spans.seq_lens, spans.index = (x.data_ptr() for x in lists[:4])
    if tree_bits is not None and tree_start is not None:
        spans.tree_bits, spans.tree_start = tree_bits.data_ptr(), tree_start.data_ptr()
    spans.tensors = block_table, *lists
    return spans


def attend(q: Tensor, keys: Tensor, values: Tensor, spans: Spans, sinks: Tensor | None = None) -> Tensor:
    """q [T, heads, D] → [T, heads, E] of q's type: float32 or bfloat16. Keys and values as planned, of any layer; sinks [heads] float32."""
    assert sinks is None or (sinks.shape == (spans.heads,) and sinks.dtype == torch.float32 and sinks.is_contiguous())
    if q.stride(2) != 1 or q.stride(1) != q.shape[2]:
        q = q.contiguous()
    assert q.shape[1:] == (spans.heads, spans.key_dim), (q.shape, spans.heads, spans.key_dim)
    out = torch.empty(len(q), spans.heads, spans.value_dim, dtype=q.dtype)
    _attention(byref(spans), byref(heads_of(q)), byref(heads_of(out)), keys, values, sinks)
    return out


def span_gqa(
    q: Tensor, k: Tensor, v: Tensor, block_table: Tensor, seats: Tensor, query_start_loc: Tensor, seq_lens: Tensor, index: Tensor,
    tree_bits: Tensor | None, tree_start: Tensor | None, page_size: int, scale: float, *, sinks: Tensor | None = None, window: int = 0,
    shift: int = 0,
) -> Tensor:  # fmt: skip
    """q [T, heads, D], k [slots, kv_heads, D], v [slots, kv_heads, E] → [T, heads, E]; see mtpserve_kernels.attention.span."""
    layout = layout_of(k, v, q.shape[1], page_size, scale, window)
    return attend(q, k, v, plan(layout, block_table, seats, query_start_loc, seq_lens, index, tree_bits, tree_start, shift), sinks)


def span_mla(
    q: Tensor, latent: Tensor, block_table: Tensor, seats: Tensor, query_start_loc: Tensor, seq_lens: Tensor, index: Tensor,
    tree_bits: Tensor | None, tree_start: Tensor | None, page_size: int, scale: float, value_dim: int, *, sinks: Tensor | None = None,
    window: int = 0, shift: int = 0,
) -> Tensor:  # fmt: skip
    """q [T, heads, D], latent [slots, 1, D] whose first `value_dim` numbers are the value → [T, heads, value_dim]"""
    where = block_table, seats, query_start_loc, seq_lens, index, tree_bits, tree_start, page_size, scale
    return span_gqa(q, latent, latent[..., :value_dim], *where, sinks=sinks, window=window, shift=shift)
