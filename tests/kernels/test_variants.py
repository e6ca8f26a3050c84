"""Another number of requests or rows must not compile anything: a request that arrives would wait for seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from tests.house.test_sizes import is_kernel
from tests.house.tree import KERNELS, ROOT, functions, sources


def test_counts_choose_no_variant() -> None:
    """In a process of its own: here kernels may be interpreted, and then nothing is compiled."""
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "kernels")))
    environment = {**os.environ, "PYTHONPATH": paths}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "tests.kernels.variants"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    variants = json.loads(done.stdout)
    assert not {kernel: count for kernel, count in variants.items() if count != 1}
    written = {part.name for file in sources(KERNELS) for part in functions(file) if is_kernel(part) and part.name.endswith("_kernel")}
    assert {kernel.split()[0] for kernel in variants} == written, "every kernel is looked at"
