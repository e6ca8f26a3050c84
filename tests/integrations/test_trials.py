"""Ray Serve, Dynamo and routers, where they are installed: 40 requests of 40 end well while engines and servers are killed and drained.

Each is a benchmark, which fails where a request is lost; they take minutes. docs/deploy.md says how to install what they need.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = Path(sys.executable).parent
ROUTERS = any((PROGRAMS / name).exists() for name in ("vllm-router", "sglang-router", "smg"))


def run(script: str, *options: str) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "kernels")))}
    done = subprocess.run(
        [sys.executable, f"benchmarks/fleet/{script}", *options],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=550,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(find_spec("ray") is None, reason="Ray Serve is not installed")
def test_ray_serve() -> None:
    run("ray_serve.py")


@pytest.mark.skipif(find_spec("dynamo") is None, reason="Dynamo is not installed")
def test_dynamo() -> None:
    run("dynamo_workers.py")


@pytest.mark.skipif(not ROUTERS, reason="no router is installed")
def test_routers() -> None:
    run("routers.py", "--bin", str(PROGRAMS))
