"""What the fused kernels compute, in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x [T, H], residual [T, H] or None, weight [H] → (rms_norm(x + residual) * weight, x + residual).

    The sum is rounded to x's type before it is normed, as it is when the two are separate operations.
    """
    total = x if residual is None else x + residual
    return F.rms_norm(total.float(), (x.shape[-1],), weight.float(), eps).to(x.dtype), total


def silu_mul(gate_up: Tensor) -> Tensor:
    """[T, 2 size] → [T, size]: silu of the first half times the second, in float32."""
    gate, up = gate_up.float().chunk(2, -1)
    return (F.silu(gate) * up).to(gate_up.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """x [T, heads, D], cos and sin [T, D / 2] float32: pairs (2i, 2i + 1), or (i, i + D / 2), turned by angle i; in float32."""
    x = x.float()
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else x.chunk(2, -1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    turned = first * cos - second * sin, second * cos + first * sin
    return torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)


def fitted(x: Tensor, dtype: torch.dtype) -> Tensor:
    """As a cache of `dtype` stores it: float8 is cut off at its largest number."""
    return (x.clamp(-448.0, 448.0) if dtype == torch.float8_e4m3fn else x).to(dtype)


def rope_store(
    qkv: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, k_cache: Tensor, v_cache: Tensor, heads: int,
    q_norm: Tensor | None = None, k_norm: Tensor | None = None, eps: float = 1e-6, interleaved: bool = False,
) -> Tensor:  # fmt: skip
    """qkv [T, heads + 2 kv_heads, D] → q [T, heads, D], normed per head where there is a norm, its first 2 * cos.shape[1] numbers
    rotated; k, treated alike, and v stored in the caches [slots, kv_heads, D]. cos, sin [positions, rope / 2].
    """
    kv_heads, rope = k_cache.shape[1], 2 * cos.shape[1]
    q, k, v = qkv.split([heads, kv_heads, kv_heads], 1)

    def turned(x: Tensor, norm: Tensor | None) -> Tensor:
        x = x.float() if norm is None else F.rms_norm(x.float(), (x.shape[-1],), norm.float(), eps).to(x.dtype).float()
        return torch.cat([rotate(x[..., :rope], cos[positions], sin[positions], interleaved), x[..., rope:]], -1)

    k_cache[slots] = fitted(turned(k, k_norm), k_cache.dtype)
    v_cache[slots] = fitted(v, v_cache.dtype)
    return turned(q, q_norm).to(qkv.dtype)


def latent_store(
    q: Tensor, down: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, slots: Tensor, cache: Tensor, norm: Tensor, eps: float,
    nope: int, interleaved: bool = True,
) -> Tensor:  # fmt: skip
    """q [T, heads, nope + rope], down [T, rank + rope] → the rotated part of q [T, heads, rope]; the normed latent and the rotated
    key stored in `cache` [slots, 1, rank + rope]."""
    rank = norm.shape[0]
    latent = F.rms_norm(down[:, :rank].float(), (rank,), norm.float(), eps).to(q.dtype).float()
    key = rotate(down[:, None, rank:], cos[positions], sin[positions], interleaved)[:, 0]
    cache[slots, 0] = fitted(torch.cat([latent, key], -1), cache.dtype)
    return rotate(q[..., nope:], cos[positions], sin[positions], interleaved).to(q.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [T, K], weight [N, K], bias [N] or None → [T, N], summed in float32."""
    out = x.float() @ weight.float().T
    return (out if bias is None else out + bias.float()).to(x.dtype)
