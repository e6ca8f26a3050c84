"""What the attention kernels compute, in plain torch: one request after the other, softmax in float32."""

from __future__ import annotations

import torch
from torch import Tensor


def span_gqa(
    q: Tensor, k: Tensor, v: Tensor, block_table: Tensor, seats: Tensor, query_start_loc: Tensor, seq_lens: Tensor, index: Tensor,
    tree_bits: Tensor | None, tree_start: Tensor | None, page_size: int, scale: float, *, sinks: Tensor | None = None, window: int = 0,
    shift: int = 0,
) -> Tensor:  # fmt: skip
    """q [T, heads, D], k [slots, kv_heads, D], v [slots, kv_heads, E] → [T, heads, E]; see `span.py` for the rest.

    Slots of columns that no row of a request sees are not read, and neither are their entries of the page table.
    """
    out = q.new_empty(q.shape[0], q.shape[1], v.shape[-1])
    group = q.shape[1] // k.shape[1]
    for r, req_idx in enumerate(seats.tolist()):
        start, stop = int(query_start_loc[r]), int(query_start_loc[r + 1])
        columns, position = torch.arange(int(seq_lens[r]), device=q.device), index[start:stop, None]
        seen = columns <= position  # [rows, n]
        if tree_bits is not None and tree_start is not None:
            bits, bit = tree_bits[start:stop, None], columns - tree_start[r]
            seen &= (bit < 0) | (bits >> bit.clamp(0, 63) & 1).bool()
            ancestors = (bits >> torch.arange(64, device=q.device) & 1).sum(1, keepdim=True) - 1
            position = torch.where(bits == -1, position, tree_start[r] + ancestors)
        if window:
            seen &= columns > position - window
        needed = seen.any(0)
        place = columns[needed] + shift
        slots = block_table[req_idx, place // page_size] * page_size + place % page_size
        keys, values = (part[slots].float().repeat_interleave(group, 1) for part in (k, v))
        scores = torch.einsum("rhd,nhd->hrn", q[start:stop].float(), keys) * scale
        scores.masked_fill_(~seen[:, needed], -torch.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks.view(-1, 1, 1).expand(-1, stop - start, 1)], -1)
        weights = scores.softmax(-1)[..., : len(slots)]
        out[start:stop] = torch.einsum("hrn,nhe->rhe", weights, values).to(q.dtype)
    return out


def span_mla(
    q: Tensor, latent: Tensor, block_table: Tensor, seats: Tensor, query_start_loc: Tensor, seq_lens: Tensor, index: Tensor,
    tree_bits: Tensor | None, tree_start: Tensor | None, page_size: int, scale: float, value_dim: int, *, sinks: Tensor | None = None,
    window: int = 0, shift: int = 0,
) -> Tensor:  # fmt: skip
    """q [T, heads, D], latent [slots, 1, D] whose first `value_dim` numbers are the value → [T, heads, value_dim]"""
    where = block_table, seats, query_start_loc, seq_lens, index, tree_bits, tree_start, page_size, scale
    return span_gqa(q, latent, latent[..., :value_dim], *where, sinks=sinks, window=window, shift=shift)


def select(
    q: Tensor, weights: Tensor, keys: Tensor, block_table: Tensor, seats: Tensor, ends: Tensor, bits: Tensor | None, starts: Tensor | None,
    page_size: int, best: int, *, scales: Tensor | None = None, shift: int = 0,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """q [T, heads, D], weights [T, heads] float32, index keys [slots, 1, D] and their scales [slots, 1, 1] float32 (None: 1); seats, ends,
    bits and starts [T]: of each row, see `select.py`. → the slots of the `best` columns that the row sees, those with the largest scores,
    in the order of columns [T, best] int64, and how many they are [T] int64; what follows is void. Of equal scores the earlier column's
    counts more, and NaN more than any number."""
    slots, counts = seats.new_zeros(len(q), best), torch.empty_like(ends)
    for row, (req_idx, end) in enumerate(zip(seats.tolist(), ends.tolist(), strict=True)):
        columns = torch.arange(end, device=q.device)
        if bits is not None and starts is not None:
            bit = columns - starts[row]
            columns = columns[(bit < 0) | (bits[row] >> bit.clamp(0, 63) & 1).bool()]
        place = columns + shift
        seen = block_table[req_idx, place // page_size] * page_size + place % page_size
        if len(seen) > best:
            scores = weights[row] @ (q[row].float() @ keys[seen, 0].float().T).relu()
            scores = scores if scales is None else scores * scales[seen, 0, 0]
            seen = seen[scores.sort(descending=True, stable=True).indices[:best].sort().values]
        slots[row, : len(seen)], counts[row] = seen, len(seen)
    return slots, counts


def selected_mla(q: Tensor, latent: Tensor, slots: Tensor, counts: Tensor, scale: float, value_dim: int) -> Tensor:
    """q [T, heads, D], latent [slots, 1, D] whose first `value_dim` numbers are the value, what `select` gives → [T, heads, value_dim]"""
    out = q.new_empty(*q.shape[:2], value_dim)
    for row, count in enumerate(counts.tolist()):
        seen = latent[slots[row, :count], 0].float()
        weights = (scale * q[row].float() @ seen.T).softmax(-1)
        out[row] = (weights @ seen[:, :value_dim]).to(q.dtype)
    return out


def window_and_entries(
    q: Tensor, tokens: Tensor, block_table: Tensor, entries: Tensor, entry_table: Tensor, table_rows: Tensor, index: Tensor,
    bits: Tensor | None, starts: Tensor | None, ends: Tensor, entry_bits: Tensor | None, entry_starts: Tensor | None, sinks: Tensor,
    page_size: int, entry_page_size: int, window: int, scale: float,
) -> Tensor:  # fmt: skip
    """q [T, heads, D], tokens [slots, 1, D] and entries [places, 1, D], whose rows are values, too → [T, heads, D].

    block_table [n, pages] and entry_table [m, pages] int64; table_rows [2, T]: their rows for each row; index, ends [T]; bits, starts,
    entry_bits and entry_starts [T] or None: see `entries.py`. A row sees `window` tokens, itself included. sinks [heads] float32.
    """
    out = torch.empty_like(q)
    for row, (table_row, entry_row) in enumerate(table_rows.t().tolist()):
        columns, position, there = torch.arange(int(index[row]) + 1, device=q.device), int(index[row]), None
        if bits is not None and starts is not None and bits[row] != -1:
            bit = columns - starts[row]
            there = (bit < 0) | (bits[row] >> bit.clamp(0, 63) & 1).bool()
            position = int(starts[row]) + int(bits[row]).bit_count() - 1
        seen = columns > position - window
        columns = columns[seen if there is None else seen & there]
        chosen = torch.arange(int(ends[row]), device=q.device)
        if entry_bits is not None and entry_starts is not None:
            bit = chosen - entry_starts[row]
            chosen = chosen[(bit < 0) | (entry_bits[row] >> bit.clamp(0, 63) & 1).bool()]
        keys = torch.cat([
            rows[table[number, places // size] * size + places % size, 0].float()
            for rows, table, number, places, size in (
                (tokens, block_table, table_row, columns, page_size), (entries, entry_table, entry_row, chosen, entry_page_size)
            )
        ])  # fmt: skip
        scores = torch.cat([scale * q[row].float() @ keys.T, sinks.unsqueeze(1)], 1)
        out[row] = (scores.softmax(-1)[:, :-1] @ keys).to(q.dtype)
    return out
