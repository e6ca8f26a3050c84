"""The Dockerfile has none of the mistakes that hadolint knows."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

DOCKER = Path(__file__).parents[2] / "docker"


def test_hadolint_finds_nothing() -> None:
    folder = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    if (hadolint := shutil.which("hadolint", path=folder)) is None:
        pytest.skip("hadolint is not installed: the extra `test` brings it on Linux and x86-64")
    done = subprocess.run(
        [hadolint, "--no-color", "--format", "tty", "Dockerfile"], cwd=DOCKER, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and not done.stdout, done.stdout + done.stderr
