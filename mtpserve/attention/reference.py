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


@dataclass(frozen=True, slots=True)
class SpanPlan:
    """One span's rows and the slots of all that it may see. `slots` is a slice where its pages lie one behind the other."""

    rows: slice
    slots: Tensor | slice  # [n]
    mask: Tensor | None  # [rows, n] float, 0 or -inf; None: every row sees everything


class ReferenceAttention:
    graph_safe = False

    def __init__(self, pool: KVPool, heads: int, scale: float) -> None:
        self.pool, self.heads, self.scale = pool, heads, scale

    def supports(self, layout: KVLayout, device: str) -> bool:
        return True

    def plan(self, batch: Batch) -> PlannedAttention:
        ends, lengths, seats = batch.cu_q.tolist(), batch.kv_len.tolist(), batch.seat_ids.tolist()
        page_size, spans = self.pool.page_size, []
        bits = None if batch.shape.is_chain else batch.shape.ancestor_bits
        for r, (n, seat) in enumerate(zip(lengths, seats, strict=True)):
            rows = slice(ends[r], ends[r + 1])
            pages = batch.seats.page_table[seat, : -(-n // page_size)]
            spans.append(SpanPlan(rows, slots_of(pages, n, page_size), self.mask(rows.stop - rows.start, n, bits)))
        return PlannedAttention(self, batch.slots, spans)

    def mask(self, rows: int, n: int, bits: tuple[int, ...] | None) -> Tensor | None:
        """Causal over the span's own rows, which are the last `rows` of the n columns; a tree's draft rows by ancestors.

        columns   0 … n-rows-1 | n-rows … n-1
        row i     all seen     | 0 … i seen, or, in the last len(bits) rows, the bits of node i
        """
        if rows == 1:
            return None
        device, dtype = self.pool.k.device, self.pool.k.dtype
        seen = torch.ones(rows, rows, dtype=torch.bool, device=device).tril()
        if bits is not None:
            nodes = len(bits)
            table = torch.tensor(bits, device=device)
            seen[-nodes:, -nodes:] = (table[:, None] >> torch.arange(nodes, device=device) & 1).bool()
        mask = torch.zeros(rows, n, dtype=dtype, device=device)
        mask[:, n - rows :].masked_fill_(~seen, -torch.inf)
        return mask.repeat_interleave(self.heads // self.pool.layout.heads, 0)


def slots_of(pages: Tensor, n: int, page_size: int) -> Tensor | slice:
    """pages [⌈n / page_size⌉] → the slots of tokens 0 … n-1."""
    first = int(pages[0])
    if bool((pages == torch.arange(first, first + len(pages), device=pages.device)).all()):
        return slice(first * page_size, first * page_size + n)  # a view: nothing is gathered
    return (pages[:, None] * page_size + torch.arange(page_size, device=pages.device)).flatten()[:n]


@dataclass(frozen=True, slots=True)
class PlannedAttention:
    backend: ReferenceAttention
    slots: Tensor  # [T], where this step's rows are stored
    spans: list[SpanPlan]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor | None, layer: int) -> Tensor:
        pool, scale = self.backend.pool, self.backend.scale
        pool.store(layer, self.slots, k, v)
        keys, values, kv_heads = pool.keys(layer), pool.values(layer), pool.layout.heads
        outputs = []
        for span in self.spans:
            rows = q[span.rows].unflatten(1, (kv_heads, -1)).transpose(0, 1).flatten(1, 2)  # [kv_heads, rows * group, key_dim]
            k_seen, v_seen = keys[span.slots].transpose(0, 1), values[span.slots].transpose(0, 1)  # [kv_heads, n, dim]
            out = attend(rows, k_seen, v_seen, span.mask, scale)
            outputs.append(out.unflatten(1, (span.rows.stop - span.rows.start, -1)).transpose(0, 1).flatten(1, 2))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)  # [T, heads, value_dim]


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """q [h, m, d], k [h, n, d], v [h, n, e], mask [m, n] → [h, m, e]; softmax in float32."""
    block = max(1, MAX_SCORES // (k.shape[0] * k.shape[1]))
    if q.shape[1] > block:
        masks = [None] * -(-q.shape[1] // block) if mask is None else list(mask.split(block))
        return torch.cat([attend(part, k, v, m, scale) for part, m in zip(q.split(block, 1), masks, strict=True)], 1)
    if mask is None:
        scores = torch.bmm(q * scale, k.mT)
    else:
        scores = torch.baddbmm(mask.expand(q.shape[0], -1, -1), q, k.mT, alpha=scale)
    return torch.bmm(scores.softmax(-1, dtype=torch.float32).to(v.dtype), v)
