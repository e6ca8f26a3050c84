"""The small operations between the products: src/fused.h. What they compute, in plain torch: fused/reference.py.

Activations are float32 or bfloat16, and so is the pool of keys and values, independently of them. All arithmetic is in float32, with one
rounding at the end. A row's numbers depend on nothing but that row.
"""

from __future__ import annotations

from ctypes import c_float, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from mtpserve_kernels.cpu.library import Op
from mtpserve_kernels.cpu.linear import TYPES

_POINTERS = [c_void_p] * 3  # positions, cos, sin
_add_rms_norm = Op(
    "mtp_add_rms_norm", c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_int32, c_void_p, c_void_p, c_int64, c_int64, c_int32, c_float
)
_silu_mul = Op("mtp_silu_mul", c_void_p, c_int64, c_void_p, c_int64, c_int64, c_int32)
_rope_store = Op(
    "mtp_rope_store", c_void_p, c_int64, c_void_p, c_int32, c_int64, c_int64, c_int64, c_int64, *_POINTERS, c_int64, c_int32, c_void_p,
    c_void_p, c_int64, c_void_p, c_int64, c_int32,
)  # fmt: skip
_latent_store = Op(
    "mtp_latent_store", c_void_p, c_int64, c_int64, c_void_p, c_int64, c_int64, c_void_p, c_int64, c_int32, c_int64, c_int64, c_int64,
    c_int64, *_POINTERS, c_int64, c_int32, c_void_p, c_void_p, c_int64, c_int32, c_void_p, c_int32, c_float,
)  # fmt: skip


def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x [T, H], residual [T, H] or None, weight [H] → (rms_norm(x + residual) * weight, x + residual)."""
    rows, size = x.shape
    assert x.stride(1) == 1 and weight.shape == (size,) and weight.is_contiguous(), (x.shape, x.stride(), weight.shape)
    assert residual is None or (residual.shape == x.shape and residual.stride(1) == 1 and residual.dtype == x.dtype)
    normed = torch.empty(rows, size, dtype=x.dtype)
    total = x if residual is None else torch.empty(rows, size, dtype=x.dtype)
    step = 0 if residual is None else residual.stride(0)
    _add_rms_norm(x, x.stride(0), residual, step, weight, TYPES[weight.dtype], normed, total, rows, size, TYPES[x.dtype], eps)
    return normed, total


def silu_mul(gate_up: Tensor) -> Tensor:
    """[…, 2 size] → […, size]: silu of the first half times the second."""
    flat = gate_up.flatten(0, -2)
    assert flat.stride(1) == 1, flat.stride()
    out = torch.empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2, dtype=gate_up.dtype)
    _silu_mul(flat, flat.stride(0), out, len(flat), out.shape[-1], TYPES[gate_up.dtype])
    return out


def rope_store(
    qkv: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, keys: Tensor, values: Tensor, heads: int, interleaved: bool
) -> Tensor:
    """qkv [T, heads + 2 kv_heads, D] → q [T, heads, D], its first 2 * cos.shape[1] numbers rotated; k, rotated alike, and v are stored in
    `slots` of keys and values [slots, kv_heads, D].

    positions, slots [T] int64; cos, sin [positions, rope / 2] float32.
    """
    rows, all_heads, dim = qkv.shape
    kv_heads, rope = keys.shape[1], 2 * cos.shape[1]
    assert all_heads == heads + 2 * kv_heads and keys.shape == values.shape and keys.shape[2] == dim, (qkv.shape, keys.shape, values.shape)
    assert qkv.stride()[1:] == (dim, 1) and keys.stride()[1:] == values.stride()[1:] == (dim, 1) and keys.dtype == values.dtype
    assert rope <= dim
    check_tables(positions, slots, cos, sin)
    q = torch.empty(rows, heads, dim, dtype=qkv.dtype)
    _rope_store(
        qkv, qkv.stride(0), q, TYPES[qkv.dtype], rows, heads, kv_heads, dim, positions, cos, sin, rope, interleaved, slots, keys,
        keys.stride(0), values, values.stride(0), TYPES[keys.dtype],
    )  # fmt: skip
    return q


def latent_store(
    q: Tensor, row: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, keys: Tensor, norm: Tensor, eps: float, nope: int,
    interleaved: bool, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """q [T, heads, nope + rope], row [T, rank + rope] → the rotated part of q [T, heads, rope]; the latent, normed with `norm` [rank] and
    `eps`, and the rotated key after it are stored in `slots` [T] of `keys` [slots, 1, rank + rope].

    `q` and `row` may be views of one product, and `out`, where the result goes, one of the whole query [T, heads, rank + rope].
    """
    rows, heads, _ = q.shape
    rank, rope = norm.shape[0], 2 * cos.shape[1]
    assert q.shape[2] == nope + rope and row.shape == (rows, rank + rope) and keys.shape[1:] == (1, rank + rope), (q.shape, row.shape)
    assert q.stride(2) == row.stride(1) == keys.stride(2) == 1 and q.dtype == row.dtype and norm.is_contiguous()
    check_tables(positions, slots, cos, sin)
    if out is None:
        out = torch.empty(rows, heads, rope, dtype=q.dtype)
    assert out.shape == (rows, heads, rope) and out.stride(2) == 1 and out.dtype == q.dtype, (out.shape, out.dtype)
    _latent_store(
        q, q.stride(0), q.stride(1), out, out.stride(0), out.stride(1), row, row.stride(0), TYPES[q.dtype], rows, heads, nope, rank,
        positions, cos, sin, rope, interleaved, slots, keys, keys.stride(0), TYPES[keys.dtype], norm, TYPES[norm.dtype], eps,
    )  # fmt: skip
    return out


def check_tables(positions: Tensor, slots: Tensor, cos: Tensor, sin: Tensor) -> None:
    assert positions.dtype == slots.dtype == torch.int64 and positions.is_contiguous() and slots.is_contiguous()
    assert cos.dtype == sin.dtype == torch.float32 and cos.is_contiguous() and sin.is_contiguous()
