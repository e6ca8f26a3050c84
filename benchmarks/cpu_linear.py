"""Packed linear layers of a CPU by shape and number of rows: GB/s of weights and GFLOP/s, of what this machine was just measured to read
and to multiply, and beside torch's own.

With few rows each call reads other weights than the one before, so that they come from memory, as in a step of a model; with many rows,
and at sizes that a cache keeps, it reads the same. One thread is timed by its own clock, which stands still while others use the core,
several by the wall's. `--dry-run` calls each once at toy size and prints no numbers: a test of the benchmark itself.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from common.record import save
from mtpserve_kernels.cpu.library import library
from mtpserve_kernels.cpu.linear import Matrix, linear, pack, pack_int8, quantize
from torch import Tensor

SHAPES = ((5632, 1024), (1024, 2816), (768, 256))  # outputs, inputs
ROWS = (1, 2, 4, 8, 16, 64, 256)
FEW, SMALL = 16, 1 << 20
COLD = 160 << 20  # bytes of weights that no cache keeps
KINDS = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}


def seconds(calls: Sequence[Callable[[], Any]], repeats: int = 7) -> float:
    """The median time of one of `calls`."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    taken = []
    for _ in range(repeats + 1):
        start = clock()
        for call in calls:
            call()
        taken.append((clock() - start) / len(calls))
    return median(taken[1:])


def read_speed() -> float:
    """GB/s of memory that is read once."""
    numbers = torch.ones(COLD // 4)
    return COLD / seconds([numbers.sum]) / 1e9


def multiply_speed() -> float:
    """GFLOP/s of float32 products: the best of our own and torch's at a size that suits both."""
    x, weight = torch.randn(384, 768), torch.randn(768, 768)
    matrix = pack(weight.clone())
    taken = min(seconds([call] * 8) for call in (partial(linear, x, matrix), partial(F.linear, x, weight)))
    return 2 * 384 * 768 * 768 / taken / 1e9


def packed(kind: str, outputs: int, inputs: int) -> Matrix:
    weight = torch.randn(outputs, inputs)
    return pack_int8(*quantize(weight)) if kind == "int8" else pack(weight.to(KINDS[kind]))


def timed(kind: str, outputs: int, inputs: int, rows: int, matrices: list[Matrix], weights: dict[str, list[Tensor]]) -> dict[str, Any]:
    """Interleaved with torch's products of the same type (int8: of bfloat16) and of float32."""
    x = torch.randn(rows, inputs)
    given = x if kind == "fp32" else x.bfloat16()
    size = outputs * inputs * KINDS[kind].itemsize
    cold, calls = rows <= FEW and size >= SMALL, max(3, SMALL // size * 10)
    ours = seconds([partial(linear, given, matrix) for matrix in (matrices if cold else matrices[:1] * calls)])
    same = "fp32" if kind == "fp32" else "bf16"
    theirs = {}
    for name in {same, "fp32"}:
        used = weights[name] if cold else weights[name][:1] * calls
        theirs[name] = seconds([partial(F.linear, x.to(KINDS[name]), weight) for weight in used])
    return {
        "weights": kind, "outputs": outputs, "inputs": inputs, "rows": rows, "cold": cold, "us": ours * 1e6, "gb_per_s": size / ours / 1e9,
        "gflop_per_s": 2 * rows * outputs * inputs / ours / 1e9, "torch_us": theirs[same] * 1e6, "torch_fp32_us": theirs["fp32"] * 1e6,
    }  # fmt: skip


def measure(shapes: Sequence[tuple[int, int]], rows: Sequence[int], cold: int) -> list[dict[str, Any]]:
    done = []
    for outputs, inputs in shapes:
        counts = {kind: max(2, cold // (outputs * inputs * dtype.itemsize)) for kind, dtype in KINDS.items()}
        weights = {kind: [torch.randn(outputs, inputs).to(KINDS[kind]) for _ in range(counts[kind])] for kind in ("fp32", "bf16")}
        for kind in KINDS:
            matrices = [packed(kind, outputs, inputs) for _ in range(counts[kind])]
            done += [timed(kind, outputs, inputs, count, matrices, weights) for count in rows]
    return done


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dry-run", action="store_true", help="each once, at toy size, without numbers")
    parser.add_argument("--json")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    isa = library().isa.name
    if options.dry_run:
        for row in measure([(40, 6)], [1, 20], 0):
            print(f"{row['weights']:5} {row['outputs']} x {row['inputs']}, {row['rows']} rows: runs")
        return 0
    read, multiply = read_speed(), multiply_speed()
    print(f"{isa}, {options.threads} threads: reads {read:.1f} GB/s, multiplies {multiply:.0f} GFLOP/s in float32")
    results = measure(SHAPES, ROWS, COLD)
    for row in results:
        row |= {"of_read": row["gb_per_s"] / read, "of_multiply": row["gflop_per_s"] / multiply}
        told = f"{row['us']:8.1f} us  {row['gb_per_s']:5.1f} GB/s {row['of_read']:4.0%}  "
        told += f"{row['gflop_per_s']:4.0f} GFLOP/s {row['of_multiply']:4.0%}"
        than = f"torch {row['torch_us']:8.1f} us, float32 {row['torch_fp32_us']:8.1f} us"
        print(f"{row['weights']:5} {row['outputs']:5} x {row['inputs']:4} {row['rows']:4} rows {told}  {than}")
    save(options.json, {"isa": isa, "threads": options.threads, "read_gb_per_s": read, "gflop_per_s": multiply, "rows": results})
    return 0


if __name__ == "__main__":
    sys.exit(main())
