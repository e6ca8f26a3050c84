"""Attention by the Triton kernels: nothing is read on the host, so that a step with it can be captured."""

from __future__ import annotations

from dataclasses import dataclass

from mtpserve_kernels.attention.span import span_gqa, span_mla
from torch import Tensor

from mtpserve.attention.contexts import Contexts, slots_of
from mtpserve.attention.gpu.triton_compressed import CompressedSpans, compressed_spans
from mtpserve.attention.gpu.triton_selected import ChosenSlots, RowsSeen, SelectedSpans
from mtpserve.cache.pool import KVPool
from mtpserve.cache.stores import Store, Stores
from mtpserve.core.arch.model import Attention, LayerKind
from mtpserve.core.batch import Batch


class TritonAttention:
    graph_safe = True
    exact = False

    def __init__(self, stores: Stores, heads: int, scale: float) -> None:
        self.stores, self.scale = stores, scale

    def supports(self, kind: LayerKind) -> bool:
        if (
            not isinstance(kind, Attention)
            or (kind.compressed is not None and kind.compressed.index_dim > 128)
            or (kind.selected is not None and (kind.kv.kind != "mla" or kind.index_dim > 128))
        ):
            return False
        return kind.kv.key_dim <= (576 if kind.kv.kind == "mla" else 512)

    def plan(self, batch: Batch) -> Contexts[PlannedSpans | SelectedSpans | CompressedSpans]:
        width = typical_width(len(batch.input_ids), len(batch.req_indices), batch.sample_rows.shape[1])
        slots = {group: slots_of(batch, group) for group in self.stores.groups}
        visible_ranges = (
            RowsSeen.of(batch)
            if any(store.kind.selected or store.kind.compressed for store in self.stores.stores)
            else None
        )
        choice = ChosenSlots()

        def plan_store(store: Store) -> PlannedSpans | SelectedSpans | CompressedSpans:
            kind, pool, group = store.kind, store.pool, store.group
            if kind.compressed is not None and visible_ranges is not None:
                return compressed_spans(batch, store, visible_ranges, self.scale)
            where = pool, batch, slots[group], batch.req_tensors.block_tables[group], self.scale
            if kind.selected is not None and visible_ranges is not None:
                return SelectedSpans(*where, kind.selected.best, visible_ranges, choice)
            return PlannedSpans(*where, kind.window or 0, width)

        return Contexts(self.stores, [plan_store(store) for store in self.stores.stores])


def typical_width(rows: int, spans: int, sampled: int) -> int:
    """Rows of a span, by which tiles are chosen: without prompts those whose logits are computed, `sampled`.
    The mean if there are prompts: tiles as wide as a prompt would be nearly empty for each request that
    decodes."""
    return sampled if rows <= spans * sampled else -(-rows // spans)


@dataclass(frozen=True, slots=True)
class PlannedSpans:
    pool: KVPool
    batch: Batch
    slots: Tensor  # [T]
    block_table: Tensor  # [seats, columns]
    scale: float
    window: int  # 0: none
    width: int  # rows of a span, about

    def attend(self, q: Tensor, layer: int, sinks: Tensor | None) -> Tensor:
        batch, pool = self.batch, self.pool
        where = (
            self.block_table, batch.req_indices, batch.query_start_loc, batch.seq_lens, batch.token_indices,
            batch.tree_bits,
            batch.tree_start, pool.page_size, self.scale,
        )  # fmt: skip
        q, keys, window, shift, width = q.contiguous(), pool.keys(layer), self.window, batch.shift, self.width
        if pool.layout.kind == "mla":
            return span_mla(
                q, keys, *where, pool.layout.value_dim, sinks=sinks, window=window, shift=shift, width=width
            )
        return span_gqa(
            q, keys, pool.values(layer), *where, sinks=sinks, window=window, shift=shift, width=width
        )
