"""Attention of a CPU by requests × context × rows, ours against that of plain torch, in µs, GB/s of keys and values, and GFLOP/s.

Runs are interleaved, and medians reported. `--threads 1` measures the time of the thread, which other processes disturb less.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from common.record import save
from mtpserve_kernels.attention import reference
from mtpserve_kernels.cpu.attention import attend, layout_of, plan
from mtpserve_kernels.cpu.library import library

PAGE = 64
SMALL, LARGE, MLA = (16, 8, 64, 64), (32, 8, 128, 128), (16, 1, 576, 512)  # heads, key heads, key_dim, value_dim
CASES = [
    *((SMALL, batch, context, 1) for batch, context in ((1, 512), (1, 2048), (16, 512), (16, 2048), (64, 512))),
    (SMALL, 16, 2048, 4), (SMALL, 1, 2048, 8), (SMALL, 1, 0, 512), (SMALL, 1, 3072, 1024),
    (LARGE, 1, 2048, 1), (LARGE, 16, 2048, 4), (LARGE, 1, 0, 512), (LARGE, 1, 3072, 1024),
    (MLA, 1, 2048, 1), (MLA, 16, 512, 4), (MLA, 1, 0, 512),
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Timed:
    ours: Callable[[], Any]
    plain: Callable[[], Any]
    bytes: int  # of keys and values that are read at least once
    flops: int


def case(heads: int, kv_heads: int, key_dim: int, value_dim: int, batch: int, context: int, rows: int) -> Timed:
    pages, latent = -(-(context + rows) // PAGE), key_dim != value_dim
    table = torch.randperm(batch * pages).view(batch, pages)
    keys = torch.randn(batch * pages * PAGE, kv_heads, key_dim).bfloat16()
    values = keys[..., :value_dim] if latent else torch.randn_like(keys)
    q = torch.randn(batch * rows, heads, key_dim).bfloat16()
    each, index = torch.arange(batch), (context + torch.arange(rows)).repeat(batch)
    where = table, each, torch.arange(batch + 1) * rows, torch.full_like(each, context + rows), index, None, None, PAGE, key_dim**-0.5
    spans = plan(layout_of(keys, values, heads, PAGE, key_dim**-0.5), *where[:5])
    read = batch * (context + rows) * kv_heads * (key_dim if latent else key_dim + value_dim) * keys.element_size()
    flops = batch * rows * (2 * context + rows) * heads * (key_dim + value_dim)
    return Timed(lambda: attend(q, keys, values, spans), lambda: reference.span_gqa(q, keys, values, *where), read, flops)


def seconds(run: Callable[[], Any]) -> float:
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    run()
    return clock() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", metavar="FILE")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    numbers: dict[str, Any] = {"instruction_set": library().isa.name, "cases": {}}
    for shape, batch, context, rows in CASES:
        timed = case(*shape, batch, context, rows)
        torch.testing.assert_close(timed.ours().float(), timed.plain().float(), atol=2e-2, rtol=2e-2)
        pairs = [(seconds(timed.ours), seconds(timed.plain)) for _ in range(chosen.repeats)]
        ours, plain = (statistics.median(times) for times in zip(*pairs, strict=True))
        name = f"{shape[0]} × {shape[1]} heads, {shape[2]} wide: {batch} requests × {context} tokens × {rows} rows"
        numbers["cases"][name] = {
            "us": ours * 1e6, "torch_us": plain * 1e6, "gb_per_s": timed.bytes / ours / 1e9, "gflop_per_s": timed.flops / ours / 1e9
        }  # fmt: skip
        print(f"{name:<68} {ours * 1e6:9.0f} µs, {plain / ours:5.1f} × torch, {timed.bytes / ours / 1e9:5.1f} GB/s, ", end="")
        print(f"{timed.flops / ours / 1e9:6.1f} GFLOP/s", flush=True)
    save(chosen.json, numbers)


if __name__ == "__main__":
    main()
