"""Between the projections and attention: norms per head, rotation, and the write into the pages, one launch.

`rope_store` serves grouped heads, `latent_store` the latent layout. A program has several heads of one row: a GPU starts 1.6 programs
in a nanosecond (an H200, measured), which with one head for each took longer than all loads and stores. The numbers of a pair are in one
thread. Positions, slots and tables are read before the launch before has ended: it must not write them.

    a head   first[0 … PAIRS)   second[0 … PAIRS)   rest[ROPE … D)      pairs are (i, i + PAIRS), or interleaved (2i, 2i + 1)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpserve_kernels import dependent_launch, tuned
from mtpserve_kernels.dependent_launch import grid_dependency_wait
from mtpserve_kernels.tiling import type_name

NUMBERS, WARPS = 1024, 2  # that a program rotates, 16 a thread


@triton.jit
def _load_pairs(p_x, m_head, PAIRS: tl.constexpr, BP: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The first and the second numbers of the pairs of heads that begin at p_x [heads, 1]: [heads, BP] each."""
    if INTERLEAVED:
        o = tl.arange(0, 2 * BP)[None, :]
        b_x = tl.load(p_x + o, mask=m_head & (o < 2 * PAIRS), other=0.0)
        b_first, b_second = tl.split(tl.reshape(b_x, [b_x.shape[0], BP, 2]))
    else:
        o = tl.arange(0, BP)[None, :]
        b_first = tl.load(p_x + o, mask=m_head & (o < PAIRS), other=0.0)
        b_second = tl.load(p_x + PAIRS + o, mask=m_head & (o < PAIRS), other=0.0)
    return b_first, b_second


@triton.jit
def _store_pairs(p_out, b_first, b_second, m_head, PAIRS: tl.constexpr, BP: tl.constexpr, INTERLEAVED: tl.constexpr):
    """As `_load_pairs`, to heads that begin at p_out [heads, 1]."""
    if INTERLEAVED:
        o = tl.arange(0, 2 * BP)[None, :]
        tl.store(p_out + o, _fitted(tl.interleave(b_first, b_second), p_out), mask=m_head & (o < 2 * PAIRS))
    else:
        o = tl.arange(0, BP)[None, :]
        tl.store(p_out + o, _fitted(b_first, p_out), mask=m_head & (o < PAIRS))
        tl.store(p_out + PAIRS + o, _fitted(b_second, p_out), mask=m_head & (o < PAIRS))


@triton.jit
def _angles(p_cos, p_sin, position, BH: tl.constexpr, PAIRS: tl.constexpr, BP: tl.constexpr):
    """cos and sin of the pairs' angles at a position, the same [BH, BP] for all heads: as their numbers are spread over the threads."""
    o = position * PAIRS + tl.zeros([BH, 1], tl.int32) + tl.arange(0, BP)[None, :]
    m = (tl.zeros([BH, 1], tl.int32) + tl.arange(0, BP)[None, :]) < PAIRS
    return tl.load(p_cos + o, mask=m, other=0.0), tl.load(p_sin + o, mask=m, other=0.0)


@triton.jit
def _rotated(b_first, b_second, b_cos, b_sin):
    """float32"""
    b_first, b_second = b_first.to(tl.float32), b_second.to(tl.float32)
    return b_first * b_cos + -b_second * b_sin, b_second * b_cos + b_first * b_sin


@triton.jit
def _scaled(b_x, scale, b_weight):
    """A normed number, rounded as the separate operation rounds it."""
    return (b_x.to(tl.float32) * scale * b_weight.to(tl.float32)).to(b_x.dtype)


@triton.jit
def _squares(b_x):
    b_x = b_x.to(tl.float32)
    return tl.sum(b_x * b_x, 1, keep_dims=True)


@triton.jit
def _fitted(b, p_out):
    """As the output stores it. float8 is cut off at its largest number; comparisons let NaN through, which must stay one."""
    if p_out.dtype.element_ty == tl.float8e4nv:
        b = tl.where(b > 448.0, 448.0, tl.where(b < -448.0, -448.0, b))
    return b.to(p_out.dtype.element_ty)


