"""Attention in plain torch: the truth that kernels are compared with, and the path of the CPU. It reads
lengths on the host.

Grouped heads and the latent layout are one computation: `heads / kv_heads` query heads share a key head, and
their rows are multiplied with it together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mtpserve.attention.compressed import PlannedCompressed, plan_compressed
from mtpserve.attention.contexts import Contexts, slots_of
from mtpserve.attention.selected import ChosenRows, PlannedSelected, plan_selected
from mtpserve.cache.pool import KVPool
from mtpserve.cache.stores import Store, Stores
from mtpserve.core.arch.model import Attention, LayerKind
from mtpserve.core.batch import Batch

MAX_SCORES = 1 << 24  # numbers in one block of scores: bounds the memory of a long prompt's chunk
MAX_GATHERED = 1 << 22  # numbers of keys that are copied side by side to serve several spans with one product


class SpanColumns(NamedTuple):
    """A span on the host. Its rows see some of the columns (places in the request) from `low` to `end`, and
    no others."""

    number: int
    first_row: int
    width: int
    low: int
    end: int

    @property
    def columns(self) -> int:
        return self.end - self.low


@dataclass(frozen=True, slots=True)
class Piece:
    """Spans of equal width that are computed together. Those with fewer columns are padded with their first
    column's slot, which is masked.

    A pad must be a slot that was written: zero weight times what an unwritten one may hold can still be NaN.
    """

    rows: Tensor | slice  # [spans * width], rows of the batch
    spans: int
    slots: Tensor | slice  # [spans * n]; a slice where one span's pages follow one another: nothing is copied
    # [spans * kv_heads or 1, width * group, n] float, 0 or -inf; None: every row sees everything
    mask: Tensor | None


class ReferenceAttention:
    graph_safe = False
    exact = False

    def __init__(self, stores: Stores, heads: int, scale: float) -> None:
        self.stores, self.heads, self.scale = stores, heads, scale

    def supports(self, kind: LayerKind) -> bool:
        return isinstance(kind, Attention)

    def plan(self, batch: Batch) -> Contexts[PlannedAttention | PlannedSelected | PlannedCompressed]:
        ends, lengths, first = (
            batch.query_start_loc.tolist(),
            batch.seq_lens.tolist(),
            batch.positions[batch.query_start_loc[:-1]].tolist(),
        )

        def spans(window: int | None) -> list[SpanColumns]:
            # The first row of a span has its lowest position. A row after the last token that counts sees
            # what that token sees.
            lows = [
                0 if window is None else max(0, min(p, n - 1) - window + 1)
                for p, n in zip(first, lengths, strict=True)
            ]
            return [
                SpanColumns(r, ends[r], ends[r + 1] - ends[r], lows[r], lengths[r])
                for r in range(len(lengths))
            ]

        plans, choice = list[PlannedAttention | PlannedSelected | PlannedCompressed](), ChosenRows()
        for store in self.stores.stores:
            if store.kind.compressed is not None:
                plans.append(plan_compressed(batch, store, self.stores.page_size, self.scale))
            elif store.kind.selected is not None:
                plans.append(plan_selected(batch, store, self.stores.page_size, self.scale, choice))
            else:
                plans.append(self.plan_store(batch, store, spans(store.kind.window)))
        return Contexts(self.stores, plans)

    def plan_store(self, batch: Batch, store: Store, spans: list[SpanColumns]) -> PlannedAttention:
        by_width: dict[int, list[SpanColumns]] = {}
        for span in spans:
            by_width.setdefault(span.width, []).append(span)
        layout, pieces = store.kind.kv, []
        for members in by_width.values():
            max_columns = max(span.columns for span in members)
            apart = len(members) * max_columns * layout.heads * layout.key_dim > MAX_GATHERED
            pieces += [
                self.piece(batch, store, group)
                for group in ([[span] for span in members] if apart else [members])
            ]
        group = (store.kind.heads or self.heads) // layout.heads
        return PlannedAttention(store.pool, slots_of(batch, store.group), pieces, group, self.scale)

    def piece(self, batch: Batch, store: Store, spans: list[SpanColumns]) -> Piece:
        device, page_size = batch.token_indices.device, self.stores.page_size
        width, n = spans[0].width, max(span.columns for span in spans)
        tables = batch.req_tensors.block_tables[store.group][
            batch.req_indices[[span.number for span in spans]]
        ]
        low = torch.tensor([span.low for span in spans], device=device).unsqueeze(1)
        columns = low + torch.arange(n, device=device)  # [spans, n]
        if len(spans) == 1:
            rows: Tensor | slice = slice(spans[0].first_row, spans[0].first_row + width)
            slots: Tensor | slice = slots_between(
                tables[0], spans[0].low + batch.shift, spans[0].end + batch.shift, page_size
            )
        else:
            first_rows = torch.tensor([span.first_row for span in spans], device=device)
            rows = (first_rows.unsqueeze(1) + torch.arange(width, device=device)).flatten()
            ends = torch.tensor([span.end for span in spans], device=device).unsqueeze(1)
            token_indices = torch.where(columns < ends, columns, low) + batch.shift
            slots = (
                tables.gather(1, token_indices // page_size) * page_size + token_indices % page_size
            ).flatten()
        all_see_all = width == 1 and min(span.columns for span in spans) == n and batch.tree_bits is None
        return Piece(
            rows, len(spans), slots, None if all_see_all else self.mask(batch, store, rows, spans, columns)
        )

    def mask(
        self, batch: Batch, store: Store, rows: Tensor | slice, spans: list[SpanColumns], columns: Tensor
    ) -> Tensor:
        """A row sees what comes before it, of a tree only its ancestors, and of all that only its window.

        columns   0 … position - window | … tree_start-1 | tree_start …          | … n-1
        row       not seen              | seen           | as the row's bits say | padding, or other nodes
        """
        width, numbers, kv_heads = spans[0].width, [span.number for span in spans], store.kind.kv.heads
        columns = columns.repeat_interleave(width, 0)  # [spans * width, n]
        visible = columns <= batch.token_indices[rows].unsqueeze(1)
        if batch.tree_bits is not None:
            assert batch.tree_start is not None
            start = batch.tree_start[numbers].repeat_interleave(width)
            bit = columns - start.unsqueeze(1)
            visible &= (bit < 0) | (batch.tree_bits[rows].unsqueeze(1) >> bit.clamp(0, 63) & 1).bool()
        if store.kind.window is not None:
            last = (batch.seq_lens[numbers] - 1).repeat_interleave(width)
            visible &= columns > (torch.minimum(batch.positions[rows], last) - store.kind.window).unsqueeze(1)
        mask: Tensor = torch.zeros(visible.shape, dtype=store.pool.dtype, device=visible.device).masked_fill_(
            ~visible, -torch.inf
        )
        mask = mask.unflatten(0, (len(spans), width)).repeat_interleave(
            (store.kind.heads or self.heads) // kv_heads, 1
        )
        return mask.repeat_interleave(kv_heads if len(spans) > 1 else 1, 0)


def slots_between(table: Tensor, low: int, end: int, page_size: int) -> Tensor | slice:
    """table: a request's pages → the slots of its tokens low … end-1."""
    first = low // page_size
    pages = table[first : -(-end // page_size)]
    listed, skipped, n = pages.tolist(), low - first * page_size, end - low
    if listed == list(range(listed[0], listed[0] + len(listed))):
        return slice(listed[0] * page_size + skipped, listed[0] * page_size + skipped + n)
    return (pages[:, None] * page_size + torch.arange(page_size, device=pages.device)).flatten()[
        skipped : skipped + n
    ]


@dataclass(frozen=True, slots=True)
class PlannedAttention:
    pool: KVPool
    slots: Tensor  # [T], where this step's rows are stored
    pieces: list[Piece]
    group: int  # query heads that share a key head
    scale: float

    def attend(self, q: Tensor, layer: int, sinks: Tensor | None) -> Tensor:
        if len(self.pieces) == 1:
            # One piece holds all rows in their order.
            return self.one(q, self.pieces[0], layer, sinks)
        out = q.new_empty(q.shape[0], q.shape[1], self.pool.layout.value_dim)
        for piece in self.pieces:
            out[piece.rows] = self.one(q[piece.rows], piece, layer, sinks)
        return out

    def one(self, q: Tensor, piece: Piece, layer: int, sinks: Tensor | None) -> Tensor:
        """q [spans * width, heads, key_dim] → [spans * width, heads, value_dim]"""
        spans, kv_heads, group = piece.spans, self.pool.layout.heads, self.group
        # [spans, kv_heads, width, group, key_dim]
        q = q.view(spans, -1, kv_heads, group, q.shape[-1]).transpose(1, 2)
        width = q.shape[2]
        k, v = (
            kv.unflatten(0, (spans, -1)).transpose(1, 2).flatten(0, 1)  # [spans * kv_heads, n, dim]
            for kv in self.pool.gathered(layer, piece.slots)
        )
        if sinks is not None:
            sinks = (
                sinks.view(1, kv_heads, 1, group)
                .expand(spans, -1, width, -1)
                .reshape(spans * kv_heads, width * group, 1)
            )
        out = attend(q.reshape(spans * kv_heads, width * group, -1), k, v, piece.mask, self.scale, sinks)
        return (
            out.view(spans, kv_heads, width, group, -1)
            .transpose(1, 2)
            .reshape(spans * width, kv_heads * group, -1)
        )


def attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, sinks: Tensor | None = None
) -> Tensor:
    """q [h, m, d], k [h, n, d], v [h, n, e], mask [h or 1, m, n], sinks [h, m, 1] → [h, m, e]; softmax in
    float32."""
    block = max(1, MAX_SCORES // (k.shape[0] * k.shape[1]))
    if q.shape[1] > block:
        parts = -(-q.shape[1] // block)
        masks, beside = ([None] * parts if x is None else list(x.split(block, 1)) for x in (mask, sinks))
        blocks = zip(q.split(block, 1), masks, beside, strict=True)
        return torch.cat([attend(chunk, k, v, m, scale, s) for chunk, m, s in blocks], 1)
    if mask is None:
        scores = torch.bmm(q * scale, k.mT)
    else:
        scores = torch.baddbmm(mask.expand(q.shape[0], -1, -1), q, k.mT, alpha=scale)
    weights = scores.softmax(-1, dtype=torch.float32)
    if sinks is not None:
        # All weights would have to be divided by e^lse + e^sink; the keys have this part of it.
        weights *= (scores.float().logsumexp(-1, keepdim=True) - sinks).sigmoid()
    return torch.bmm(weights.to(v.dtype), v)
