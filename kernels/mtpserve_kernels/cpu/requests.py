"""The seats of a step's requests, for a CPU: src/seats.cpp. The same bits as mtpserve_kernels.requests.reference, each in one call."""

from __future__ import annotations

from ctypes import POINTER, Structure, byref, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from mtpserve_kernels.cpu.library import Op
from mtpserve_kernels.requests.reference import PlacedRows, RequestTable


class Addresses(Structure):
    _fields_ = [
        ("tokens", c_void_p), ("length", c_void_p), ("computed", c_void_p), ("limit", c_void_p), ("waiting", c_void_p), ("stops", c_void_p),
        ("block_table", c_void_p), ("done", c_void_p),
        ("width", c_int64), ("most_stops", c_int64), ("page_table_stride", c_int64), ("columns", c_int64), ("page_size", c_int64),
    ]  # fmt: skip


_slots = Op("mtp_slots", c_void_p, *[c_int64] * 3, c_void_p, c_void_p, c_int64, c_void_p)
_place = Op("mtp_place", POINTER(Addresses), *[c_void_p] * 5, c_int64, c_int64, c_void_p)
_following = Op("mtp_following", POINTER(Addresses), *[c_void_p] * 2, c_int64, c_void_p)
_hold = Op("mtp_hold", POINTER(Addresses), *[c_void_p] * 3, c_int64, c_int64, *[c_void_p, c_int64] * 2)
_advance = Op("mtp_advance", POINTER(Addresses), *[c_void_p] * 6, c_int64, c_int64)


def addresses(table: RequestTable) -> Any:
    if table.addresses is None:
        length, computed, _, limit, waiting = table.counts.unbind(0)
        given = table.tokens, length, computed, limit, waiting, table.stops, table.block_table
        assert all(part.dtype == torch.int64 and part.stride(-1) == 1 for part in given) and table.done.dtype == torch.bool
        assert all(part.is_contiguous() for part in (table.tokens, table.stops, table.done))
        block_table = table.block_table
        table.addresses = Addresses(
            *[part.data_ptr() for part in given], table.done.data_ptr(), table.tokens.shape[1], table.stops.shape[1], block_table.stride(0),
            block_table.shape[1], table.page_size,
        )  # fmt: skip
    return byref(table.addresses)


def slots(block_table: Tensor, seats: Tensor, index: Tensor, page_size: int) -> Tensor:
    """block_table [seats, columns], seats and index [n]: int64; index -1 is in the page of the last column, as in torch."""
    assert block_table.stride(1) == 1 and block_table.dtype == torch.int64, (block_table.stride(), block_table.dtype)
    number, index = index.shape[0], index.contiguous()
    out = torch.empty(number, dtype=torch.int64)
    _slots(block_table, block_table.stride(0), block_table.shape[1], page_size, seats.contiguous(), index, number, out)
    return out


def place(
    table: RequestTable, req_indices: Tensor, row_span: Tensor, offset: Tensor, query_start_loc: Tensor, drafts: Tensor, samples: Tensor, *,
    start: Tensor | None = None,
) -> PlacedRows:  # fmt: skip
    """All are contiguous int64. `row_span` and `offset` are not read: each request's rows follow one another, from 0 on."""
    rows, requests = row_span.shape[0], req_indices.shape[0]
    out = torch.empty(4 * rows + 3 * requests, dtype=torch.int64)
    _place(addresses(table), req_indices, query_start_loc, start, drafts, samples, requests, rows, out)
    placed: PlacedRows = out.split([rows] * 4 + [requests] * 3)
    return placed


def following(table: RequestTable, token_req_indices: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Both are contiguous int64."""
    out = torch.empty(3, index.shape[0], dtype=torch.int64)
    _following(addresses(table), token_req_indices, index, index.shape[0], out)
    ids, after, where = out.unbind()
    return ids, after, where


def hold(table: RequestTable, req_indices: Tensor, tokens: Tensor, count: Tensor, drawn: tuple[Tensor, Tensor] | None = None) -> None:
    """req_indices is contiguous; all but `drawn`, which is contiguous float32, are int64."""
    probs, kept, numbers, stride = None, None, 0, 0
    if drawn is not None:
        probs, kept = drawn
        assert probs.is_contiguous() and kept.is_contiguous() and probs.dtype == kept.dtype == torch.float32
        assert len(probs) == len(tokens) and probs.shape[2] == kept.shape[2] and probs.shape[1] <= kept.shape[1], (probs.shape, kept.shape)
        numbers, stride = probs.shape[1] * probs.shape[2], kept.stride(0)
    _hold(addresses(table), req_indices, tokens.contiguous(), count.contiguous(), *tokens.shape, probs, numbers, kept, stride)


def advance(
    table: RequestTable, req_indices: Tensor, query_start_loc: Tensor, last_row: Tensor, samples: Tensor, accepted: Tensor, tokens: Tensor
) -> None:
    """All are contiguous int64, but for the tokens."""
    _advance(addresses(table), req_indices, query_start_loc, last_row, samples, accepted, tokens.contiguous(), *tokens.shape)
