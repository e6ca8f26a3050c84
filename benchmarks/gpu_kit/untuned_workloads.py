"""Kernels that have no table of tilings: they are timed as they are, for their bytes per second."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from unittest.mock import patch

import torch
from torch import Tensor

from gpu_kit.models import DeviceConfig
from gpu_kit.timing import rotation

RunBytes = tuple[Callable[[int], object], float]  # the number of the call; bytes that one moves


@dataclass(frozen=True, slots=True)
class UntunedWorkload:
    op: str
    rows: int
    sizes: tuple[int, ...]

    def call(self, device_config: DeviceConfig) -> RunBytes:
        return OPS[self.op](device_config, self.rows, *self.sizes)


def x_of(device_config: DeviceConfig, rows: int, width: int) -> Tensor:
    """The interpreter's bfloat16 products are wrong, and float32 has no float8 kernels."""
    return torch.randn(rows, width, device=device_config.device, dtype=torch.float16 if device_config.toy else torch.bfloat16)


def float8(device_config: DeviceConfig, rows: int, outputs: int, inputs: int) -> RunBytes:
    from mtpserve_kernels.quant.linear_fp8 import linear_fp8

    copies = 1 if device_config.toy else rotation(outputs * inputs)
    weights = [torch.randn(outputs, inputs, device=device_config.device).to(torch.float8_e4m3fn) for _ in range(copies)]
    scale, x = torch.rand(-(-outputs // 128), -(-inputs // 128), device=device_config.device), x_of(device_config, rows, inputs)
    return lambda i: linear_fp8(x, weights[i % copies], scale), outputs * inputs + x.nbytes + 2 * rows * outputs


def four_bits(device_config: DeviceConfig, rows: int, outputs: int, inputs: int) -> RunBytes:
    from mtpserve_kernels.quant.rows import linear_rows

    copies = 1 if device_config.toy else rotation(outputs * inputs / 2)
    weights = torch.randint(256, (copies, outputs, inputs // 2), dtype=torch.uint8, device=device_config.device)
    x = x_of(device_config, rows, inputs)
    scale = torch.rand(outputs, inputs // 32, device=device_config.device).to(x.dtype)
    return lambda i: linear_rows(x, weights[i % copies], scale), outputs * inputs / 2 + scale.nbytes + x.nbytes + 2 * rows * outputs


def four_bit_experts(device_config: DeviceConfig, rows: int, experts: int, top: int, hidden: int, size: int) -> RunBytes:
    from mtpserve_kernels.moe.experts_rows import experts_rows

    device = device_config.device
    matrices = [
        torch.randint(256, shape, dtype=torch.uint8, device=device)
        for shape in ((experts, 2 * size, hidden // 2), (experts, hidden, size // 2))
    ]
    scales = [torch.rand((*matrix.shape[:2], matrix.shape[2] // 16), device=device) for matrix in matrices]
    x, weights = x_of(device_config, rows, hidden), torch.rand(rows, top, device=device)
    expert_ids = torch.rand(8, rows, experts, device=device).topk(top, -1).indices
    hit_share = 1 - (1 - top / experts) ** rows

    def run(i: int) -> object:
        return experts_rows(x, weights, expert_ids[i % 8], matrices[0], scales[0], None, matrices[1], scales[1], None)

    return run, hit_share * sum(part.nbytes for part in (*matrices, *scales))


def silu(device_config: DeviceConfig, rows: int, size: int) -> RunBytes:
    from mtpserve_kernels.fused.silu import silu_mul

    x = x_of(device_config, rows, 2 * size)
    return lambda i: silu_mul(x), 1.5 * x.nbytes


def latent(device_config: DeviceConfig, rows: int, heads: int, rank: int, rope: int) -> RunBytes:
    from mtpserve_kernels.fused.rope import latent_store

    device = device_config.device
    table, places, norm = torch.randn(1024, rope // 2, device=device), torch.arange(rows, device=device), x_of(device_config, 1, rank)[0]
    q, down = x_of(device_config, rows, heads * 2 * rope).view(rows, heads, -1), x_of(device_config, rows, rank + rope)
    cache = down.new_empty(rows, 1, rank + rope)
    num_bytes = 2.0 * down.nbytes + q.nbytes  # half of each head is rotated
    return lambda i: latent_store(q, down, places, table, table, places, cache, norm, 1e-6, rope), num_bytes


def norm_chain(device_config: DeviceConfig, rows: int, hidden: int, dependent: int) -> RunBytes:
    """Norms that follow one another, with programmatic dependent launch (where the chip has it) and without."""
    from mtpserve_kernels import dependent_launch
    from mtpserve_kernels.fused.norm import add_rms_norm

    weight, x = x_of(device_config, 1, hidden)[0], x_of(device_config, rows, hidden)

    def run(i: int) -> object:
        with patch.dict(os.environ, {dependent_launch.DISABLE: str(1 - dependent)}):
            return add_rms_norm(x, x, weight, 1e-6)

    return run, 4.0 * x.nbytes


def compaction(device_config: DeviceConfig, rows: int, layers: int, kv_heads: int, dim: int) -> RunBytes:
    """Four rows of each request, in all layers."""
    from mtpserve_kernels.cache.compact import compact

    pool = x_of(device_config, layers * rows * 64, kv_heads * dim).view(layers, rows * 64, kv_heads, dim)
    target = (torch.arange(rows, device=device_config.device) * 64).unsqueeze(1) + torch.arange(1, 5, device=device_config.device)
    return lambda i: compact(pool, target + 3, target), 2 * layers * target.numel() * kv_heads * dim * 2


def argmax(device_config: DeviceConfig, rows: int, vocab: int, own: int) -> RunBytes:
    """By the kernel, and by torch."""
    from mtpserve_kernels.spec.argmax import argmax as kernel

    logits = torch.randn(rows, vocab, device=device_config.device)
    return (lambda i: kernel(logits)) if own else (lambda i: logits.argmax(-1)), logits.nbytes


def sampled_verdict(device_config: DeviceConfig, rows: int, vocab: int, cuts: int) -> RunBytes:
    """Without drafts, of a temperature alone, and with top-p."""
    from mtpserve_kernels.spec.accept import accept

    device = device_config.device
    logits, req_indices, one = (
        torch.randn(rows, 1, vocab, device=device) * 3,
        torch.arange(rows, device=device),
        torch.ones(rows, device=device),
    )
    none, drafts = torch.zeros_like(req_indices), torch.zeros(rows, 0, dtype=torch.int64, device=device)
    numbers = one, none, 0.9 * one, 0 * one, none, none.bool()
    options = {"any_top_k": False, "any_top_p": bool(cuts), "any_min_p": False}
    return lambda i: accept(logits, drafts, none, None, None, req_indices, none, *numbers, None, 0, **options), logits.nbytes


def sampled_drafts(device_config: DeviceConfig, rows: int, vocab: int, cuts: int) -> RunBytes:
    """With what they were drawn from; of a temperature alone, and with top-p."""
    from mtpserve_kernels.spec.draw import draw

    device = device_config.device
    logits, req_indices, one = (
        torch.randn(rows, vocab, device=device) * 3,
        torch.arange(rows, device=device),
        torch.ones(rows, device=device),
    )
    none, q = torch.zeros_like(req_indices), torch.empty_like(logits)
    numbers = one, none, 0.9 * one, 0 * one, none, none.bool(), q
    options = {"any_top_k": False, "any_top_p": bool(cuts), "any_min_p": False}
    return lambda i: draw(logits, req_indices, none, *numbers, **options), logits.nbytes + q.nbytes


def head(device_config: DeviceConfig, rows: int, vocab: int, hidden: int, wide: int) -> RunBytes:
    """Float32 logits: as the layers multiply them, and rounded and widened. On a CPU both are."""
    from mtpserve.layers.devices.torch_kernels import torch_kernels
    from mtpserve.layers.linear import Linear
    from mtpserve.quant.unquantized import Unquantized

    x = x_of(device_config, rows, hidden)
    with torch.device("meta"):
        layer = Linear(hidden, (vocab,), Unquantized(torch_kernels()))
    layer.weight = torch.nn.Parameter(torch.randn(vocab, hidden, device=x.device, dtype=x.dtype) * hidden**-0.5, requires_grad=False)
    num_bytes = (vocab * hidden + rows * hidden) * 2.0 + rows * vocab * 4
    return (lambda i: layer(x, torch.float32)) if wide else (lambda i: layer(x).float()), num_bytes


OPS: dict[str, Callable[..., RunBytes]] = {
    "linear_fp8": float8, "linear_rows": four_bits, "experts_rows": four_bit_experts, "silu_mul": silu, "latent_store": latent,
    "norm_chain": norm_chain, "compact": compaction, "argmax": argmax, "accept_sampled": sampled_verdict, "draw": sampled_drafts,
    "head": head,
}  # fmt: skip


def untuned_workloads(toy: bool) -> list[UntunedWorkload]:
    """Sizes of 7 to 8 B parameters, and DeepSeek-V2-Lite's experts and heads."""
    rows, many_rows = ((2,), ()) if toy else ((1, 4, 16, 64), (128, 512))
    short = {
        "silu_mul": [(64,) if toy else (11008,)],
        "latent_store": [(2, 32, 16) if toy else (16, 512, 64)],
        "norm_chain": [(64, 1), (64, 0)] if toy else [(4096, 1), (4096, 0)],
        "argmax": [(9000, 1), (9000, 0)] if toy else [(151936, 1), (151936, 0)],
        "accept_sampled": [(9000, 0), (9000, 1)] if toy else [(151936, 0), (151936, 1)],
        "draw": [(9000, 0), (9000, 1)] if toy else [(151936, 0), (151936, 1)],
        "head": [(300, 64, 1), (300, 64, 0)] if toy else [(151936, 896, 1), (151936, 896, 0)],
    }
    others = {
        "linear_fp8": [(128, 128) if toy else (4096, 4096)],
        "linear_rows": [(64, 128) if toy else (4096, 4096)],
        "experts_rows": [(4, 2, 64, 32) if toy else (64, 6, 2048, 1408)],
        "compact": [(2, 1, 32) if toy else (36, 8, 128)],
    }
    workloads = [UntunedWorkload(op, number, size) for op, sizes in short.items() for size in sizes for number in (*rows, *many_rows)]
    return [*workloads, *(UntunedWorkload(op, number, size) for op, sizes in others.items() for size in sizes for number in rows)]
