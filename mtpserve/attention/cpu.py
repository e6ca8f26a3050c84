"""Attention by the C++ kernels of a CPU. A row's result is its own, to the last bit, whoever shares the pass:
see mtpserve_kernels.cpu.

Attention to selected tokens and to entries has no kernel here: attention/selected and attention/compressed
compute it, row by row as well.
"""

from __future__ import annotations

from dataclasses import dataclass

from mtpserve_kernels.cpu.attention import Spans, attend, layout_of, plan
from torch import Tensor

from mtpserve.attention.compressed import PlannedCompressed, plan_compressed
from mtpserve.attention.contexts import Contexts, slots_of
from mtpserve.attention.selected import ChosenRows, PlannedSelected, plan_selected
from mtpserve.cache.pool import KVPool
from mtpserve.cache.stores import Stores
from mtpserve.core.arch.model import Attention, LayerKind
from mtpserve.core.batch import Batch


class CPUAttention:
    """Keys, values and queries are float32 or bfloat16."""

    graph_safe = False
    exact = True

    def __init__(self, stores: Stores, heads: int, scale: float) -> None:
        self.stores, self.scale, self.groups = stores, scale, stores.groups
        self.layouts = [
            layout_of(
                store.pool.keys(0),
                store.pool.values(0),
                store.kind.heads or heads,
                store.pool.page_size,
                scale,
                store.kind.window or 0,
            )
            for store in stores.stores
        ]

    def supports(self, kind: LayerKind) -> bool:
        return isinstance(kind, Attention) and kind.kv.key_dim % 2 == 0

    def plan(self, batch: Batch) -> Contexts[CPUSpans | PlannedSelected | PlannedCompressed]:
        slots = {group: slots_of(batch, group) for group in self.groups}
        rows = (
            batch.req_indices,
            batch.query_start_loc,
            batch.seq_lens,
            batch.token_indices,
            batch.tree_bits,
            batch.tree_start,
            batch.shift,
        )
        plans, choice = list[CPUSpans | PlannedSelected | PlannedCompressed](), ChosenRows()
        for store, layout in zip(self.stores.stores, self.layouts, strict=True):
            if store.kind.compressed is not None:
                plans.append(plan_compressed(batch, store, self.stores.page_size, self.scale))
            elif store.kind.selected is not None:
                plans.append(plan_selected(batch, store, self.stores.page_size, self.scale, choice))
            else:
                plans.append(
                    CPUSpans(
                        store.pool,
                        slots[store.group],
                        plan(layout, batch.req_tensors.block_tables[store.group], *rows),
                    )
                )
        return Contexts(self.stores, plans)


@dataclass(frozen=True, slots=True)
class CPUSpans:
    pool: KVPool
    slots: Tensor  # [T], where this step's rows are stored
    spans: Spans

    def attend(self, q: Tensor, layer: int, sinks: Tensor | None) -> Tensor:
        return attend(q, self.pool.keys(layer), self.pool.values(layer), self.spans, sinks)
