"""Attention to selected tokens, in plain torch: a row scores the tokens that it sees by their index keys, and
attends to the best alone.

    score = sum over the index heads of  weight * relu(q · key)

The formula is DeepSeek-V3.2's, https://arxiv.org/abs/2512.02556 §2.1.

The earlier token wins if scores are equal. A row's choice and its output depend on that row alone, whoever
shares the pass, and on the order of the positions, not on where a tree has its ancestors. Slow: keys are read
once per row, and rows are lists on the host.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from mtpserve.attention.contexts import slots_of
from mtpserve.attention.rows import alike, seen_by_rows
from mtpserve.cache.pool import KVPool
from mtpserve.cache.stores import Store
from mtpserve.core.batch import Batch

MAX_TOKENS = 1 << 14  # whose keys are copied side by side at a time


@dataclass(slots=True)
class ChosenRows:
    """The selection of the last layer that selects, in one pass. The layers run one after the other."""

    slots: list[Tensor] = field(default_factory=list)  # by row, in the order of positions


@dataclass(frozen=True, slots=True)
class PlannedSelected:
    """Called for all rows, or through `slice_rows` for some that follow one another."""

    pool: KVPool
    slots: Tensor  # [T], where the rows are stored
    visible_slots: list[Tensor]  # by row: the slots that it may see
    best: int
    scale: float
    choice: ChosenRows

    def slice_rows(self, start: int, stop: int, rows: int) -> PlannedSelected:
        """Padded to `rows` rows with copies of the first, which store the same numbers in the same slot."""
        slots = self.slots[start:stop]
        slots = torch.cat([slots, slots[:1].expand(rows - len(slots))])
        return PlannedSelected(
            self.pool, slots, self.visible_slots[start:stop], self.best, self.scale, self.choice
        )

    def select(self, q: Tensor, weights: Tensor, layer: int) -> None:
        self.choice.slots = best_of(self.visible_slots, self.best, self.pool, layer, q, weights)

    def attend(self, q: Tensor, layer: int, sinks: Tensor | None) -> Tensor:
        assert sinks is None, "no published model has sinks where tokens are selected"
        heads, value_dim = self.pool.layout.heads, self.pool.layout.value_dim
        out = q.new_empty(q.shape[0], q.shape[1], value_dim)
        for rows, slots, counts in alike(self.choice.slots, range(len(self.visible_slots)), MAX_TOKENS):
            # [n * heads, length, dim]
            keys, values = (kv.transpose(1, 2).flatten(0, 1) for kv in self.pool.gathered(layer, slots))
            scores = torch.bmm(q[rows].unflatten(1, (heads, -1)).flatten(0, 1) * self.scale, keys.mT)
            beyond = torch.arange(slots.shape[1], device=slots.device) >= counts.repeat_interleave(heads, 0)
            scores.masked_fill_(beyond.unsqueeze(1), -torch.inf)
            attended = torch.bmm(scores.softmax(-1, dtype=torch.float32).to(values.dtype), values)
            out[rows] = attended.unflatten(0, (len(rows), heads)).flatten(1, 2)
        out[len(self.visible_slots) :] = out[0]
        return out


def best_of(
    visible_slots: list[Tensor], best: int, pool: KVPool, layer: int, q: Tensor, weights: Tensor
) -> list[Tensor]:
    """visible_slots: of each row slots of the pool; q [T, heads, dim], weights [T, heads] → of each row
    the `best` of them by their index keys, in the same order."""
    best_slots, keys = list(visible_slots), pool.index_keys(layer)
    scored = [row for row, slots in enumerate(visible_slots) if len(slots) > best]
    for rows, slots, counts in alike(visible_slots, scored, MAX_TOKENS):
        there = keys.at(slots)  # [n, length, dim]
        scores = torch.bmm(weights[rows].unsqueeze(1), torch.bmm(q[rows].float(), there.mT).relu_()).squeeze(
            1
        )
        scores.masked_fill_(torch.arange(slots.shape[1], device=slots.device) >= counts, -torch.inf)
        places = scores.sort(dim=-1, descending=True, stable=True).indices[:, :best].sort(-1).values
        for row, picked in zip(rows, slots.gather(1, places), strict=True):
            best_slots[row] = picked
    return best_slots


def plan_selected(
    batch: Batch, store: Store, page_size: int, scale: float, choice: ChosenRows
) -> PlannedSelected:
    """`choice`: one for all stores of a batch."""
    selected = store.kind.selected
    assert selected is not None
    visible_slots = seen_by_rows(batch, page_size, store.group)
    return PlannedSelected(
        store.pool, slots_of(batch, store.group), visible_slots, selected.best, scale, choice
    )
