"""Attention by the C++ kernels of a CPU. A row's result is its own, to the last bit, whoever shares the pass: see mtpserve_kernels.cpu."""

from __future__ import annotations

from dataclasses import dataclass

from mtpserve_kernels.cpu.attention import Spans, attend, plan
from torch import Tensor

from mtpserve.attention.contexts import LayerContext, contexts, slots_of
from mtpserve.cache.pool import KVPool
from mtpserve.cache.stores import Store, Stores
from mtpserve.core.arch import LayerKind
from mtpserve.core.batch import Batch


class CPUAttention:
    """Keys, values and queries are float32 or bfloat16."""

    graph_safe = False
    exact = True

    def __init__(self, stores: Stores, heads: int, scale: float) -> None:
        self.stores, self.heads, self.scale = stores, heads, scale

    def supports(self, kind: LayerKind) -> bool:
        return kind.kv.key_dim % 2 == 0

    def plan(self, batch: Batch) -> list[LayerContext[CPUSpans]]:
        slots = {group: slots_of(batch, group) for group in self.stores.groups}
        planned = [CPUSpans(store.pool, slots[store.group], self.spans(batch, store)) for store in self.stores.stores]
        return contexts(self.stores, planned)

    def spans(self, batch: Batch, store: Store) -> Spans:
        pool = store.pool
        return plan(
            pool.keys(0), pool.values(0), self.heads, batch.seats.page_tables[store.group], batch.seat_ids, batch.cu_q, batch.kv_len,
            batch.index, batch.tree_bits, batch.tree_start, pool.page_size, self.scale, window=store.kind.window or 0, shift=batch.shift,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class CPUSpans:
    pool: KVPool
    slots: Tensor  # [T], where this step's rows are stored
    spans: Spans

    def attend(self, q: Tensor, layer: int) -> Tensor:
        return attend(q, self.pool.keys(layer), self.pool.values(layer), self.spans)
