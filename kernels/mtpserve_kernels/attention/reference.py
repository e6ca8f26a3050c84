"""What the attention kernels compute, in plain torch: one request after the other, softmax in float32."""

from __future__ import annotations

import torch
from torch import Tensor


def span_gqa(
    q: Tensor, k: Tensor, v: Tensor, page_table: Tensor, seats: Tensor, cu_q: Tensor, kv_len: Tensor, index: Tensor,
    tree_bits: Tensor | None, tree_start: Tensor | None, page_size: int, scale: float, kv_scale: float = 1.0,
) -> Tensor:  # fmt: skip
    """q [T, heads, D], k [slots, kv_heads, D], v [slots, kv_heads, E] → [T, heads, E]; see `span.py` for the rest."""
    out = q.new_empty(q.shape[0], q.shape[1], v.shape[-1])
    group = q.shape[1] // k.shape[1]
    for r, seat in enumerate(seats.tolist()):
        start, stop, n = int(cu_q[r]), int(cu_q[r + 1]), int(kv_len[r])
        columns = torch.arange(n, device=q.device)
        slots = page_table[seat, columns // page_size] * page_size + columns % page_size
        seen = columns <= index[start:stop, None]  # [rows, n]
        if tree_bits is not None and tree_start is not None:
            bit = columns - tree_start[r]
            seen &= (bit < 0) | (tree_bits[start:stop, None] >> bit.clamp(0, 63) & 1).bool()
        keys, values = (part[slots].float().mul(kv_scale).repeat_interleave(group, 1) for part in (k, v))
        scores = torch.einsum("rhd,nhd->hrn", q[start:stop].float(), keys) * scale
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        out[start:stop] = torch.einsum("hrn,nhe->rhe", weights, values).to(q.dtype)
    return out


def span_mla(
    q: Tensor, latent: Tensor, page_table: Tensor, seats: Tensor, cu_q: Tensor, kv_len: Tensor, index: Tensor,
    tree_bits: Tensor | None, tree_start: Tensor | None, page_size: int, scale: float, value_dim: int, kv_scale: float = 1.0,
) -> Tensor:  # fmt: skip
    """q [T, heads, D], latent [slots, 1, D] whose first `value_dim` numbers are the value → [T, heads, value_dim]"""
    values = latent[..., :value_dim]
    return span_gqa(q, latent, values, page_table, seats, cu_q, kv_len, index, tree_bits, tree_start, page_size, scale, kv_scale)
