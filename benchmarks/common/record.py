"""Command, commit, device and versions of a measurement, which are stored with every result."""

from __future__ import annotations

import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import mtpserve

# Of the CPU's instruction sets, those that products of matrices are made of.
PRODUCTS = ("avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_int8")


def cpuinfo(field: str) -> str | None:
    """Of the first core."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(field)), None)


def processor() -> str:
    """Virtual machines hide the exact name: family and model say more."""
    named = cpuinfo("model name")
    return platform.processor() if named is None else f"{named} (family {cpuinfo('cpu family')}, model {cpuinfo('model')})"


def instruction_sets() -> list[str]:
    return [name for name in PRODUCTS if name in (cpuinfo("flags") or "").split()]


def without_folders(argument: str) -> str:
    """A path of this machine says nothing elsewhere: relative to the current folder if it is below it, otherwise its name."""
    path = Path(argument)
    if not path.is_absolute():
        return argument
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else path.name


def commit() -> str:
    """The environment variable GIT_COMMIT, for copies that are not the checkout, or the checkout's. Empty without git."""
    root = Path(__file__).parents[2]
    if (name := os.environ.get("GIT_COMMIT")) is not None:
        return name
    if not (root / ".git").exists() or shutil.which("git") is None:
        return ""
    return subprocess.run(["git", "rev-parse", "--short", "HEAD"], check=False, capture_output=True, text=True, cwd=root).stdout.strip()


def context() -> dict[str, Any]:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else processor()
    return {
        "command": shlex.join(["python", *map(without_folders, sys.argv)]),
        "commit": commit(),
        "device": device,
        "processor": processor(),
        "instruction_sets": instruction_sets(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "mtpserve": mtpserve.__version__},
    }


def save(path: str | None, numbers: dict[str, Any]) -> None:
    """Writes JSON if a path was given."""
    if path is not None:
        Path(path).write_text(json.dumps(context() | {"numbers": numbers}, indent=2) + "\n")
