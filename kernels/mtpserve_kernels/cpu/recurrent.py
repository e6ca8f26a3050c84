"""Layers that keep a state, on a CPU: src/recurrent.cpp. What it computes: mtpserve_kernels.recurrent.reference.

A row's numbers depend on the rows of its path alone, to the last bit: not on how they are cut into steps, nor on the rows beside them.
"""

from __future__ import annotations

from ctypes import POINTER, Structure, byref, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from mtpserve_kernels.cpu.library import Op
from mtpserve_kernels.cpu.linear import TYPES
from mtpserve_kernels.recurrent.reference import LayerState, Rule, StateSpans


class RuleFields(Structure):
    _fields_ = [(name, c_int64) for name in Rule._fields]


class LayerFields(Structure):
    _fields_ = [
        ("state", c_void_p), ("before", c_void_p), ("ring", c_void_p), ("ring_gates", c_void_p), ("ring_rows", c_int64), ("type", c_int32)
    ]  # fmt: skip


class SpanFields(Structure):
    _fields_ = [
        ("seats", c_void_p), ("query_start_loc", c_void_p), ("length", c_void_p), ("replay", c_void_p), ("fresh", c_void_p),
        ("parents", c_void_p), ("keep_after", c_void_p), ("keep_in", c_void_p), ("requests", c_int64), ("parents_stride", c_int64),
    ]  # fmt: skip


_recur = Op(
    "mtp_recur", POINTER(RuleFields), POINTER(LayerFields), POINTER(SpanFields), c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_void_p
)  # fmt: skip


def recur(
    x: Tensor, gates: Tensor, conv: Tensor, layer: LayerState, spans: StateSpans, rule: Rule, skip: Tensor | None = None
) -> Tensor:  # fmt: skip
    """x [T, channels] float32 or bfloat16, as the layer's; gates [T, 2, value_heads], conv [taps, channels], of Mamba-2 with its bias, and
    skip [value_heads]: float32, without gaps."""
    assert x.dtype == layer.before.dtype == layer.ring.dtype and x.dtype in TYPES and x.stride(1) == 1, (
        x.dtype,
        layer.ring.dtype,
        x.stride(),
    )
    numbers = gates, conv, layer.state, layer.before, layer.ring, layer.ring_gates
    assert all(part.is_contiguous() for part in numbers) and gates.dtype == conv.dtype == layer.state.dtype == torch.float32
    assert (skip is not None) == rule.mamba2 and len(conv) == rule.taps + rule.mamba2, (conv.shape, rule)
    assert skip is None or (skip.is_contiguous() and skip.dtype == torch.float32)
    lists = spans.seats, spans.query_start_loc, spans.length, spans.replay, spans.fresh
    assert all(part.dtype == torch.int64 and part.is_contiguous() for part in lists)
    parents = spans.parents if spans.parents is None or spans.parents.stride(1) == 1 else spans.parents.contiguous()
    fields = SpanFields(*(part.data_ptr() for part in lists), requests=len(spans.seats))
    if parents is not None:
        fields.parents, fields.parents_stride = parents.data_ptr(), parents.stride(0)
    if spans.keep_after is not None and spans.keep_in is not None:
        fields.keep_after, fields.keep_in = spans.keep_after.data_ptr(), spans.keep_in.data_ptr()
    kept = LayerFields(
        layer.state.data_ptr(), layer.before.data_ptr(), layer.ring.data_ptr(), layer.ring_gates.data_ptr(), layer.ring.shape[1],
        TYPES[x.dtype],
    )  # fmt: skip
    out = torch.empty(len(x), rule.value_heads, rule.value_dim, dtype=x.dtype)
    _recur(byref(RuleFields(*rule)), byref(kept), byref(fields), x, x.stride(0), gates, conv, skip, out)
    return out
