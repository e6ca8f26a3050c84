"""Whatever a default depends on is forced to each of its values: instruction sets, number formats, and what is on PATH."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import selection

ROOT = Path(__file__).parents[2]
DRAWS = "4" if selection.ALL else "2"
NOTHING = "/nonexistent"  # as PATH: no compiler, no browser, no node, no promtool
OLD = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}  # no AVX-512, and so no units for bfloat16
OLDEST = {"ONEDNN_MAX_CPU_ISA": "SSE41", "ATEN_CPU_CAPABILITY": "default"}
# Tests that start a program which not everybody has: without it they skip.
NEEDY = (
    "server/test_node.py", "server/test_page_browser.py", "server/test_metrics.py", "docker/test_docker.py",
    "clients/test_known_clients.py",
)  # fmt: skip


def run(command: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "kernels")))
    env = os.environ | {"PYTHONPATH": paths, "HOME": "/nonexistent"} | environment
    return subprocess.run([sys.executable, "-m", *command], cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.parametrize(
    ("dtype", "environment", "topk"),
    [
        # An empty PATH does not matter to the others, either, and defaults are proved in test_proof.py.
        pytest.param("auto", {"PATH": NOTHING}, "1", id="defaults, empty PATH", marks=pytest.mark.thorough),
        pytest.param("bfloat16", OLD | {"PATH": NOTHING}, "3", id="bfloat16 without its units, tree"),
        pytest.param("float32", OLDEST, "3", id="float32 on an old CPU, tree", marks=pytest.mark.thorough),
    ],
)
def test_the_proof_holds(tmp_path: Path, dtype: str, environment: dict[str, str], topk: str) -> None:
    prompts = tmp_path / "prompts"
    prompts.write_text('import os\\n\nclass A:\n"def f(x):\\n    "\n')
    done = run(
        ["mtpserve", "prove", "--model", "demo", "--dtype", dtype, "--prompts", str(prompts), "--tokens", "12", "--draws", DRAWS,
         "--max-total-tokens", "8192", "--speculative-algorithm", "MTP", "--speculative-eagle-topk", topk],
        environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "verdict     holds" in done.stdout


@pytest.mark.thorough
@pytest.mark.parametrize("topk", ["1", "3"], ids=["chain", "tree"])
@pytest.mark.parametrize("experts", [(), ("--enable-expert-parallel",)], ids=["experts in parts", "whole experts"])
def test_the_proof_holds_over_ranks(topk: str, experts: tuple[str, ...]) -> None:
    done = run(
        ["mtpserve", "prove", "--model", "demo", "--dtype", "float32", "--tensor-parallel-size", "2", *experts,
         "--max-total-tokens", "8192", "--speculative-algorithm", "MTP", "--speculative-eagle-topk", topk],
        {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "verdict     holds" in done.stdout


@pytest.mark.thorough  # of the tests themselves
def test_what_is_not_on_the_path_is_not_needed() -> None:
    done = run(["pytest", "-q", "-n0", "-p", "no:cacheprovider", *(f"tests/{file}" for file in NEEDY)], {"PATH": NOTHING})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "node and npm are not installed" in done.stdout
    assert "no Chromium is installed" in done.stdout or "playwright is not installed" in done.stdout
