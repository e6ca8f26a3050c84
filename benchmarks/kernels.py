"""Every kernel against its reference in plain torch and against a measured copy, on a GPU.

An op whose own tests fail is not timed. `--dry-run` calls each op once at toy size, interpreted if there is no GPU, and prints no
numbers: a test of the benchmark itself.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

from common.record import save

TESTS = Path(__file__).parent.parent / "tests" / "kernels"


@dataclass(frozen=True, slots=True)
class Timed:
    op: str
    case: str
    bytes: int  # that must be moved
    run: Callable[[], Any]
    reference: Callable[[], Any]


def both(kernel: Callable[..., Any], reference: Callable[..., Any], *arguments: Any) -> tuple[Callable[[], Any], Callable[[], Any]]:
    return partial(kernel, *arguments), partial(reference, *arguments)


def spans(device: torch.device, latent: bool, batch: int, context: int, width: int, tree: bool) -> Timed:
    from mtpserve_kernels.attention import reference
    from mtpserve_kernels.attention.span import span_gqa, span_mla

    page, dtype = 64, torch.bfloat16 if device.type == "cuda" else torch.float16
    heads, kv_heads, dim = (16, 1, 576) if latent else (32, 8, 128)
    pages = -(-(context + width) // page)
    table = torch.randperm(batch * pages, device=device).view(batch, pages)
    cache = torch.randn(batch * pages * page, kv_heads, dim, dtype=dtype, device=device)
    caches = (cache,) if latent else (cache, torch.randn_like(cache))
    each = torch.arange(batch, device=device)
    index = (context + torch.arange(width, device=device)).repeat(batch)
    bits = (1 << torch.arange(width, device=device) | 1).repeat(batch) if tree else None  # all drafts continue the root
    start = torch.full_like(each, context) if tree else None
    q = torch.randn(batch * width, heads, dim, dtype=dtype, device=device)
    where = (
        table,
        each,
        torch.arange(batch + 1, device=device) * width,
        torch.full_like(each, context + width),
        index,
        bits,
        start,
        page,
        0.1,
    )
    last = (512,) if latent else ()
    kernel, plain = (span_mla, reference.span_mla) if latent else (span_gqa, reference.span_gqa)
    moved = batch * (context + width) * kv_heads * dim * (1 if latent else 2) * 2 + 2 * q.numel() * 2
    return Timed(
        "span_mla" if latent else "span_gqa", f"batch {batch}, context {context}, {width} rows{', tree' if tree else ''}", moved,
        lambda: kernel(q, *caches, *where, *last, width=width), lambda: plain(q, *caches, *where, *last),
    )  # fmt: skip


def attention(device: torch.device, dry: bool) -> Iterator[Timed]:
    for latent in (False, True):
        for batch in (2,) if dry else (1, 8, 64):
            for context in (100,) if dry else (1024, 4096, 32768):
                for width, tree in ((4, False),) if dry else ((1, False), (4, False), (8, False), (32, True)):
                    if batch * context <= 64 * 8192:
                        yield spans(device, latent, batch, context, width, tree)


def fused(device: torch.device, dry: bool) -> Iterator[Timed]:
    from mtpserve_kernels.fused import reference
    from mtpserve_kernels.fused.linear import skinny_linear
    from mtpserve_kernels.fused.norm import add_rms_norm
    from mtpserve_kernels.fused.rope import rope_store
    from mtpserve_kernels.fused.silu import silu_mul

    dtype, hidden = (torch.float16, 256) if dry else (torch.bfloat16, 4096)
    for rows in (4,) if dry else (1, 4, 64, 512):
        x = torch.randn(rows, hidden, dtype=dtype, device=device)
        wide = torch.randn(rows, 6 * hidden, dtype=dtype, device=device)
        size = x.numel() * 2
        yield Timed("add_rms_norm", f"{rows} rows", 4 * size, *both(add_rms_norm, reference.add_rms_norm, x, x, x[0], 1e-6))
        yield Timed("silu_mul", f"{rows} rows", 9 * size, *both(silu_mul, reference.silu_mul, wide))
        qkv = torch.randn(rows, 48, 128, dtype=dtype, device=device)
        cos, cache = torch.randn(1024, 64, device=device), torch.randn(rows + 1, 8, 128, dtype=dtype, device=device)
        place = torch.arange(rows, device=device)
        arguments = (qkv, place, cos, cos, place, cache, cache.clone(), 32)
        yield Timed("rope_store", f"{rows} rows", 2 * qkv.numel() * 2, *both(rope_store, reference.rope_store, *arguments))
    for rows in (4,) if dry else (1, 4, 16):
        x, weight = torch.randn(rows, hidden, dtype=dtype, device=device), torch.randn(hidden, hidden, dtype=dtype, device=device)
        # Compared with the vendor's library, not with the float32 reference.
        yield Timed("skinny_linear", f"{rows} rows", weight.numel() * 2, *both(skinny_linear, F.linear, x, weight))


def quant(device: torch.device, dry: bool) -> Iterator[Timed]:
    from mtpserve_kernels.quant import reference
    from mtpserve_kernels.quant.linear_fp8 import linear_fp8
    from mtpserve_kernels.quant.rows import linear_rows

    hidden, dtype = (256, torch.float16) if dry else (4096, torch.bfloat16)
    weight = torch.randn(hidden, hidden, device=device).to(torch.float8_e4m3fn)
    scale = torch.rand(hidden // 128, hidden // 128, device=device)
    for rows in (4,) if dry else (1, 4, 16, 512):
        x = torch.randn(rows, hidden, dtype=dtype, device=device)
        yield Timed("linear_fp8", f"{rows} rows", weight.numel(), *both(linear_fp8, reference.linear_fp8, x, weight, scale))
    halves = torch.randint(256, (hidden, hidden // 2), dtype=torch.uint8, device=device)
    each = torch.rand(hidden, hidden // 128, dtype=dtype, device=device)
    for rows in (4,) if dry else (1, 4, 16, 64):
        x = torch.randn(rows, hidden, dtype=dtype, device=device)
        yield Timed("linear_rows, int4", f"{rows} rows", halves.numel(), *both(linear_rows, reference.linear_rows, x, halves, each))


def moe(device: torch.device, dry: bool) -> Iterator[Timed]:
    from mtpserve_kernels.moe import reference
    from mtpserve_kernels.moe.experts import experts
    from mtpserve_kernels.moe.experts_rows import experts_rows
    from mtpserve_kernels.moe.route import route

    number, top, hidden, size = (8, 2, 64, 32) if dry else (64, 6, 2048, 1408)  # DeepSeek-V2-Lite's
    dtype = torch.float16 if dry else torch.bfloat16
    gate_up = torch.randn(number, 2 * size, hidden, dtype=dtype, device=device) / 50
    down = torch.randn(number, hidden, size, dtype=dtype, device=device) / 50
    beside = (
        torch.randn(4 * size, hidden, dtype=dtype, device=device) / 50,
        torch.randn(hidden, 2 * size, dtype=dtype, device=device) / 50,
    )
    router, bias = torch.randn(number, hidden, device=device), torch.zeros(number, device=device)
    for rows in (4,) if dry else (1, 4, 16, 64):
        x = torch.randn(rows, hidden, dtype=dtype, device=device)
        chosen = torch.stack([torch.randperm(number, device=device)[:top] for _ in range(rows)])
        weights = torch.rand(rows, top, device=device)
        hit = (len(chosen.unique()) + 2) * 3 * size * hidden * 2
        given = (x, weights, chosen, gate_up, down, *beside)
        yield Timed("experts", f"{rows} rows", hit, *both(experts, reference.experts, *given))
        halves = [torch.zeros((*matrix.shape[:2], matrix.shape[2] // 2), dtype=torch.uint8, device=device) for matrix in (gate_up, down)]
        each = [torch.rand((*matrix.shape[:2], matrix.shape[2] // 32), device=device) for matrix in (gate_up, down)]
        stored = (x, weights, chosen, halves[0], each[0], None, halves[1], each[1], None)
        yield Timed("experts_rows, int4", f"{rows} rows", hit // 4, *both(experts_rows, reference.experts_rows, *stored))
        asked = (x, router, bias, top, 1, 1, True, 1.0)
        yield Timed("route", f"{rows} rows", router.numel() * 4, *both(route, reference.route, *asked))


def accept(device: torch.device, dry: bool) -> Iterator[Timed]:
    from mtpserve_kernels.spec import accept as kernel, reference

    vocab = 100 if dry else 128256
    for requests in (1,) if dry else (1, 16, 64):
        logits = torch.randn(requests, 4, vocab, device=device)
        each = torch.arange(requests, device=device)
        drafts, count = torch.zeros(requests, 3, dtype=torch.int64, device=device), torch.full_like(each, 3)
        q = torch.rand(requests, 3, vocab, device=device).softmax(-1)
        for name, top_p in (("temperature", 1.0), ("top_p", 0.9)):
            seats = (torch.full((requests,), 0.7, device=device), torch.zeros_like(each), torch.full((requests,), top_p, device=device),
                     torch.zeros(requests, device=device), each, torch.zeros(requests, dtype=torch.bool, device=device))  # fmt: skip
            given = (logits, drafts, count, None, None, each, each, *seats, q, 3)
            cut = {"any_top_k": False, "any_top_p": top_p < 1, "any_min_p": False}
            yield Timed(
                "accept", f"{requests} requests, {name}", 2 * logits.numel() * 4,
                partial(kernel.accept, *given, **cut), partial(reference.accept, *given),
            )  # fmt: skip


def cache(device: torch.device, dry: bool) -> Iterator[Timed]:
    from mtpserve_kernels.cache import compact as kernel, reference

    layers, requests = (2, 2) if dry else (32, 16)
    pool = torch.randn(layers, requests * 64, 8, 128, device=device).to(torch.float16)
    target = (torch.arange(requests, device=device) * 64).unsqueeze(1) + torch.arange(1, 5, device=device)
    source = target + 3
    yield Timed(
        "compact", f"{requests} requests, {layers} layers", 2 * layers * source.numel() * 8 * 128 * 2,
        *both(kernel.compact, reference.compact, pool, source, target),
    )  # fmt: skip


GROUPS = {"span": attention, "fused": fused, "quant": quant, "moe": moe, "accept": accept, "cache": cache}  # by test file


def passes(group: str) -> bool:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(TESTS / f"test_{group}.py")]
    return subprocess.run(command, cwd=TESTS.parent.parent, capture_output=True, check=False).returncode == 0


def copy_speed(device: torch.device) -> float:
    from triton.testing import do_bench

    source = torch.empty(1 << 29, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / float(do_bench(lambda: target.copy_(source), return_mode="median")) / 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ops", nargs="+", choices=list(GROUPS), default=list(GROUPS))
    parser.add_argument("--dry-run", action="store_true", help="each op once, at toy size, without numbers")
    parser.add_argument("--json")
    options = parser.parse_args()
    if not torch.cuda.is_available() and not options.dry_run:
        print("no GPU: there is nothing to time; --dry-run calls each op once")
        return 0
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if options.dry_run:
        for name in options.ops:
            for timed in GROUPS[name](device, True):
                timed.run()
                timed.reference()
                print(f"{timed.op:14} {timed.case}: runs")
        return 0
    from triton.testing import do_bench

    copy, rows, failed = copy_speed(device), [], []
    print(f"copy: {copy:.0f} GB/s")
    for name in options.ops:
        if not passes(name):
            failed.append(name)
            print(f"{name}: its tests fail, so there are no numbers")
            continue
        for timed in GROUPS[name](device, False):
            ours, plain = (float(do_bench(run, return_mode="median")) for run in (timed.run, timed.reference))
            speed = timed.bytes / ours / 1e6
            rows.append({"op": timed.op, "case": timed.case, "ms": ours, "reference_ms": plain, "gb_per_s": speed, "of_copy": speed / copy})
            told = f"{ours * 1e3:9.1f} us  {speed:7.0f} GB/s  {speed / copy:5.0%} of the copy  {plain / ours:6.1f} x the reference"
            print(f"{timed.op:14} {timed.case:42} {told}")
    if options.json:
        save(options.json, {"gpu": torch.cuda.get_device_name(device), "copy_gb_per_s": copy, "failed": failed, "rows": rows})
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
