"""A stack of decoder layers in one call: src/layers.cpp, whose structs these are."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import POINTER, Array, Structure, addressof, byref, c_bool, c_int32, c_int64, c_void_p, sizeof
from typing import Any

import torch
from torch import Tensor

from mtpserve_kernels.cpu.attention import Spans
from mtpserve_kernels.cpu.fused import Norm, Rotation
from mtpserve_kernels.cpu.library import Op
from mtpserve_kernels.cpu.linear import TYPES, Matrix
from mtpserve_kernels.cpu.matrices import Matrices
from mtpserve_kernels.cpu.moe import Experts, Router
from mtpserve_kernels.cpu.ranks import Exchange


class AttentionLayer(Structure):
    _fields_ = [
        ("in", Matrix), ("out", Matrix), ("heads", c_int64), ("kv_heads", c_int64), ("dim", c_int64),
        ("q_up", Matrix), ("q_norm", Norm), ("kv_norm", Norm), ("k_up", Matrices), ("v_up", Matrices),
        ("q_rank", c_int64), ("kv_rank", c_int64), ("nope", c_int64), ("rope", c_int64), ("value", c_int64),
        ("sinks", c_void_p),
    ]  # fmt: skip


class Layer(Structure):
    _fields_ = [
        ("attention_norm", Norm), ("mlp_norm", Norm), ("attention", AttentionLayer), ("gate_up", Matrix), ("down", Matrix),
        ("router", Router), ("experts", Experts),
    ]  # fmt: skip


class Context(Structure):
    _fields_ = [("keys", c_void_p), ("values", c_void_p), ("spans", c_void_p), ("slots", c_void_p)]


class Fusion(Structure):
    _fields_ = [("embedding_norm", Norm), ("hidden_norm", Norm), ("project", Matrix), ("embedding_first", c_bool)]


class Pass(Structure):
    _fields_ = [
        ("x", c_void_p), ("residual", c_void_p), ("out", c_void_p), ("total", c_void_p), ("normed", c_void_p), ("last", Norm),
        ("rows", c_int64), ("hidden", c_int64), ("type", c_int32), ("rotation", Rotation), ("ranks", c_void_p),
        ("fusion", c_void_p), ("embedding", c_void_p), ("ids", c_void_p), ("features", c_void_p),
        ("features_stride", c_int64), ("stores", c_bool),
    ]  # fmt: skip


_layers = Op("mtp_layers", c_void_p, c_void_p, c_int64, POINTER(Pass))


class Contexts:
    """Of a stack's layers: `pools` are each layer's keys and values, `stores` the number of the store that each is in. It keeps no tensor
    alive."""

    def __init__(self, pools: Sequence[tuple[Tensor, Tensor]], stores: Sequence[int]) -> None:
        self.stores = stores
        self.array = (Context * len(pools))(*[Context(keys.data_ptr(), values.data_ptr()) for keys, values in pools])

    def plan(self, planned: Sequence[tuple[Spans, Tensor]]) -> None:
        """For the next passes: each store's batch and where its rows are stored, slots [T] int64."""
        where = [(addressof(spans), slots.data_ptr()) for spans, slots in planned]
        for context, store in zip(self.array, self.stores, strict=True):
            context.spans, context.slots = where[store]


def run(
    layers: Array[Any],
    part: slice,
    contexts: Contexts,
    x: Tensor,
    residual: Tensor | None,
    rotation: Rotation,
    last: Norm | None,
    ranks: Exchange | None = None,
) -> tuple[Tensor, Tensor]:
    """layers: an array of Layer, of which `part` is run. x and residual [T, H], contiguous → the last layer's output as two parts that are
    to be added; with a norm `last` after it, the norm and their sum. `ranks`: that sum what each has of a block's output; raises PeerGone
    as they do."""
    x = x.contiguous()
    out, total, normed = torch.empty_like(x), torch.empty_like(x), torch.empty_like(x) if last is not None else None
    step = Pass(
        x.data_ptr(), None if residual is None else residual.data_ptr(), out.data_ptr(), total.data_ptr(),
        None if normed is None else normed.data_ptr(), last or Norm(), *x.shape, TYPES[x.dtype], rotation,
        None if ranks is None else ranks.address,
    )  # fmt: skip
    first, count = part.start, part.stop - part.start
    _layers(byref(layers, first * sizeof(Layer)), byref(contexts.array, first * sizeof(Context)), count, byref(step))
    if ranks is not None:
        ranks.check()
    return out if normed is None else normed, total


def run_fused(
    layers: Array[Any],
    contexts: Contexts,
    fusion: Fusion,
    embedding: Tensor,
    ids: Tensor | None,
    features: Tensor,
    rotation: Rotation,
    last: Norm | None,
    ranks: Exchange | None = None,
) -> tuple[Tensor, Tensor] | None:
    """`run` of one layer, whose input `fusion` makes of features [T, H] and embedding, contiguous [T, H], or [V, H] with
    ids [T] int64, which are below V. `last` None: its keys and values are stored, and there is no output."""
    rows, hidden = features.shape
    assert embedding.is_contiguous() and embedding.shape[1] == hidden and embedding.dtype == features.dtype and features.stride(1) == 1
    assert (embedding if ids is None else ids).shape[0] == rows and (ids is None or (ids.dtype == torch.int64 and ids.is_contiguous()))
    step = Pass(
        rows=rows, hidden=hidden, type=TYPES[features.dtype], rotation=rotation, fusion=addressof(fusion), embedding=embedding.data_ptr(),
        ids=None if ids is None else ids.data_ptr(), features=features.data_ptr(), features_stride=features.stride(0), stores=last is None,
    )  # fmt: skip
    if last is None:
        _layers(byref(layers), byref(contexts.array), 1, byref(step))
        return None
    out, total, normed = torch.empty(3, rows, hidden, dtype=features.dtype).unbind()
    step.out, step.total, step.normed, step.last = out.data_ptr(), total.data_ptr(), normed.data_ptr(), last
    step.ranks = None if ranks is None else ranks.address
    _layers(byref(layers), byref(contexts.array), 1, byref(step))
    if ranks is not None:
        ranks.check()
    return normed, total
