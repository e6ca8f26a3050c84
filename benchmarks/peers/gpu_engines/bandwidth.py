"""Prints a device's read bandwidth and its memory as JSON: `{"read_bandwidth": BYTES_PER_S, "memory_bytes": N}`.

It runs in a process of its own, so that its memory and its context are gone when engines start.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable

import torch

REPEATS = 10


def fastest(run: Callable[[], object]) -> float:
    """Seconds, of REPEATS runs."""
    best = float("inf")
    for _ in range(REPEATS):
        synchronise()
        start = time.perf_counter()
        run()
        synchronise()
        best = min(best, time.perf_counter() - start)
    return best


def synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def read_bandwidth(size: int) -> float:
    """Bytes per second of whichever is faster over `size` bytes: a sum, which reads alone, or a copy, which reads and writes."""
    source = torch.zeros(size // 4, dtype=torch.float32, device="cuda" if torch.cuda.is_available() else "cpu")
    target = torch.empty_like(source)
    return max(size / fastest(source.sum), 2 * size / fastest(lambda: target.copy_(source)))


def memory_bytes() -> int:
    if torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(0).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=2048)
    args = parser.parse_args()
    print(json.dumps({"read_bandwidth": read_bandwidth(args.mib << 20), "memory_bytes": memory_bytes()}))
