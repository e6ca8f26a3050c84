"""Command, commit, device and versions of a measurement, which are stored with every result."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import mtpserve


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor())


def context() -> dict[str, Any]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], check=False, capture_output=True, text=True, cwd=Path(__file__).parent)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else processor()
    return {
        "command": " ".join(["python", *sys.argv]),
        "commit": commit.stdout.strip(),
        "device": device,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "mtpserve": mtpserve.__version__},
    }


def save(path: str | None, numbers: dict[str, Any]) -> None:
    """Writes JSON if a path was given."""
    if path is not None:
        Path(path).write_text(json.dumps(context() | {"numbers": numbers}, indent=2) + "\n")
