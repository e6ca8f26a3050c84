"""What the cache kernels do, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def compact(pool: Tensor, source: Tensor, target: Tensor) -> None:
    """pool [layers, slots, heads, dim]; source, target [R, D] int64: in every layer slot target[r, j] becomes what source[r, j] was.

    A request's targets are distinct and its own; a pair of equal slots, or of negative ones, moves nothing.
    """
    moved = (source != target) & (source >= 0)
    pool[:, target[moved]] = pool[:, source[moved]]


def slots(block_table: Tensor, seats: Tensor, index: Tensor, page_size: int) -> Tensor:
    """block_table [seats, columns]; seats and index [n], token `index` of a request → [n], its slot in the pool."""
    page: Tensor = block_table[seats, index // page_size]
    return page * page_size + index % page_size


def kept_at(room: int, seats: Tensor, index: Tensor) -> Tensor:
    """Where `keep` has a row. seats and index [n] → [n]"""
    return torch.add(index % room, seats, alpha=room)


def keep(rows: Tensor, room: int, seats: Tensor, index: Tensor, hidden: Tensor) -> None:
    """rows [seats * room, width], seats and index [n], hidden [n, width]: each seat has the last `room` of the rows that come for it, by
    their index modulo `room`."""
    rows.index_copy_(0, kept_at(room, seats, index), hidden)


def store_boundary(rows: Tensor, slots: Tensor, hidden: Tensor, page_size: int) -> None:
    """rows [pages, width], slots [T], hidden [T, width]: rows[page] becomes the hidden row whose slot is the page's last. No two rows
    have the same such slot, but for the last page, which pads batches: its row may be anything."""
    inside = ((slots + 1) % page_size).bool()
    rows[(slots // page_size).masked_fill(inside, len(rows) - 1)] = hidden
