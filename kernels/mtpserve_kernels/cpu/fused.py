"""The small operations between the products: src/fused.h. What they compute, in plain torch: fused/reference.py.

Activations are float32 or bfloat16, and so is the pool of keys and values, independently of them. All arithmetic is in float32, with one
rounding at the end. A row's numbers depend on nothing but that row.
"""

from __future__ import annotations

from ctypes import POINTER, Structure, byref, c_bool, c_float, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from mtpserve_kernels.cpu.library import Op
from mtpserve_kernels.cpu.linear import TYPES, Heads, heads_of


class Norm(Structure):
    _fields_ = [("weight", c_void_p), ("type", c_int32), ("eps", c_float)]


class AddRmsNorm(Structure):
    _fields_ = [
        ("x", c_void_p), ("residual", c_void_p), ("stride", c_int64), ("residual_stride", c_int64), ("norm", Norm), ("normed", c_void_p),
        ("normed_stride", c_int64), ("total", c_void_p), ("rows", c_int64), ("size", c_int64), ("type", c_int32), ("at", c_void_p),
    ]  # fmt: skip


class Rotation(Structure):
    _fields_ = [("positions", c_void_p), ("cos", c_void_p), ("sin", c_void_p), ("dim", c_int64), ("interleaved", c_bool)]


class Pool(Structure):
    _fields_ = [("data", c_void_p), ("stride", c_int64), ("type", c_int32)]


class RopeStore(Structure):
    _fields_ = [
        ("qkv", c_void_p), ("stride", c_int64), ("q", c_void_p), ("type", c_int32), ("rows", c_int64), ("heads", c_int64),
        ("kv_heads", c_int64), ("dim", c_int64), ("slots", c_void_p), ("keys", Pool), ("values", Pool), ("q_norm", Norm), ("k_norm", Norm),
    ]  # fmt: skip


class LatentStore(Structure):
    _fields_ = [
        ("q", Heads), ("turned", Heads), ("row", c_void_p), ("row_stride", c_int64), ("rows", c_int64), ("heads", c_int64),
        ("nope", c_int64), ("rank", c_int64), ("slots", c_void_p), ("keys", Pool), ("norm", Norm),
    ]  # fmt: skip


_add_rms_norm = Op("mtp_add_rms_norm", POINTER(AddRmsNorm))
_silu_mul = Op("mtp_silu_mul", c_void_p, c_int64, c_void_p, c_int64, c_int64, c_int32)
_rope_store = Op("mtp_rope_store", POINTER(RopeStore), POINTER(Rotation))
_latent_store = Op("mtp_latent_store", POINTER(LatentStore), POINTER(Rotation))


def norm_of(weight: Tensor | None, eps: float) -> Norm:
    """It does not keep the weight alive."""
    return Norm() if weight is None else Norm(weight.data_ptr(), TYPES[weight.dtype], eps)


def rotation_of(positions: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Rotation:
    """positions [T] int64; cos, sin [length, rope / 2] float32. It keeps none of them alive."""
    assert positions.dtype == torch.int64 and positions.is_contiguous()
    assert cos.dtype == sin.dtype == torch.float32 and cos.is_contiguous() and sin.is_contiguous()
    return Rotation(positions.data_ptr(), cos.data_ptr(), sin.data_ptr(), 2 * cos.shape[1], interleaved)


def pool_of(part: Tensor) -> Pool:
    return Pool(part.data_ptr(), part.stride(0), TYPES[part.dtype])


def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x [T, H], residual [T, H] or None, weight [H] → (rms_norm(x + residual) * weight, x + residual)."""
    rows, size = x.shape
    assert x.stride(1) == 1 and weight.shape == (size,) and weight.is_contiguous(), (x.shape, x.stride(), weight.shape)
    assert residual is None or (residual.shape == x.shape and residual.stride(1) == 1 and residual.dtype == x.dtype)
    normed = torch.empty(rows, size, dtype=x.dtype)
    total = x if residual is None else torch.empty(rows, size, dtype=x.dtype)
    step = 0 if residual is None else residual.stride(0)
    op = AddRmsNorm(
        x.data_ptr(), None if residual is None else residual.data_ptr(), x.stride(0), step, norm_of(weight, eps), normed.data_ptr(),
        size, total.data_ptr(), rows, size, TYPES[x.dtype],
    )  # fmt: skip
    _add_rms_norm(byref(op))
    return normed, total


def silu_mul(gate_up: Tensor) -> Tensor:
    """[…, 2 size] → […, size]: silu of the first half times the second."""
    flat = gate_up.flatten(0, -2)
    assert flat.stride(1) == 1, flat.stride()
    out = torch.empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2, dtype=gate_up.dtype)
    _silu_mul(flat, flat.stride(0), out, len(flat), out.shape[-1], TYPES[gate_up.dtype])
    return out


def rope_store(
    qkv: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, keys: Tensor, values: Tensor, heads: int,
    q_norm: Tensor | None = None, k_norm: Tensor | None = None, eps: float = 1e-6, interleaved: bool = False,
) -> Tensor:  # fmt: skip
    """qkv [T, heads + 2 kv_heads, D] → q [T, heads, D], normed per head where there is a norm [D], its first 2 * cos.shape[1] numbers
    rotated; k, treated alike, and v are stored in `slots` of keys and values [slots, kv_heads, D].

    positions, slots [T] int64; cos, sin [positions, rope / 2] float32.
    """
    rows, all_heads, dim = qkv.shape
    kv_heads, rope = keys.shape[1], 2 * cos.shape[1]
    assert all_heads == heads + 2 * kv_heads and keys.shape == values.shape and keys.shape[2] == dim, (qkv.shape, keys.shape, values.shape)
    assert qkv.stride()[1:] == (dim, 1) and keys.stride()[1:] == values.stride()[1:] == (dim, 1) and keys.dtype == values.dtype
    assert rope <= dim
    assert all(norm is None or (norm.shape == (dim,) and norm.is_contiguous()) for norm in (q_norm, k_norm))
    assert slots.dtype == torch.int64 and slots.is_contiguous()
    rotation = rotation_of(positions, cos, sin, interleaved)
    q = torch.empty(rows, heads, dim, dtype=qkv.dtype)
    op = RopeStore(
        qkv.data_ptr(), qkv.stride(0), q.data_ptr(), TYPES[qkv.dtype], rows, heads, kv_heads, dim, slots.data_ptr(), pool_of(keys),
        pool_of(values), norm_of(q_norm, eps), norm_of(k_norm, eps),
    )  # fmt: skip
    _rope_store(byref(op), byref(rotation))
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
    assert slots.dtype == torch.int64 and slots.is_contiguous()
    rotation = rotation_of(positions, cos, sin, interleaved)
    if out is None:
        out = torch.empty(rows, heads, rope, dtype=q.dtype)
    assert out.shape == (rows, heads, rope) and out.stride(2) == 1 and out.dtype == q.dtype, (out.shape, out.dtype)
    op = LatentStore(
        heads_of(q), heads_of(out), row.data_ptr(), row.stride(0), rows, heads, nope, rank, slots.data_ptr(), pool_of(keys),
        norm_of(norm, eps),
    )  # fmt: skip
    _latent_store(byref(op), byref(rotation))
    return out
