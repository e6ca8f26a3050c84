"""The launches of kernels over rows that tests/kernels/matrix.py compiles: norms, rotation and storing, silu."""

from __future__ import annotations

import torch
from mtpserve_kernels.fused.norm import add_rms_norm
from mtpserve_kernels.fused.rope import latent_store, rope_store
from mtpserve_kernels.fused.silu import silu_mul

from tests.kernels.table_entries import ints

ROWS = ints(4)  # positions and slots
BF16 = torch.bfloat16


def norms(dtype: torch.dtype) -> None:
    """1 to 16 warps, and more numbers than 16 warps hold with 8 a thread."""
    for hidden in (128, 896, 2048, 4096, 7168, 16384):
        x = torch.zeros(4, hidden, dtype=dtype)
        for residual in (x, None):
            add_rms_norm(x, residual, x[0], 1e-6)
    silu_mul(torch.zeros(4, 4096, dtype=dtype))


def grouped_heads(stored: torch.dtype, dtype: torch.dtype, interleaved: bool) -> None:
    """Each shape with a norm or without, in turn: of numbers stored in order those that are not of interleaved ones."""
    for number, (heads, kv_heads, dim, rope) in enumerate(
        ((32, 8, 128, 128), (14, 2, 64, 64), (16, 2, 256, 64), (96, 8, 128, 64), (32, 4, 512, 512))
    ):
        cache, table = torch.zeros(64, kv_heads, dim, dtype=stored), torch.zeros(64, rope // 2)
        qkv = torch.zeros(4, heads + 2 * kv_heads, dim, dtype=dtype)
        norm = qkv[0, 0] if (number % 2 == 0) == interleaved else None
        rope_store(qkv, ROWS, table, table, ROWS, cache, cache, heads, norm, norm, 1e-6, interleaved)


def latents(stored: torch.dtype, dtype: torch.dtype, interleaved: bool) -> None:
    cache, table, down = torch.zeros(64, 1, 576, dtype=stored), torch.zeros(64, 32), torch.zeros(4, 576, dtype=dtype)
    for heads in (1, 16) if interleaved else (8, 128):
        q = torch.zeros(4, heads, 192, dtype=dtype)
        latent_store(q, down, ROWS, table, table, ROWS, cache, down[0, :512], 1e-6, 128, interleaved)


def launch(fp8: bool) -> None:
    """float16 is as wide as bfloat16, and needs as much of a chip."""
    norms(torch.float16)
    for dtype in (BF16, torch.float32):
        norms(dtype)
        for stored in (dtype, torch.float8_e4m3fn) if fp8 else (dtype,):
            for interleaved in (False, True):
                grouped_heads(stored, dtype, interleaved)
                latents(stored, dtype, interleaved)
