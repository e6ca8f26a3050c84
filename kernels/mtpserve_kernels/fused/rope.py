"""Between the projections and attention: norms per head, rotation, and the write into the pages, one launch.

`rope_store` serves grouped heads, `latent_store` the latent layout. A program has one head of one row: it reads and writes D numbers
and reads one row of the tables. Rotation is a swap within pairs, done by reading the partner's number a second time (from the cache
of the processor, not from memory).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rotated(p_x, o, p_cos, p_sin, p_norm, scale, ROPE: tl.constexpr, INTERLEAVED: tl.constexpr, NORM: tl.constexpr, m):
    """x[o] of one head, normed and rotated, float32. Numbers from ROPE on are not rotated; ROPE may be 0."""
    if INTERLEAVED:
        o_partner, o_angle, first = o ^ 1, o // 2, o % 2 == 0
    else:
        HALF: tl.constexpr = ROPE // 2 if ROPE > 0 else 1
        o_partner, o_angle, first = tl.where(o < HALF, o + HALF, o - HALF), o % HALF, o < HALF
    m_turn = m & (o < ROPE)
    b_raw = tl.load(p_x + o, mask=m, other=0.0)
    b_raw_partner = tl.load(p_x + o_partner, mask=m_turn, other=0.0)
    b_x, b_partner = b_raw.to(tl.float32), b_raw_partner.to(tl.float32)
    if NORM:
        b_x = b_x * scale * tl.load(p_norm + o, mask=m, other=0.0).to(tl.float32)
        b_partner = b_partner * scale * tl.load(p_norm + o_partner, mask=m_turn, other=0.0).to(tl.float32)
        b_x, b_partner = b_x.to(b_raw.dtype).to(tl.float32), b_partner.to(b_raw.dtype).to(tl.float32)
    b_cos = tl.load(p_cos + o_angle, mask=m_turn, other=1.0)
    b_sin = tl.load(p_sin + o_angle, mask=m_turn, other=0.0)
    return b_x * b_cos + tl.where(first, -b_partner, b_partner) * b_sin


@triton.jit
def _fitted(b, p_cache):
    """As the cache stores it. float8 is cut off at its largest number; comparisons let NaN through, which must stay one."""
    if p_cache.dtype.element_ty == tl.float8e4nv:
        b = tl.where(b > 448.0, 448.0, tl.where(b < -448.0, -448.0, b))
    return b.to(p_cache.dtype.element_ty)


@triton.jit
def rope_store_kernel(
    p_qkv, p_q, p_positions, p_cos, p_sin, p_slots, p_k, p_v, p_q_norm, p_k_norm,
    stride_row, stride_k, stride_v, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, ROPE: tl.constexpr,
    INTERLEAVED: tl.constexpr, Q_NORM: tl.constexpr, K_NORM: tl.constexpr,
):  # fmt: skip
    i_row, i_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o = tl.arange(0, BD)
    m = o < D
    p_x = p_qkv + i_row * stride_row + i_head * D
    position = tl.load(p_positions + i_row)
    slot = tl.load(p_slots + i_row)
    p_c, p_s = p_cos + position * (ROPE // 2), p_sin + position * (ROPE // 2)
    scale = 1.0
    if Q_NORM or K_NORM:
        b_all = tl.load(p_x + o, mask=m, other=0.0).to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(b_all * b_all) / D + eps)
    if i_head < HEADS:
        b_q = _rotated(p_x, o, p_c, p_s, p_q_norm, scale, ROPE, INTERLEAVED, Q_NORM, m)
        tl.store(p_q + (i_row * HEADS + i_head) * D + o, b_q.to(p_q.dtype.element_ty), mask=m)
    elif i_head < HEADS + KV_HEADS:
        b_k = _rotated(p_x, o, p_c, p_s, p_k_norm, scale, ROPE, INTERLEAVED, K_NORM, m)
        tl.store(p_k + slot * stride_k + (i_head - HEADS) * D + o, _fitted(b_k, p_k), mask=m)
    else:
        b_v = tl.load(p_x + o, mask=m, other=0.0).to(tl.float32)
        tl.store(p_v + slot * stride_v + (i_head - HEADS - KV_HEADS) * D + o, _fitted(b_v, p_v), mask=m)


@triton.jit
def latent_store_kernel(
    p_q, p_q_rope, p_down, p_positions, p_cos, p_sin, p_slots, p_cache, p_norm, stride_q, stride_head, stride_out, stride_out_head,
    stride_down, stride_cache, eps,
    NOPE: tl.constexpr, RANK: tl.constexpr, BRANK: tl.constexpr, ROPE: tl.constexpr, BROPE: tl.constexpr,
    HEADS: tl.constexpr, INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """Programs 0 … HEADS-1 of a row turn a query head, the last one stores the latent and its key."""
    i_row, i_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o = tl.arange(0, BROPE)
    m = o < ROPE
    position = tl.load(p_positions + i_row)
    p_c, p_s = p_cos + position * (ROPE // 2), p_sin + position * (ROPE // 2)
    if i_head < HEADS:
        b_q = _rotated(p_q + i_row * stride_q + i_head * stride_head + NOPE, o, p_c, p_s, p_norm, 1.0, ROPE, INTERLEAVED, False, m)
        tl.store(p_q_rope + i_row * stride_out + i_head * stride_out_head + o, b_q.to(p_q_rope.dtype.element_ty), mask=m)
    else:
        slot = tl.load(p_slots + i_row)
        o_r = tl.arange(0, BRANK)
        m_r = o_r < RANK
        b_raw = tl.load(p_down + i_row * stride_down + o_r, mask=m_r, other=0.0)
        b_x = b_raw.to(tl.float32)
        scale = 1.0 / tl.sqrt(tl.sum(b_x * b_x) / RANK + eps)
        b_x = (b_x * scale * tl.load(p_norm + o_r, mask=m_r, other=0.0).to(tl.float32)).to(b_raw.dtype).to(tl.float32)
        p_row = p_cache + slot * stride_cache
        tl.store(p_row + o_r, _fitted(b_x, p_cache), mask=m_r)
        b_key = _rotated(p_down + i_row * stride_down + RANK, o, p_c, p_s, p_norm, 1.0, ROPE, INTERLEAVED, False, m)
        tl.store(p_row + RANK + o, _fitted(b_key, p_cache), mask=m)


def rope_store(
    qkv: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, k_cache: Tensor, v_cache: Tensor, heads: int,
    q_norm: Tensor | None = None, k_norm: Tensor | None = None, eps: float = 1e-6, interleaved: bool = False,
) -> Tensor:  # fmt: skip
    """See reference.rope_store. positions, slots [T] int64; cos, sin [positions, rope / 2] float32, contiguous."""
    rows, all_heads, dim = qkv.shape
    kv_heads = k_cache.shape[1]
    assert all_heads == heads + 2 * kv_heads and k_cache.shape == v_cache.shape, (qkv.shape, k_cache.shape, v_cache.shape)
    assert qkv.stride(2) == 1 and qkv.stride(1) == dim and k_cache.stride(1) == v_cache.stride(1) == dim
    assert 2 * cos.shape[1] <= dim and cos.is_contiguous() and sin.is_contiguous() and cos.dtype == torch.float32
    q = torch.empty(rows, heads, dim, dtype=qkv.dtype, device=qkv.device)
    if rows:
        rope_store_kernel[(rows, all_heads)](
            qkv, q, positions, cos, sin, slots, k_cache, v_cache, q_norm, k_norm, qkv.stride(0), k_cache.stride(0), v_cache.stride(0),
            eps, HEADS=heads, KV_HEADS=kv_heads, D=dim, BD=triton.next_power_of_2(dim), ROPE=2 * cos.shape[1],
            INTERLEAVED=interleaved, Q_NORM=q_norm is not None, K_NORM=k_norm is not None, num_warps=1,
        )  # fmt: skip
    return q


def latent_store(
    q: Tensor, down: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, cache: Tensor, norm: Tensor, eps: float,
    nope: int, interleaved: bool = True, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """See reference.latent_store. `q` and `down` may be strided views of one product, and `out` [T, heads, rope] one of a wider tensor."""
    rows, heads, _ = q.shape
    rank, rope = norm.shape[0], 2 * cos.shape[1]
    assert q.shape[2] == nope + rope and down.shape[1] == rank + rope == cache.shape[2] and cache.shape[1] == 1, (q.shape, down.shape)
    assert q.stride(2) == 1 and down.stride(1) == 1 and cache.stride(2) == 1 and cos.is_contiguous() and sin.is_contiguous()
    q_rope = torch.empty(rows, heads, rope, dtype=q.dtype, device=q.device) if out is None else out
    assert q_rope.shape == (rows, heads, rope) and q_rope.stride(2) == 1 and q_rope.dtype == q.dtype, (q_rope.shape, q_rope.dtype)
    if rows:
        latent_store_kernel[(rows, heads + 1)](
            q, q_rope, down, positions, cos, sin, slots, cache, norm, q.stride(0), q.stride(1), q_rope.stride(0), q_rope.stride(1),
            down.stride(0), cache.stride(0), eps,
            NOPE=nope, RANK=rank, BRANK=triton.next_power_of_2(rank), ROPE=rope, BROPE=triton.next_power_of_2(rope),
            HEADS=heads, INTERLEAVED=interleaved, num_warps=2,
        )  # fmt: skip
    return q_rope
