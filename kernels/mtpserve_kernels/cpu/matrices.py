"""Packed matrices of one shape that lie one after the other, and the products per head of multi-head latent attention: src/linear.h."""

from __future__ import annotations

from ctypes import POINTER, Structure, byref, c_int64

import torch
from torch import Tensor

from mtpserve_kernels.cpu.library import Op
from mtpserve_kernels.cpu.linear import PANEL, TYPES, Heads, Matrix, heads_of, pack_panels


class Matrices(Structure):
    """src/linear.h. `data` and `bias` keep what it points to."""

    _fields_ = [("first", Matrix), ("number", c_int64), ("stride", c_int64)]
    data: Tensor
    bias: Tensor | None


_heads_linear = Op("mtp_heads_linear", POINTER(Matrices), POINTER(Heads), c_int64, POINTER(Heads))


def matrices(data: Tensor, outputs: int, inputs: int, bias: Tensor | None = None) -> Matrices:
    """Of packed numbers: `data` [n, …], each one's whole panels at the beginning of its part; bias [n, outputs]."""
    assert data.dtype != torch.int8, "int8 matrices need a scale for each output, and these have none"
    added = None if bias is None else padded(bias.detach().float(), 1)
    first = Matrix(data.data_ptr(), None if added is None else added.data_ptr(), None, outputs, inputs, TYPES[data.dtype])
    made = Matrices(first, len(data), data.stride(0))
    made.data, made.bias = data, added
    return made


def padded(weights: Tensor, dim: int) -> Tensor:
    """With zeros up to whole panels along `dim`: itself where there is nothing to add, and it is contiguous."""
    missing = -weights.shape[dim] % PANEL
    shape = [missing if i == dim % weights.dim() else size for i, size in enumerate(weights.shape)]
    return torch.cat([weights, weights.new_zeros(shape)], dim) if missing else weights.contiguous()


def pack_matrices(weights: Tensor, bias: Tensor | None = None) -> Matrices:
    """weights [n, N, K], K even, bias [n, N]; in place where they are contiguous and N is a multiple of 16."""
    data = padded(weights.detach(), 1)
    pack_panels(data)
    return matrices(data, weights.shape[1], weights.shape[2], bias)


def pack_heads(kv_up: Tensor, heads: int, nope: int) -> tuple[Matrices, Matrices]:
    """kv_up [heads * (nope + value), rank], rank and nope even → k_up, from nope numbers to rank, and v_up, from rank to value.

    In place where rank and value are multiples of 16.
    """
    per_head = kv_up.detach().unflatten(0, (heads, -1))
    rank, value = per_head.shape[2], per_head.shape[1] - nope
    if rank % PANEL or value % PANEL:
        return pack_matrices(per_head[:, :nope].mT), pack_matrices(per_head[:, nope:])
    for head in per_head:
        transposed = head[:nope].view(rank, nope)
        transposed.copy_(head[:nope].mT.contiguous())
        pack_panels(transposed)
        pack_panels(head[nope:])
    return matrices(per_head, rank, nope), matrices(per_head[:, nope:], value, rank)


def heads_linear(x: Tensor, by_head: Matrices, out: Tensor | None = None) -> Tensor:
    """x [T, heads, K], each head multiplied by its own matrix → [T, heads, N]; `out`: where it goes, a view of something wider."""
    rows, heads, _ = x.shape
    matrix = by_head.first
    if out is None:
        out = torch.empty(rows, heads, matrix.outputs, dtype=x.dtype)
    assert heads == by_head.number and x.shape[2] == matrix.inputs and x.stride(2) == out.stride(2) == 1, (x.shape, x.stride())
    assert out.shape == (rows, heads, matrix.outputs), out.shape
    _heads_linear(byref(by_head), byref(heads_of(x)), rows, byref(heads_of(out)))
    return out
