"""Attention to selected tokens by the Triton kernels: the slots of a row's tokens are a page table of its
own, with pages of one token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from mtpserve_kernels.attention.select import select, selected_mla
from torch import Tensor

from mtpserve.cache.pool import KVPool
from mtpserve.core.batch import Batch


@dataclass(frozen=True, slots=True)
class RowsSeen:
    """What each row of a batch sees, as mtpserve_kernels.attention.select describes it; each [T] int64."""

    ends: Tensor
    starts: Tensor | None

    @staticmethod
    def of(batch: Batch) -> RowsSeen:
        span = torch.searchsorted(
            batch.query_start_loc[1:],
            torch.arange(len(batch.input_ids), device=batch.input_ids.device),
            right=True,
        )
        starts = None if batch.tree_start is None else batch.tree_start[span]
        return RowsSeen(torch.minimum(batch.token_indices + 1, batch.seq_lens[span]), starts)


@dataclass(slots=True)
class ChosenSlots:
    """The selection of the last layer that selects, in one pass. The layers run one after the other."""

    slots: Tensor | None = None  # [T, best]
    counts: Tensor | None = None  # [T]


@dataclass(frozen=True, slots=True)
class SelectedSpans:
    """The latent layout. `choice` is one for all stores of a batch."""

    pool: KVPool
    batch: Batch
    slots: Tensor  # [T]
    block_table: Tensor  # [seats, columns]
    scale: float
    best: int
    visible_ranges: RowsSeen
    choice: ChosenSlots

    def select(self, q: Tensor, weights: Tensor, layer: int) -> None:
        batch, visible_ranges, keys = self.batch, self.visible_ranges, self.pool.index_keys(layer)
        where = (
            self.block_table,
            batch.token_req_indices,
            visible_ranges.ends,
            batch.tree_bits,
            visible_ranges.starts,
        )
        self.choice.slots, self.choice.counts = select(
            q.contiguous(),
            weights.contiguous(),
            keys.rows,
            *where,
            self.pool.page_size,
            self.best,
            scales=keys.scales,
            shift=batch.shift,
        )

    def attend(self, q: Tensor, layer: int, sinks: Tensor | None) -> Tensor:
        assert sinks is None, "no published model has sinks where tokens are selected"
        slots, counts, pool = self.choice.slots, self.choice.counts, self.pool
        assert slots is not None and counts is not None
        return selected_mla(
            q.contiguous(), pool.keys(layer), slots, counts, self.scale, pool.layout.value_dim
        )
