"""Linear layers whose weights are packed in place: src/linear.h."""

from __future__ import annotations

from ctypes import POINTER, Structure, byref, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from mtpserve_kernels.cpu.library import Op

PANEL = 16  # outputs
TYPES = {torch.float32: 0, torch.bfloat16: 1}


class Matrix(Structure):
    """src/linear.h. `tensors` keeps what it points to."""

    _fields_ = [
        ("data", c_void_p), ("bias", c_void_p), ("scale", c_void_p), ("outputs", c_int64), ("inputs", c_int64), ("type", c_int32)
    ]  # fmt: skip
    tensors: tuple[Tensor | None, ...]


_linear = Op("mtp_linear", POINTER(Matrix), c_void_p, c_int32, c_int64, c_int64, c_void_p, c_int64, c_int32, c_int32)
_pack = Op("mtp_pack", c_void_p, c_int64, c_int64, c_int32)


def padded(tensor: Tensor) -> Tensor:
    """With zero rows up to whole panels: itself where there is nothing to add."""
    missing = -len(tensor) % PANEL
    return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])]) if missing else tensor


def pack_panels(data: Tensor) -> None:
    """[…, N, K] contiguous, whole panels of outputs and K even: in place."""
    inputs = data.shape[-1]
    assert data.is_contiguous() and data.shape[-2] % PANEL == inputs % 2 == 0 and data.dtype in TYPES, (data.shape, data.dtype)
    _pack(data, data.numel() // inputs, inputs, data.element_size())


def pack(weight: Tensor, bias: Tensor | None = None) -> Matrix:
    """weight [N, K] float32 or bfloat16, contiguous, K even; bias [N]. Where N is a multiple of 16 the weight is packed in place: its
    numbers are in another order afterwards (`rows` reads them), and no second copy exists."""
    outputs, inputs = weight.shape
    assert inputs % 2 == 0 and weight.is_contiguous() and weight.dtype in TYPES, (weight.shape, weight.dtype)
    data = padded(weight.detach())
    pack_panels(data)
    added = None if bias is None else padded(bias.detach().float())
    matrix = Matrix(data.data_ptr(), None if added is None else added.data_ptr(), None, outputs, inputs, TYPES[weight.dtype])
    matrix.tensors = data, added
    return matrix


def rows(matrix: Matrix, ids: Tensor) -> Tensor:
    """The weight's rows `ids` [n] → [n, K], a copy."""
    data = matrix.tensors[0]
    assert data is not None
    step = 4 // data.element_size()
    panels = data.view(-1, matrix.inputs // step, PANEL, step)
    return panels[ids // PANEL, :, ids % PANEL].reshape(len(ids), matrix.inputs)


def linear(x: Tensor, matrix: Matrix, dtype: torch.dtype | None = None, gated: bool = False) -> Tensor:
    """x [T, K] → x W^T + b [T, N] of `dtype`, by default x's. `gated`: W is [gate; up], each of whole panels → silu(gate) * up [T, N / 2].

    Each output is one sum over K in order: a row's numbers do not depend on the other rows, nor on the number of threads.
    """
    x = x if x.stride(-1) == 1 else x.contiguous()
    width = matrix.outputs // 2 if gated else matrix.outputs
    out = torch.empty(len(x), width, dtype=dtype or x.dtype)
    _linear(byref(matrix), x, TYPES[x.dtype], x.stride(0), len(x), out, width, TYPES[out.dtype], gated)
    return out
