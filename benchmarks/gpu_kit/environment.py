"""What was measured on: versions, device, driver, clocks, and how much of Triton's compiler cache was there."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import triton
from common.record import commit, without_folders

CLOCKS = ("clocks.sm", "clocks.mem", "clocks.max.sm", "power.draw", "temperature.gpu", "clocks_event_reasons.active")


def query_gpu(*fields: str) -> dict[str, str] | None:
    """None: there is no nvidia-smi, or it does not know a field."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    first = answer.stdout.splitlines()[0] if answer.returncode == 0 and answer.stdout else ""
    return dict(zip(fields, map(str.strip, first.split(",")), strict=False)) or None if first else None


def clocks() -> dict[str, str] | None:
    """At this moment, in MHz, W and °C."""
    return query_gpu(*CLOCKS) or query_gpu(*CLOCKS[:-1])


def environment(device: torch.device) -> dict[str, Any]:
    record: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or platform.machine(),
        "kind": device.type,
        "commit": commit(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "triton": triton.__version__},
        "interpreted": os.environ.get("TRITON_INTERPRET") == "1",
        "cores": os.cpu_count(),
        "command": shlex.join(["python", *map(without_folders, sys.argv)]),
    }
    if device.type != "cuda":
        return record
    facts = torch.cuda.get_device_properties(device)
    return record | {
        "capability": f"sm_{facts.major}{facts.minor}",
        "processors": facts.multi_processor_count,
        "memory_gb": facts.total_memory / 1e9,
        "l2_mb": facts.L2_cache_size / 1e6,
        "driver": (query_gpu("driver_version") or {}).get("driver_version", ""),
        "cuda": torch.version.cuda,
        "clocks": clocks(),
    }


@dataclass(slots=True)
class CompilerCache:
    """Kernels that Triton found compiled, and that it had to compile."""

    hits: int = 0
    misses: int = 0
    compile_s: float = 0.0


@contextmanager
def compilations() -> Iterator[CompilerCache]:
    """Counts for as long as it is entered. A triton without the listener counts nothing."""
    count = CompilerCache()

    def listen(*, times: Any, cache_hit: bool, **_: Any) -> None:
        count.hits += cache_hit
        count.misses += not cache_hit
        count.compile_s += 0.0 if cache_hit else times.total / 1e6

    knob = getattr(getattr(triton, "knobs", None), "compilation", None)
    if knob is None or not hasattr(knob, "listener"):
        yield count
        return
    before, knob.listener = knob.listener, listen
    try:
        yield count
    finally:
        knob.listener = before
