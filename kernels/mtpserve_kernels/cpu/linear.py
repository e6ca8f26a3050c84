"""Linear layers whose weights are packed in place: src/linear.h."""

from __future__ import annotations

from ctypes import POINTER, Structure, addressof, byref, c_bool, c_float, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from mtpserve_kernels.cpu.library import Op
from mtpserve_kernels.moe.reference import Clamped
from mtpserve_kernels.quant.reference import quantize_int8

PANEL = 16  # outputs
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}


class Heads(Structure):
    """src/types.h."""

    _fields_ = [("data", c_void_p), ("stride", c_int64), ("head_stride", c_int64), ("type", c_int32)]


def heads_of(x: Tensor) -> Heads:
    """x [rows, heads, K], each head's numbers side by side. It is not kept alive."""
    return Heads(x.data_ptr(), x.stride(0), x.stride(1), TYPES[x.dtype])


class Matrix(Structure):
    """src/linear.h. `tensors` keeps what it points to: data, bias, scale."""

    _fields_ = [
        ("data", c_void_p), ("bias", c_void_p), ("scale", c_void_p), ("outputs", c_int64), ("inputs", c_int64), ("type", c_int32)
    ]  # fmt: skip
    tensors: tuple[Tensor | None, ...]
    address: int


class Clamp(Structure):
    """src/linear.h"""

    _fields_ = [("alpha", c_float), ("most", c_float), ("limit", c_float), ("plus", c_float)]


class Output(Structure):
    """src/linear.h"""

    _fields_ = [("data", c_void_p), ("stride", c_int64), ("type", c_int32), ("gated", c_bool), ("clamp", Clamp), ("squared", c_bool)]


_linear = Op("mtp_linear", c_void_p, c_void_p, c_int32, c_int64, c_int64, POINTER(Output))
_pack = Op("mtp_pack", c_void_p, c_int64, c_int64, c_int32)


def padded(tensor: Tensor) -> Tensor:
    """With zero rows up to whole panels: itself where there is nothing to add."""
    missing = -len(tensor) % PANEL
    return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])]) if missing else tensor


def pack_panels(data: Tensor) -> None:
    """[…, N, K] contiguous, whole panels of outputs and K even: in place."""
    inputs = data.shape[-1]
    assert data.is_contiguous() and data.shape[-2] % PANEL == inputs % 2 == 0 and data.dtype in TYPES, (data.shape, data.dtype)
    if inputs:
        _pack(data, data.numel() // inputs, inputs, data.element_size())


def packed(weight: Tensor, bias: Tensor | None, scale: Tensor | None, inputs: int) -> Matrix:
    """weight [N, K rounded up]."""
    data = padded(weight.detach())
    _pack(data, *data.shape, data.element_size())
    added, scales = (None if x is None else padded(x.detach().float()) for x in (bias, scale))
    where = (data.data_ptr(), *(None if x is None else x.data_ptr() for x in (added, scales)))
    matrix = Matrix(*where, len(weight), inputs, TYPES[weight.dtype])
    matrix.tensors, matrix.address = (data, added, scales), addressof(matrix)
    return matrix


def pack(weight: Tensor, bias: Tensor | None = None) -> Matrix:
    """weight [N, K] float32 or bfloat16, contiguous, K even; bias [N]. Where N is a multiple of 16 the weight is packed in place: its
    numbers are in another order afterwards (`rows` reads them), and no second copy exists."""
    inputs = weight.shape[1]
    assert inputs % 2 == 0 and weight.is_contiguous() and weight.dtype in (torch.float32, torch.bfloat16), (weight.shape, weight.dtype)
    return packed(weight, bias, None, inputs)


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [N, K] → int8 [N, K] and one scale per output [N]: weight ≈ int8 * scale."""
    return quantize_int8(weight)


def pack_int8(weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Matrix:
    """weight [N, K] int8, contiguous, and scale [N], as `quantize` gives them; bias [N]. `linear` then quantises its inputs per row
    (quant/reference.py `linear_int8`). Packed in place where N is a multiple of 16 and K of 4."""
    inputs = weight.shape[1]
    assert weight.is_contiguous() and weight.dtype == torch.int8, (weight.shape, weight.dtype)
    missing = -inputs % 4
    wide = torch.cat([weight, weight.new_zeros(len(weight), missing)], 1) if missing else weight
    return packed(wide, bias, scale, inputs)


def rows(matrix: Matrix, ids: Tensor) -> Tensor:
    """The weight's rows `ids` [n] → [n, K], a copy; of an int8 weight in float32, multiplied with their scales."""
    data, _, scale = matrix.tensors
    assert data is not None
    step = 4 // data.element_size()
    panels = data.view(-1, data.shape[1] // step, PANEL, step)
    chosen = panels[ids // PANEL, :, ids % PANEL].reshape(len(ids), -1)[:, : matrix.inputs]
    return chosen if scale is None else chosen * scale[ids].unsqueeze(1)


def linear(x: Tensor, matrix: Matrix, dtype: torch.dtype | None = None, gated: bool = False, clamped: Clamped | None = None) -> Tensor:
    """x [T, K] → x W^T + b [T, N] of `dtype`, by default x's. `gated`: W is [gate; up], each of whole panels → silu(gate) * up [T, N / 2],
    or with the numbers of moe.reference.clamped_gate.

    Each output is one sum over K in order: a row's numbers do not depend on the other rows, nor on the number of threads.
    """
    rows, (stride, last) = x.shape[0], x.stride()
    if last != 1:
        x, stride = x.contiguous(), x.shape[1]
    width, out_type = matrix.outputs // 2 if gated else matrix.outputs, dtype or x.dtype
    out = torch.empty((rows, width), dtype=out_type)
    to = Output(out.data_ptr(), width, TYPES[out_type], gated, Clamp(*(clamped or ())))
    _linear(matrix.address, x, TYPES[x.dtype], stride, rows, byref(to))
    return out
