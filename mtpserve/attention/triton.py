"""Attention by the Triton kernels: nothing is read on the host, so that a step with it can be captured."""

from __future__ import annotations

from dataclasses import dataclass

from mtpserve_kernels.attention.span import span_gqa, span_mla
from torch import Tensor

from mtpserve.cache.pool import KVPool
from mtpserve.core.arch import KVLayout
from mtpserve.core.batch import Batch


class TritonAttention:
    graph_safe = True

    def __init__(self, pool: KVPool, heads: int, scale: float) -> None:
        self.pool, self.scale = pool, scale

    def supports(self, layout: KVLayout, device: str) -> bool:
        return layout.key_dim <= (576 if layout.kind == "mla" else 256)

    def plan(self, batch: Batch) -> PlannedSpans:
        rows, spans = len(batch.ids), len(batch.seat_ids)
        # It only chooses tiles. Without prompt chunks all spans are this wide; otherwise one of them may have all that is left.
        uniform = batch.sample_rows.shape[1]
        width = uniform if rows <= spans * uniform else rows - spans + 1
        return PlannedSpans(self, batch, batch.slots, width)


@dataclass(frozen=True, slots=True)
class PlannedSpans:
    backend: TritonAttention
    batch: Batch
    slots: Tensor
    width: int  # of the widest span, about

    def caches(self, layer: int) -> tuple[Tensor, Tensor]:
        return self.backend.pool.keys(layer), self.backend.pool.values(layer)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor | None, layer: int) -> Tensor:
        self.backend.pool.store(layer, self.slots, k, v)
        return self.stored(q, layer)

    def stored(self, q: Tensor, layer: int) -> Tensor:
        batch, pool = self.batch, self.backend.pool
        where = (
            batch.seats.page_table, batch.seat_ids, batch.cu_q, batch.kv_len, batch.index, batch.tree_bits, batch.tree_start,
            pool.page_size, self.backend.scale,
        )  # fmt: skip
        q = q.contiguous()
        if pool.layout.kind == "mla":
            return span_mla(q, pool.keys(layer), *where, pool.layout.value_dim, width=self.width)
        return span_gqa(q, pool.keys(layer), pool.values(layer), *where, width=self.width)