@triton.jit
def rope_store_kernel(
    p_qkv, p_q, p_positions, p_cos, p_sin, p_slots, p_k, p_v, p_q_norm, p_k_norm,
    stride_row, stride_k, stride_v, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, ROPE: tl.constexpr, BH: tl.constexpr,
    INTERLEAVED: tl.constexpr, NORM: tl.constexpr, launch_pdl: tl.constexpr,
):  # fmt: skip
    """A program has BH query heads of a row, or as many key heads and their values."""
    PAIRS: tl.constexpr = ROPE // 2
    BP: tl.constexpr = triton.next_power_of_2(PAIRS) if PAIRS > 1 else 1
    BR: tl.constexpr = triton.next_power_of_2(D - ROPE) if D > ROPE + 1 else 1
    QUERIES: tl.constexpr = (HEADS + BH - 1) // BH  # programs
    i_row, i_block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    is_query = i_block < QUERIES
    first_head = tl.where(is_query, i_block * BH, (i_block - QUERIES) * BH)
    o_head = first_head + tl.arange(0, BH)[:, None]
    m_head = o_head < tl.where(is_query, HEADS, KV_HEADS)
    m_value = o_head < tl.where(is_query, 0, KV_HEADS)
    o_rest = ROPE + tl.arange(0, BR)[None, :]
    m_rest = m_head & (o_rest < D)
    slot = tl.load(p_slots + i_row)
    b_cos, b_sin = _angles(p_cos, p_sin, tl.load(p_positions + i_row), BH, PAIRS, BP)
    if NORM:
        p_norm = tl.where(is_query, p_q_norm, p_k_norm) + tl.zeros([BH, 1], tl.int32)
        b_first_norm, b_second_norm = _load_pairs(p_norm, m_head, PAIRS, BP, INTERLEAVED)
        b_rest_norm = tl.load(p_norm + o_rest, mask=m_rest, other=0.0)

    grid_dependency_wait(launch_pdl)
    p_x = p_qkv + i_row * stride_row + (tl.where(is_query, 0, HEADS) + o_head) * D
    p_values = p_x + KV_HEADS * D
    b_first_value, b_second_value = _load_pairs(p_values, m_value, PAIRS, BP, INTERLEAVED)
    b_first, b_second = _load_pairs(p_x, m_head, PAIRS, BP, INTERLEAVED)
    b_rest = tl.load(p_x + o_rest, mask=m_rest, other=0.0)
    b_rest_value = tl.load(p_values + o_rest, mask=m_rest & m_value, other=0.0)
    if NORM:
        scale = tl.rsqrt((_squares(b_first) + _squares(b_second) + _squares(b_rest)) / D + eps)
        b_first, b_second = _scaled(b_first, scale, b_first_norm), _scaled(b_second, scale, b_second_norm)
        b_rest = _scaled(b_rest, scale, b_rest_norm)
    b_first, b_second = _rotated(b_first, b_second, b_cos, b_sin)
    if is_query:
        p_out = p_q + (i_row * HEADS + o_head) * D
        _store_pairs(p_out, b_first, b_second, m_head, PAIRS, BP, INTERLEAVED)
        tl.store(p_out + o_rest, _fitted(b_rest, p_q), mask=m_rest)
    else:
        p_key, p_value = p_k + slot * stride_k + o_head * D, p_v + slot * stride_v + o_head * D
        _store_pairs(p_key, b_first, b_second, m_head, PAIRS, BP, INTERLEAVED)
        tl.store(p_key + o_rest, _fitted(b_rest.to(tl.float32), p_k), mask=m_rest)
        _store_pairs(p_value, b_first_value.to(tl.float32), b_second_value.to(tl.float32), m_head, PAIRS, BP, INTERLEAVED)
        tl.store(p_value + o_rest, _fitted(b_rest_value.to(tl.float32), p_v), mask=m_rest)


