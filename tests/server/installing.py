"""Clients that are installed for a test: without a registry, or with a slow one, the test is skipped."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

import pytest


def install(command: Sequence[str], seconds: float) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=seconds)
    except subprocess.TimeoutExpired:
        pytest.skip(f"{command[0]} installs for longer than {seconds:.0f} s")
    if done.returncode:
        pytest.skip(f"{command[0]} cannot install it: {done.stderr[-200:]}")
