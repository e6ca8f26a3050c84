"""Attention whose result for a row depends on that row alone, to the last bit: not on who shares the pass, nor on where its keys lie.

Every row gathers what it sees in the order of the positions, so that a node of a tree, whose ancestors lie scattered, adds up the same
numbers in the same order as the same token in plain decoding. Lengths are padded to whole blocks, and only rows of equal length share
a product, which does not change what each of them gets. Slow: keys are read once per row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mtpserve.attention.reference import attend
from mtpserve.cache.pool import KVPool
from mtpserve.core.arch import KVLayout
from mtpserve.core.batch import Batch

BLOCK = 64  # keys; fewer shapes, and so fewer ways for a library to add up


class ExactAttention:
    graph_safe = False

    def __init__(self, pool: KVPool, heads: int, scale: float) -> None:
        self.pool, self.heads, self.scale = pool, heads, scale

    def supports(self, layout: KVLayout, device: str) -> bool:
        return True

    def plan(self, batch: Batch) -> PlannedExact:
        page_size, pool = self.pool.page_size, self.pool
        ends, lengths, seats, index = batch.cu_q.tolist(), batch.kv_len.tolist(), batch.seat_ids.tolist(), batch.index.tolist()
        bits = None if batch.tree_bits is None else batch.tree_bits.tolist()
        starts = None if batch.tree_start is None else batch.tree_start.tolist()
        seen: list[Tensor] = []
        for r, seat in enumerate(seats):
            pages = batch.seats.page_table[seat, : -(-lengths[r] // page_size)]
            slots = (pages.unsqueeze(1) * page_size + torch.arange(page_size, device=pages.device)).flatten()
            for row in range(ends[r], ends[r + 1]):
                if bits is None or starts is None or bits[row] == -1:
                    seen.append(slots[: index[row] + 1])
                else:
                    nodes = [node for node in range(64) if bits[row] >> node & 1]
                    on_path = torch.tensor(nodes, device=slots.device) + starts[r]
                    seen.append(torch.cat([slots[: starts[r]], slots[on_path]]))
        return PlannedExact(self, batch.slots, [padded(slots) for slots in seen], [len(slots) for slots in seen], pool)


def padded(slots: Tensor) -> Tensor:
    """To whole blocks, with the first slot, which was written: zero weight times what an unwritten one may hold can be NaN."""
    missing = -len(slots) % BLOCK
    return torch.cat([slots, slots[:1].expand(missing)])


@dataclass(frozen=True, slots=True)
class PlannedExact:
    """Called for all rows, or through `part` for some that stand together."""

    backend: ExactAttention
    slots: Tensor  # [T], where the rows are stored
    seen: list[Tensor]  # per row the slots that it sees, padded
    lengths: list[int]  # how many of them count
    pool: KVPool

    def part(self, start: int, stop: int) -> PlannedExact:
        return PlannedExact(self.backend, self.slots[start:stop], self.seen[start:stop], self.lengths[start:stop], self.pool)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor | None, layer: int) -> Tensor:
        """q, k, v may have more rows than were planned: those behind are padding, and get zeros."""
        rows, pool = len(self.seen), self.pool
        pool.store(layer, self.slots, k[:rows], None if v is None else v[:rows])
        heads, value_dim = pool.layout.heads, pool.layout.value_dim
        out = q.new_zeros(q.shape[0], q.shape[1], value_dim)
        by_length: dict[int, list[int]] = {}
        for row, slots in enumerate(self.seen):
            by_length.setdefault(len(slots), []).append(row)
        for n, members in by_length.items():
            slots = torch.stack([self.seen[row] for row in members])
            keys, values = (part.transpose(1, 2).flatten(0, 1) for part in pool.gathered(layer, slots))
            counts = torch.tensor([self.lengths[row] for row in members], device=q.device).repeat_interleave(heads)
            mask = torch.zeros(len(counts), 1, n, dtype=q.dtype, device=q.device)
            mask.masked_fill_(torch.arange(n, device=q.device) >= counts[:, None, None], -torch.inf)
            grouped = q[members].unflatten(1, (heads, -1)).flatten(0, 1)  # [members * heads, group, key_dim]
            found = attend(grouped, keys, values, mask.expand(-1, grouped.shape[1], -1), self.backend.scale)
            out[members] = found.unflatten(0, (len(members), heads)).flatten(1, 2)
        return out
