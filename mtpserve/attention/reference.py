"""Attention in plain torch: the truth that kernels are compared with, and the path of the CPU. It reads lengths on the host.

Grouped heads and the latent layout are one computation: `heads / kv_heads` query heads share a key head, and their rows are
multiplied with it together.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mtpserve.cache.pool import KVPool
from mtpserve.core.arch import KVLayout
from mtpserve.core.batch import Batch

MAX_SCORES = 1 << 24  # numbers in one block of scores: bounds the memory of a long prompt's chunk
MAX_GATHERED = 1 << 22  # numbers of keys that are copied side by side to serve several spans with one product


@dataclass(frozen=True, slots=True)
class Piece:
    """Spans of equal width that are computed together. Shorter ones are padded with their own first slot, which is masked.

    A pad must be a slot that was written: zero weight times what an unwritten one may hold can still be NaN.
    """

    rows: Tensor | slice  # [spans * width], rows of the batch
    spans: int
    slots: Tensor | slice  # [spans * n]; a slice where one span's pages lie one behind the other: nothing is copied
    mask: Tensor | None  # [spans * kv_heads or 1, width * group, n] float, 0 or -inf; None: every row sees everything


class ReferenceAttention:
    graph_safe = False

    def __init__(self, pool: KVPool, heads: int, scale: float) -> None:
        self.pool, self.scale = pool, scale
        self.kv_heads, self.group = pool.layout.heads, heads // pool.layout.heads

    def supports(self, layout: KVLayout, device: str) -> bool:
        return True

    def plan(self, batch: Batch) -> PlannedAttention:
        ends, lengths, seats = batch.cu_q.tolist(), batch.kv_len.tolist(), batch.seat_ids.tolist()
        by_width: dict[int, list[int]] = {}
        for r in range(len(seats)):
            by_width.setdefault(ends[r + 1] - ends[r], []).append(r)
        pieces = []
        for width, members in by_width.items():
            longest = max(lengths[r] for r in members)
            if len(members) * longest * self.kv_heads * self.pool.layout.key_dim > MAX_GATHERED:
                groups = [[r] for r in members]
            else:
                groups = [members]
            for group in groups:
                tables = [batch.seats.page_table[seats[r]] for r in group]
                pieces.append(self.piece(batch, width, group, [ends[r] for r in group], [lengths[r] for r in group], tables))
        return PlannedAttention(self, batch.slots, pieces)

    def piece(self, batch: Batch, width: int, spans: list[int], first_rows: list[int], lengths: list[int], tables: list[Tensor]) -> Piece:
        device, page_size, n, shift = self.pool.k.device, self.pool.page_size, max(lengths), batch.shift
        if len(lengths) == 1:
            rows: Tensor | slice = slice(first_rows[0], first_rows[0] + width)
            slots: Tensor | slice = slots_of(tables[0][: -(-(n + shift) // page_size)], n, page_size, shift)
        else:
            rows = (torch.tensor(first_rows, device=device).unsqueeze(1) + torch.arange(width, device=device)).flatten()
            index = torch.arange(n, device=device).expand(len(lengths), n)
            index = index.masked_fill(index >= torch.tensor(lengths, device=device).unsqueeze(1), 0)
            index = index + shift
            slots = (
                torch.stack([t[: -(-(n + shift) // page_size)] for t in tables]).gather(1, index // page_size) * page_size
                + index % page_size
            )
            slots = slots.flatten()
        needed = width > 1 or min(lengths) < n or batch.tree_bits is not None
        return Piece(rows, len(lengths), slots, self.mask(batch, rows, spans, width, n) if needed else None)

    def mask(self, batch: Batch, rows: Tensor | slice, spans: list[int], width: int, n: int) -> Tensor:
        """Column c is a place in the request. A row sees what stands before it, of a tree only its ancestors.

        columns   0 … tree_start-1 | tree_start …            | … n-1
        row       seen             | as the row's bits say   | behind the row's own index: padding, or nodes of no concern
        """
        columns = torch.arange(n, device=batch.index.device)
        seen = columns <= batch.index[rows].unsqueeze(1)  # [spans * width, n]
        if batch.tree_bits is not None:
            assert batch.tree_start is not None
            start = batch.tree_start[spans].repeat_interleave(width)
            bit = columns - start.unsqueeze(1)
            seen &= (bit < 0) | (batch.tree_bits[rows].unsqueeze(1) >> bit.clamp(0, 63) & 1).bool()
        mask: Tensor = torch.zeros(seen.shape, dtype=self.pool.dtype, device=seen.device).masked_fill_(~seen, -torch.inf)
        mask = mask.unflatten(0, (len(spans), width)).repeat_interleave(self.group, 1)
        return mask.repeat_interleave(self.kv_heads if len(spans) > 1 else 1, 0)


def slots_of(pages: Tensor, n: int, page_size: int, shift: int) -> Tensor | slice:
    """pages [⌈n / page_size⌉] → the slots of tokens 0 … n-1."""
    listed = pages.tolist()
    if listed == list(range(listed[0], listed[0] + len(listed))):
        return slice(listed[0] * page_size + shift, listed[0] * page_size + shift + n)
    return (pages[:, None] * page_size + torch.arange(page_size, device=pages.device)).flatten()[shift : shift + n]


@dataclass(frozen=True, slots=True)
class PlannedAttention:
    backend: ReferenceAttention
    slots: Tensor  # [T], where this step's rows are stored
    pieces: list[Piece]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor | None, layer: int) -> Tensor:
        self.backend.pool.store(layer, self.slots, k, v)
        if len(self.pieces) == 1:
            # One piece holds all rows in their order.
            return self.one(q, self.pieces[0], layer)
        out = q.new_empty(q.shape[0], q.shape[1], self.backend.pool.layout.value_dim)
        for piece in self.pieces:
            out[piece.rows] = self.one(q[piece.rows], piece, layer)
        return out

    def one(self, q: Tensor, piece: Piece, layer: int) -> Tensor:
        """q [spans * width, heads, key_dim] → [spans * width, heads, value_dim]"""
        backend, pool, spans = self.backend, self.backend.pool, piece.spans
        kv_heads, group = backend.kv_heads, backend.group
        q = q.view(spans, -1, kv_heads, group, q.shape[-1]).transpose(1, 2)  # [spans, kv_heads, width, group, key_dim]
        width = q.shape[2]
        k, v = (
            seen.unflatten(0, (spans, -1)).transpose(1, 2).flatten(0, 1)  # [spans * kv_heads, n, dim]
            for seen in pool.gathered(layer, piece.slots)
        )
        out = attend(q.reshape(spans * kv_heads, width * group, -1), k, v, piece.mask, backend.scale)
        return out.view(spans, kv_heads, width, group, -1).transpose(1, 2).reshape(spans * width, kv_heads * group, -1)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """q [h, m, d], k [h, n, d], v [h, n, e], mask [h or 1, m, n] → [h, m, e]; softmax in float32."""
    block = max(1, MAX_SCORES // (k.shape[0] * k.shape[1]))
    if q.shape[1] > block:
        masks = [None] * -(-q.shape[1] // block) if mask is None else list(mask.split(block, 1))
        return torch.cat([attend(part, k, v, m, scale) for part, m in zip(q.split(block, 1), masks, strict=True)], 1)
    if mask is None:
        scores = torch.bmm(q * scale, k.mT)
    else:
        scores = torch.baddbmm(mask.expand(q.shape[0], -1, -1), q, k.mT, alpha=scale)
    return torch.bmm(scores.softmax(-1, dtype=torch.float32).to(v.dtype), v)
