"""Work on the KV pool itself, for a CPU: src/cache.cpp. Each has the contract of its namesake in mtpserve_kernels.cache.reference."""

from __future__ import annotations

from ctypes import c_int64, c_void_p

from torch import Tensor

from mtpserve_kernels.cpu.library import Op

_compact = Op("mtp_compact", c_void_p, c_int64, c_int64, c_int64, c_int64, c_void_p, c_void_p, c_int64, c_int64)
_keep = Op("mtp_keep", c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_void_p, c_int64)
_store_boundary = Op("mtp_store_boundary", c_void_p, c_int64, c_int64, c_void_p, c_void_p, c_int64, c_int64)


def compact(pool: Tensor, source: Tensor, target: Tensor) -> None:
    """pool [layers, slots, heads, dim] of any type; source, target [R, D] int64. A request's targets may be sources of its other moves."""
    layers, _, heads, dim = pool.shape
    assert pool.stride(3) == 1 and pool.stride(2) == dim and source.shape == target.shape, (pool.stride(), source.shape, target.shape)
    size = pool.element_size()
    _compact(
        pool, layers, pool.stride(0) * size, pool.stride(1) * size, heads * dim * size, source.contiguous(), target.contiguous(),
        *source.shape,
    )  # fmt: skip


def keep(rows: Tensor, room: int, seats: Tensor, index: Tensor, hidden: Tensor) -> None:
    """rows [seats * room, width] and hidden [n, width] of one type, contiguous; seats and index [n] int64, at least 0."""
    number, width = hidden.shape
    assert rows.is_contiguous() and hidden.is_contiguous() and width == rows.shape[1] and hidden.dtype == rows.dtype
    assert seats.shape == index.shape == (number,), (seats.shape, index.shape, number)
    _keep(rows, room, width * rows.element_size(), seats.contiguous(), index.contiguous(), hidden, number)


def store_boundary(rows: Tensor, slots: Tensor, hidden: Tensor, page_size: int) -> None:
    """rows [pages, width], slots [T] int64, hidden [T, width] of the same type; both contiguous. The last page's row stays as it is."""
    assert rows.is_contiguous() and hidden.is_contiguous() and hidden.shape == (len(slots), rows.shape[1]) and hidden.dtype == rows.dtype
    _store_boundary(rows, len(rows), rows.shape[1] * rows.element_size(), slots.contiguous(), hidden, len(slots), page_size)
