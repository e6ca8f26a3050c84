"""A stack of decoder layers in one call: src/layers.cpp, whose structs these are."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import POINTER, Array, Structure, byref, c_bool, c_float, c_int32, c_int64, c_void_p, pointer, sizeof
from typing import Any

import torch
from torch import Tensor

from mtpserve_kernels.cpu.attention import Spans
from mtpserve_kernels.cpu.library import Op
from mtpserve_kernels.cpu.linear import TYPES, Matrix
from mtpserve_kernels.cpu.matrices import Matrices
from mtpserve_kernels.cpu.moe import Experts, Router


class Norm(Structure):
    _fields_ = [("weight", c_void_p), ("type", c_int32), ("eps", c_float)]


class AttentionLayer(Structure):
    _fields_ = [
        ("in", Matrix), ("out", Matrix), ("heads", c_int64), ("kv_heads", c_int64), ("dim", c_int64),
        ("q_up", Matrix), ("q_norm", Norm), ("kv_norm", Norm), ("k_up", Matrices), ("v_up", Matrices),
        ("q_rank", c_int64), ("kv_rank", c_int64), ("nope", c_int64), ("rope", c_int64), ("value", c_int64),
    ]  # fmt: skip


class Layer(Structure):
    _fields_ = [
        ("attention_norm", Norm), ("mlp_norm", Norm), ("attention", AttentionLayer), ("gate_up", Matrix), ("down", Matrix),
        ("router", Router), ("experts", Experts),
    ]  # fmt: skip


class Context(Structure):
    _fields_ = [("keys", c_void_p), ("values", c_void_p), ("spans", POINTER(Spans)), ("slots", c_void_p)]


class Rotation(Structure):
    _fields_ = [("positions", c_void_p), ("cos", c_void_p), ("sin", c_void_p), ("dim", c_int64), ("interleaved", c_bool)]


class Pass(Structure):
    _fields_ = [
        ("x", c_void_p), ("residual", c_void_p), ("out", c_void_p), ("total", c_void_p), ("rows", c_int64), ("hidden", c_int64),
        ("type", c_int32), ("rotation", Rotation),
    ]  # fmt: skip


_layers = Op("mtp_layers", c_void_p, c_void_p, c_int64, POINTER(Pass))


def norm(weight: Tensor, eps: float) -> Norm:
    """It does not keep the weight alive."""
    return Norm(weight.data_ptr(), TYPES[weight.dtype], eps)


def context(keys: Tensor, values: Tensor, spans: Spans, slots: Tensor) -> Context:
    """Of a layer whose keys and values are planned by `spans`; slots [T] int64. It keeps none of them alive."""
    return Context(keys.data_ptr(), values.data_ptr(), pointer(spans), slots.data_ptr())


def run(
    layers: Array[Any], first: int, contexts: Sequence[Context], x: Tensor, residual: Tensor | None, positions: Tensor, cos: Tensor,
    sin: Tensor, interleaved: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """layers: an array of Layer, of which those from `first` on are run that have a context. x and residual [T, H], contiguous → the last
    layer's output as two parts that are to be added.

    positions [T] int64; cos, sin [length, rope / 2] float32.
    """
    x = x.contiguous()
    out, total = torch.empty_like(x), torch.empty_like(x)
    step = Pass(
        x.data_ptr(), None if residual is None else residual.data_ptr(), out.data_ptr(), total.data_ptr(), *x.shape, TYPES[x.dtype],
        Rotation(positions.data_ptr(), cos.data_ptr(), sin.data_ptr(), 2 * cos.shape[1], interleaved),
    )  # fmt: skip
    _layers(byref(layers, first * sizeof(Layer)), (Context * len(contexts))(*contexts), len(contexts), byref(step))
    return out, total