@triton.jit
def latent_store_kernel(
    p_q, p_q_rope, p_down, p_positions, p_cos, p_sin, p_slots, p_cache, p_norm, stride_q, stride_head, stride_out, stride_out_head,
    stride_down, stride_cache, eps,
    NOPE: tl.constexpr, RANK: tl.constexpr, BRANK: tl.constexpr, ROPE: tl.constexpr, BH: tl.constexpr,
    HEADS: tl.constexpr, INTERLEAVED: tl.constexpr, launch_pdl: tl.constexpr,
):  # fmt: skip
    """A program rotates BH query heads of a row; the last one stores the latent and its key."""
    PAIRS: tl.constexpr = ROPE // 2
    BP: tl.constexpr = triton.next_power_of_2(PAIRS) if PAIRS > 1 else 1
    i_row, i_block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    is_latent = i_block == (HEADS + BH - 1) // BH
    o_head = tl.where(is_latent, 0, i_block * BH) + tl.arange(0, BH)[:, None]
    m_head = o_head < tl.where(is_latent, 1, HEADS)
    o_rank = tl.arange(0, BRANK)
    m_rank = o_rank < tl.where(is_latent, RANK, 0)
    p_latent = p_cache + tl.load(p_slots + i_row) * stride_cache
    b_cos, b_sin = _angles(p_cos, p_sin, tl.load(p_positions + i_row), BH, PAIRS, BP)
    b_norm = tl.load(p_norm + o_rank, mask=m_rank, other=0.0)

    grid_dependency_wait(launch_pdl)
    p_row = p_down + i_row * stride_down
    p_x = tl.where(is_latent, p_row + RANK, p_q + i_row * stride_q + NOPE) + o_head * stride_head
    b_latent = tl.load(p_row + o_rank, mask=m_rank, other=0.0)
    b_first, b_second = _load_pairs(p_x, m_head, PAIRS, BP, INTERLEAVED)
    if is_latent:
        b_square = b_latent.to(tl.float32)
        scale = tl.rsqrt(tl.sum(b_square * b_square) / RANK + eps)
        tl.store(p_latent + o_rank, _fitted(_scaled(b_latent, scale, b_norm).to(tl.float32), p_cache), mask=m_rank)
    b_first, b_second = _rotated(b_first, b_second, b_cos, b_sin)
    if is_latent:
        _store_pairs(p_latent + RANK + tl.zeros([BH, 1], tl.int32), b_first, b_second, m_head, PAIRS, BP, INTERLEAVED)
    else:
        p_out = p_q_rope + i_row * stride_out + o_head * stride_out_head
        _store_pairs(p_out, b_first, b_second, m_head, PAIRS, BP, INTERLEAVED)


def block_heads(heads: int, dim: int) -> int:
    """Heads of a program that rotates `dim` numbers of each of `heads`: the same for all numbers of rows."""
    return min(max(NUMBERS // power_of_2(dim), 1), power_of_2(heads))


def power_of_2(number: int) -> int:
    """The smallest that is not below a positive number."""
    return 1 << (number - 1).bit_length()


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
    assert (q_norm is None) == (k_norm is None), "queries and keys both have a norm, or neither"
    q = torch.empty(rows, heads, dim, dtype=qkv.dtype, device=qkv.device)
    entry = tuned.tiling("rope_store", f"{type_name(qkv.dtype)} heads{heads} kv{kv_heads} D{dim}", rows, qkv.device) or {}
    block = entry.get("BH", block_heads(heads, dim))
    if rows:
        rope_store_kernel[(rows, triton.cdiv(heads, block) + triton.cdiv(kv_heads, block))](
            qkv, q, positions, cos, sin, slots, k_cache, v_cache, q_norm, k_norm, qkv.stride(0), k_cache.stride(0), v_cache.stride(0),
            eps, HEADS=heads, KV_HEADS=kv_heads, D=dim, ROPE=2 * cos.shape[1], BH=block, INTERLEAVED=interleaved,
            NORM=q_norm is not None, launch_pdl=dependent_launch.enabled(qkv.device), num_warps=entry.get("warps", WARPS),
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
    block = block_heads(heads, rope)
    if rows:
        latent_store_kernel[(rows, triton.cdiv(heads, block) + 1)](
            q, q_rope, down, positions, cos, sin, slots, cache, norm, q.stride(0), q.stride(1), q_rope.stride(0), q_rope.stride(1),
            down.stride(0), cache.stride(0), eps, NOPE=nope, RANK=rank, BRANK=triton.next_power_of_2(rank), ROPE=rope, BH=block,
            HEADS=heads, INTERLEAVED=interleaved, launch_pdl=dependent_launch.enabled(q.device), num_warps=WARPS,
        )  # fmt: skip
    return q_rope
