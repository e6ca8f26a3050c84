"""What an import must not bring along: the vocabulary and the command line start at once, the server holds no tensors."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.house.tree import ROOT

HEAVY = ("torch", "transformers", "fastapi", "uvicorn", "numpy", "rich")
CASES = [
    ("mtpserve", HEAVY),
    ("mtpserve.core.protocols.models", HEAVY),
    ("mtpserve.config", HEAVY),
    ("mtpserve.cli.main", HEAVY),
    ("mtpserve.cli.launch", HEAVY),
    ("mtpserve.cli.generate", HEAVY),
    ("mtpserve.tools.inspect.inspect_command", HEAVY),
    ("mtpserve.tools.bench.bench", HEAVY),
    ("mtpserve.tools.doctor.doctor", HEAVY),
    ("mtpserve.tools.simulate.bench_cache", HEAVY),
    ("mtpserve.tools.bench.spec.bench_spec", HEAVY),
    ("mtpserve.tools.bench.serve.bench_serve", (*HEAVY, "aiohttp", "matplotlib")),
    ("mtpserve.tools.bench.dataset.tokenizing, mtpserve.text.tokenizer", ("torch",)),
    ("mtpserve.tools.bench.eval.bench_eval", HEAVY),
    ("mtpserve.server.app", ("torch",)),
    ("mtpserve.server.launch", ("torch",)),
    ("mtpserve.engine.scheduler", ("torch", "fastapi", "pydantic")),
    ("mtpserve.tools.simulate.simulator", HEAVY),
    ("mtpserve.engine.process.client", ("torch",)),
    ("mtpserve.text.tokenizer", ("torch",)),
    ("mtpserve.llm", ("fastapi", "pydantic", "uvicorn")),
]


def brought(code: str, unwanted: tuple[str, ...]) -> list[str]:
    code = f"import sys; {code}; print('\\nbrought', *(name for name in {unwanted!r} if name in sys.modules))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1].split()[1:]


@pytest.mark.parametrize(("module", "unwanted"), CASES, ids=[module for module, _ in CASES])
def test_it_brings_nothing_heavy(module: str, unwanted: tuple[str, ...]) -> None:
    assert brought(f"import {module}", unwanted) == []


def test_an_engine_on_a_cpu_starts_without_torchs_compiler() -> None:
    code = "from mtpserve.config import EngineConfig; from mtpserve.engine.startup.build import build_engine; build_engine(EngineConfig())"
    assert brought(code, ("torch._dynamo", "triton", "fastapi", "pydantic")) == []
