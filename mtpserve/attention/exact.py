"""Attention whose result for a row depends on that row alone, to the last bit: not on who shares the pass,
nor on where its keys are.

Every row gathers what it sees in the order of the positions, so that a node of a tree, whose ancestors are
scattered, adds up the same numbers in the same order as the same token in plain decoding. Lengths are padded
to whole blocks, and only rows of equal length share a product, which does not change what each of them gets.
Slow: keys are read once per row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor

from mtpserve.attention.compressed import PlannedCompressed, plan_compressed
from mtpserve.attention.contexts import Contexts, LayerContext, slots_of
from mtpserve.attention.recurrent import NoContext, RowByRow, StateContext
from mtpserve.attention.reference import attend
from mtpserve.attention.rows import padded, seen_by_rows
from mtpserve.attention.selected import ChosenRows, PlannedSelected, plan_selected
from mtpserve.cache.pool import KVPool
from mtpserve.cache.stores import Stores
from mtpserve.core.arch.model import Attention, LayerKind
from mtpserve.core.batch import Batch
from mtpserve.core.protocols.attention import Context


class ExactAttention:
    graph_safe = False
    exact = True

    def __init__(self, stores: Stores, heads: int, scale: float) -> None:
        self.stores, self.heads, self.scale = stores, heads, scale

    def supports(self, kind: LayerKind) -> bool:
        return isinstance(kind, Attention)

    def plan(self, batch: Batch) -> Contexts[PlannedExact | PlannedSelected | PlannedCompressed]:
        plans, choice = list[PlannedExact | PlannedSelected | PlannedCompressed](), ChosenRows()
        for store in self.stores.stores:
            kind, pool, group = store.kind, store.pool, store.group
            if kind.compressed is not None:
                plans.append(plan_compressed(batch, store, self.stores.page_size, self.scale))
                continue
            if kind.selected is not None:
                plans.append(plan_selected(batch, store, self.stores.page_size, self.scale, choice))
                continue
            rows = seen_by_rows(batch, self.stores.page_size, group)
            if kind.window is not None:
                # The last `window` places of a path are the window: positions go up by one along it.
                rows = [slots[-kind.window :] for slots in rows]
            lengths = [len(slots) for slots in rows]
            plans.append(
                PlannedExact(
                    pool, slots_of(batch, group), [padded(slots) for slots in rows], lengths, self.scale
                )
            )
        return Contexts(self.stores, plans)


@dataclass(frozen=True, slots=True)
class PlannedExact:
    """Called for all rows, or through `slice_rows` for some that follow one another."""

    pool: KVPool
    slots: Tensor  # [T], where the rows are stored
    visible_slots: list[Tensor]  # per row the slots that it sees, padded
    lengths: list[int]  # how many of them count
    scale: float

    def slice_rows(self, start: int, stop: int, rows: int) -> PlannedExact:
        """Padded to `rows` rows with copies of the first, which store the same numbers in the same slot."""
        slots = self.slots[start:stop]
        slots = torch.cat([slots, slots[:1].expand(rows - len(slots))])
        return PlannedExact(
            self.pool, slots, self.visible_slots[start:stop], self.lengths[start:stop], self.scale
        )

    def attend(self, q: Tensor, layer: int, sinks: Tensor | None) -> Tensor:
        heads, value_dim = self.pool.layout.heads, self.pool.layout.value_dim
        out = q.new_empty(q.shape[0], q.shape[1], value_dim)
        by_length: dict[int, list[int]] = {}
        for row, slots in enumerate(self.visible_slots):
            by_length.setdefault(len(slots), []).append(row)
        for n, members in by_length.items():
            slots = torch.stack([self.visible_slots[row] for row in members])
            keys, values = (kv.transpose(1, 2).flatten(0, 1) for kv in self.pool.gathered(layer, slots))
            counts = torch.tensor([self.lengths[row] for row in members], device=q.device).repeat_interleave(
                heads
            )
            mask = torch.zeros(len(counts), 1, n, dtype=q.dtype, device=q.device)
            mask.masked_fill_(torch.arange(n, device=q.device) >= counts[:, None, None], -torch.inf)
            grouped = q[members].unflatten(1, (heads, -1)).flatten(0, 1)  # [members * heads, group, key_dim]
            beside = (
                None
                if sinks is None
                else sinks.view(1, heads, -1, 1).expand(len(members), -1, -1, -1).flatten(0, 1)
            )
            attended = attend(
                grouped, keys, values, mask.expand(-1, grouped.shape[1], -1), self.scale, beside
            )
            out[members] = attended.unflatten(0, (len(members), heads)).flatten(1, 2)
        out[len(self.visible_slots) :] = out[0]
        return out


def part_of(contexts: Sequence[Context], start: int, stop: int, rows: int) -> list[Context]:
    """The contexts of rows start … stop-1 alone, padded to `rows` rows. `contexts` are ExactAttention's."""
    cut: dict[int, PlannedExact | PlannedSelected | PlannedCompressed] = {}
    parts = list[Context]()
    for context in contexts:
        if isinstance(context, StateContext | NoContext):
            parts.append(
                cast(
                    Context,
                    RowByRow(context, start, stop, rows) if isinstance(context, StateContext) else context,
                )
            )
            continue
        layer_context = cast("LayerContext[PlannedExact | PlannedSelected | PlannedCompressed]", context)
        if id(layer_context.batch_attention) not in cut:
            cut[id(layer_context.batch_attention)] = layer_context.batch_attention.slice_rows(
                start, stop, rows
            )
        parts.append(LayerContext(cut[id(layer_context.batch_attention)], layer_context.layer))
    return parts
