"""Low-rank adapters of linear layers: src/lora.cpp. What is computed, in plain torch: lora/reference.py."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import POINTER, Structure, byref, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from mtpserve_kernels.cpu.library import Op
from mtpserve_kernels.cpu.linear import TYPES
from mtpserve_kernels.lora.reference import RowAdapters, check


class AddLora(Structure):
    """src/lora.cpp"""

    _fields_ = [
        ("x", c_void_p), ("stride", c_int64), ("type", c_int32), ("y", c_void_p), ("y_type", c_int32), ("slots", c_void_p),
        ("order", c_void_p), ("a", c_void_p), ("b", c_void_p), ("ends", c_void_p), ("low", c_void_p), ("rows", c_int64),
        ("inputs", c_int64), ("outputs", c_int64), ("rank", c_int64), ("parts", c_int64),
    ]  # fmt: skip


_add_lora = Op("mtp_add_lora", POINTER(AddLora))


def add_lora(x: Tensor, y: Tensor, adapters: RowAdapters, a: Tensor, b: Tensor, parts: Sequence[int]) -> Tensor:
    """As the reference. A row's numbers depend on that row and its adapter alone."""
    rank = check(x, y, a, b, parts)
    slots, order = adapters
    assert a.is_contiguous() and b.is_contiguous() and slots.is_contiguous() and order.is_contiguous()
    ends, low = torch.tensor(parts).cumsum(0), torch.empty(len(x), a.shape[1])
    op = AddLora(
        x.data_ptr(), x.stride(0), TYPES[x.dtype], y.data_ptr(), TYPES[y.dtype], slots.data_ptr(), order.data_ptr(), a.data_ptr(),
        b.data_ptr(), ends.data_ptr(), low.data_ptr(), *x.shape, y.shape[1], rank, len(parts),
    )  # fmt: skip
    _add_lora(byref(op))
    return y
