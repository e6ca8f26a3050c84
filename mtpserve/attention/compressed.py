"""Attention to a window and, in the same softmax, to entries that stand for several tokens each, in plain
torch.

    tokens     0 1 2 3 | 4 5 6 7 | 8 9 10 11 | 12 …     entries of 4 tokens: a row sees those whose
    entries          0 |       1 |         2 |          tokens it has all seen: row 9 sees the entries
                                                        0 and 1, and besides them its window

A row that is the last of an entry's tokens completes it: the layer makes it of what these tokens have left,
before anything attends. If such a row does not count in the end, the row that takes its place makes the entry
anew; until then nobody sees it. A node of a tree sees the entries that nodes on its own path complete: these
have places of their own (cache/stores).

A row's choice and its output depend on that row alone, whoever shares the pass. Slow: keys are read once per
row, and rows are lists on the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from mtpserve.attention.contexts import slots_of
from mtpserve.attention.rows import BLOCK, padded, seen_by_rows
from mtpserve.attention.selected import MAX_TOKENS, ChosenRows, best_of
from mtpserve.attention.selection import Completed
from mtpserve.cache.pool import KVPool
from mtpserve.cache.stores import Store
from mtpserve.core.arch.model import Compressed
from mtpserve.core.batch import Batch


@dataclass(frozen=True, slots=True)
class PlannedCompressed:
    """Called for all rows, or through `slice_rows` for some that follow one another."""

    pool: KVPool
    entries: KVPool
    slots: Tensor  # [T], where the rows are stored
    window: list[Tensor]  # by row: the slots of its window, in the order of positions
    visible_entries: list[Tensor]  # by row: the entries that it may see
    completed: Completed
    by: list[int]  # the rows that complete them
    best: int | None  # how many entries are selected; None: all
    scale: float
    choice: ChosenRows

    def slice_rows(self, start: int, stop: int, rows: int) -> PlannedCompressed:
        """Padded to `rows` rows with copies of the first, which store the same numbers in the same slot."""
        slots = self.slots[start:stop]
        slots = torch.cat([slots, slots[:1].expand(rows - len(slots))])
        indices = [i for i, row in enumerate(self.by) if start <= row < stop]
        completed, by = (
            Completed(*(tensor[indices] for tensor in self.completed)),
            [self.by[i] - start for i in indices],
        )
        window, visible_entries = self.window[start:stop], self.visible_entries[start:stop]
        return PlannedCompressed(
            self.pool,
            self.entries,
            slots,
            window,
            visible_entries,
            completed,
            by,
            self.best,
            self.scale,
            self.choice,
        )

    def select(self, q: Tensor, weights: Tensor, layer: int) -> None:
        assert self.best is not None
        self.choice.slots = best_of(self.visible_entries, self.best, self.entries, layer, q, weights)

    def attend(self, q: Tensor, layer: int, sinks: Tensor | None) -> Tensor:
        """q [T, heads, key_dim]; one latent row is key and value of all heads."""
        attended, out = self.visible_entries if self.best is None else self.choice.slots, torch.empty_like(q)
        for rows in self.alike(attended):
            sides = [
                self.side(pool, layer, [slots_by_row[row] for row in rows])
                for pool, slots_by_row in ((self.pool, self.window), (self.entries, attended))
            ]
            keys, beyond = (torch.cat(parts, 1) for parts in zip(*sides, strict=True))
            scores = (
                torch.bmm(q[rows] * self.scale, keys.mT).float().masked_fill_(beyond.unsqueeze(1), -torch.inf)
            )
            if sinks is not None:
                scores = torch.cat([scores, sinks.view(1, -1, 1).expand(len(rows), -1, -1)], -1)
            weights = scores.softmax(-1)[..., : keys.shape[1]].to(keys.dtype).contiguous()
            out[rows] = torch.bmm(weights, keys)
        out[len(self.visible_entries) :] = out[0]
        return out

    def alike(self, attended: list[Tensor]) -> Iterator[list[int]]:
        """Rows with equal padded lengths, as many as see MAX_TOKENS columns, but at least one."""
        by_length: dict[tuple[int, int], list[int]] = {}
        for row, slot_lists in enumerate(zip(self.window, attended, strict=True)):
            tokens, entries = (-(-len(slots) // BLOCK) for slots in slot_lists)
            by_length.setdefault((tokens, entries), []).append(row)
        for blocks, members in by_length.items():
            chunk_size = max(1, MAX_TOKENS // (sum(blocks) * BLOCK))
            yield from (members[first : first + chunk_size] for first in range(0, len(members), chunk_size))

    def side(self, pool: KVPool, layer: int, slots_by_row: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Slots of rows, padded alike → their latent rows [n, length, dim], and which of them do not count
        [n, length]"""
        slots = torch.stack([padded(row_slots) for row_slots in slots_by_row])
        counts = torch.tensor([[len(row_slots)] for row_slots in slots_by_row], device=slots.device)
        return pool.gathered(layer, slots)[0].squeeze(2), torch.arange(
            slots.shape[1], device=slots.device
        ) >= counts


