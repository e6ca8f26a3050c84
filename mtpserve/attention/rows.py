"""What each row of a batch sees, as lists of slots on the host: for attention that computes rows one by
one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mtpserve.core.batch import Batch

BLOCK = 64  # keys; fewer shapes, and so fewer ways for a library to add up


def seen_by_rows(batch: Batch, page_size: int, group: int) -> list[Tensor]:
    """Returns for each row the slots of the tokens that it sees, in the order of positions: all up to it, of
    a tree those on its path. A row that would see nothing sees the first token: it stands before all rows
    that count."""
    ends = batch.query_start_loc.tolist()
    lengths = batch.seq_lens.tolist()
    seats = batch.req_indices.tolist()
    index = batch.token_indices.tolist()
    bits = None if batch.tree_bits is None else batch.tree_bits.tolist()
    starts = None if batch.tree_start is None else batch.tree_start.tolist()
    visible_slots: list[Tensor] = []
    for r, req_idx in enumerate(seats):
        pages = batch.req_tensors.block_tables[group][req_idx, : -(-(lengths[r] + batch.shift) // page_size)]
        slots = (pages.unsqueeze(1) * page_size + torch.arange(page_size, device=pages.device)).flatten()[
            batch.shift :
        ]
        for row in range(ends[r], ends[r + 1]):
            if bits is None or starts is None or bits[row] == -1:
                visible_slots.append(slots[: max(index[row], 0) + 1])
            else:
                nodes = [node for node in range(64) if bits[row] >> node & 1]
                on_path = torch.tensor(nodes, device=slots.device) + starts[r]
                visible_slots.append(
                    torch.cat([slots[: starts[r]], slots[on_path]]) if starts[r] or nodes else slots[:1]
                )
    return visible_slots


def padded(slots: Tensor) -> Tensor:
    """Pads to whole blocks, with the first slot, which was written: zero weight times what an unwritten one
    may hold can be NaN."""
    missing = -len(slots) % BLOCK
    return torch.cat([slots, slots[:1].expand(missing)])


def alike(
    visible_slots: Sequence[Tensor], rows: Sequence[int], max_tokens: int
) -> Iterator[tuple[list[int], Tensor, Tensor]]:
    """Some of the rows, those with equal padded lengths together, as many as see `max_tokens`, but at least
    one → their numbers, padded slots [n, length], and how many of these count [n, 1]."""
    by_length: dict[int, list[int]] = {}
    for row in rows:
        by_length.setdefault(-(-len(visible_slots[row]) // BLOCK), []).append(row)
    for blocks, members in by_length.items():
        chunk_size = max(1, max_tokens // (blocks * BLOCK))
        for first in range(0, len(members), chunk_size):
            some = members[first : first + chunk_size]
            counts = torch.tensor([[len(visible_slots[row])] for row in some], device=visible_slots[0].device)
            yield some, torch.stack([padded(visible_slots[row]) for row in some]), counts