def plan_compressed(batch: Batch, store: Store, page_size: int, scale: float) -> PlannedCompressed:
    kind, compressed = store.kind, store.kind.compressed
    assert compressed is not None and store.entries is not None and kind.window is not None
    paths = seen_by_rows(batch, page_size, store.group)
    entries, places = entries_of_rows(batch, page_size, store, compressed.every)
    completed = completed_by(
        [paths[row] for row in places], list(places.values()), compressed, batch.token_indices.device
    )
    window = [path[-kind.window :] for path in paths]
    best = None if compressed.selected is None else compressed.selected.best
    return PlannedCompressed(
        store.pool,
        store.entries,
        slots_of(batch, store.group),
        window,
        entries,
        completed,
        list(places),
        best,
        scale,
        ChosenRows(),
    )


def entries_of_rows(
    batch: Batch, page_size: int, store: Store, every: int
) -> tuple[list[Tensor], dict[int, int]]:
    """Returns for each row the places of the entries that it may see, in order; and the rows that complete an
    entry, with its place."""
    entries, places = list[Tensor](), dict[int, int]()
    ends = batch.query_start_loc.tolist()
    lengths = batch.seq_lens.tolist()
    index = batch.token_indices.tolist()
    slots = batch.slot_mapping.tolist()
    bits = None if batch.tree_bits is None else batch.tree_bits.tolist()
    for r, req_idx in enumerate(batch.req_indices.tolist()):
        # the last ones of entries
        tokens = torch.arange(lengths[r] // every, device=batch.token_indices.device) * every + every - 1
        request_entries = (
            batch.req_tensors.block_tables[0][req_idx, tokens // page_size] * page_size + tokens % page_size
        ) // every
        root = ends[r] if batch.tree_start is None else int(batch.tree_start[r]) - index[ends[r]] + ends[r]
        for row in range(ends[r], ends[r + 1]):
            if bits is None or bits[row] == -1:
                entries.append(request_entries[: (index[row] + 1) // every])
                # Rows beyond what counts complete nothing.
                if (index[row] + 1) % every == 0 and index[row] < lengths[r]:
                    places[row] = slots[row] // every
                continue
            path = [node for node in range(1, 64) if bits[row] >> node & 1]
            node_entries = [
                store.of_node(req_idx, node)
                for depth, node in enumerate(path, 1)
                if (index[root] + depth + 1) % every == 0
            ]
            if index[row] >= lengths[r]:
                node_entries = []
            elif (index[root] + len(path) + 1) % every == 0:
                places[row] = node_entries[-1]
            entries.append(
                torch.cat(
                    [
                        request_entries[: (index[root] + 1) // every],
                        torch.tensor(node_entries, dtype=torch.int64, device=request_entries.device),
                    ]
                )
            )
    return entries, places


def completed_by(
    paths: list[Tensor], places: list[int], compressed: Compressed, device: torch.device
) -> Completed:
    """paths: of the rows that complete entries, places: of these."""
    missing = [max(compressed.span - len(path), 0) for path in paths]
    slots = [
        torch.cat([path[:1].expand(number), path[-compressed.span :]])
        for number, path in zip(missing, paths, strict=True)
    ]
    tokens = (
        torch.stack(slots) if slots else torch.zeros(0, compressed.span, dtype=torch.int64, device=device)
    )
    there = torch.arange(compressed.span, device=device) >= torch.tensor(
        missing, dtype=torch.int64, device=device
    ).unsqueeze(1)
    positions = torch.tensor(
        [len(path) - compressed.every for path in paths], dtype=torch.int64, device=device
    )
    return Completed(tokens, there, torch.tensor(places, dtype=torch.int64, device=device), positions)
