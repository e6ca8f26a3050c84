"""Each way to run a model drafts alike where nothing is said: with its MTP layer if it has one. The text is the same either way."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from safetensors import safe_open
from safetensors.torch import save_file

from mtpserve.cli import generate
from mtpserve.config import ModelConfig
from mtpserve.core.errors import ConfigError
from mtpserve.integrations.engines import checked_settings, values_of
from mtpserve.llm import LLM
from mtpserve.tools.bench.spec import bench_spec
from mtpserve.tools.inspect import inspect_command as inspect
from tests.house.tree import ROOT

DEMO, LAYER = ModelConfig().directory, "model.layers.6."
PROMPT, TOKENS = "import os\n\ndef read_lines(path):", 16
OWN = "MTP, up to 3 drafts in a row: the checkpoint's MTP layer (default; see --speculative-algorithm)"
MODELS, SMALL = ("demo", "bare", "off"), ["--max-total-tokens", "2048"]


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model without its MTP layer."""
    made = tmp_path_factory.mktemp("bare") / "model"
    shutil.copytree(DEMO, made, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors = {}
    for file in DEMO.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys() if not name.startswith(LAYER)}  # noqa: SIM118
    save_file(tensors, made / "model.safetensors")
    return made


@pytest.fixture(scope="module")
def text() -> str:
    with LLM("demo", max_total_tokens=2048, speculative_algorithm="none") as llm:
        return llm.generate(PROMPT, llm.sampling(max_tokens=TOKENS, temperature=0))[0].text


def asked(which: str, bare: Path) -> tuple[list[str], str, str | None]:
    """→ options, what is said of the drafter, its algorithm."""
    if which == "bare":
        why = (
            f"none, plain decoding: {bare}: the checkpoint has no MTP layer: its config says num_nextn_predict_layers = 1, but there are no"
        )
        return ["--model", str(bare)], why, None
    off = ["--speculative-algorithm", "none"] if which == "off" else []
    return ["--model", "demo", *off], "none, plain decoding: set by --speculative-algorithm" if off else OWN, None if off else "MTP"


@pytest.mark.parametrize("which", [MODELS[0], *(pytest.param(which, marks=pytest.mark.thorough) for which in MODELS[1:])])
def test_launch(which: str, bare: Path, text: str, tmp_path: Path) -> None:
    options, why, algorithm = asked(which, bare)
    command = [sys.executable, "-m", "mtpserve", "launch", *options, *SMALL, "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}
    log = tmp_path / "log"
    with (
        log.open("w") as errors,
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=ROOT) as process,
    ):
        try:
            assert process.stdout is not None
            found = re.search(r"http://\S+", process.stdout.readline())
            assert found
            with httpx.Client(base_url=found[0], timeout=60) as http:
                body = {"prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
                assert http.post("/v1/completions", json=body).json()["choices"][0]["text"] == text
                said = http.get("/server_info").json()
                assert said["speculative_algorithm"] == algorithm == http.get("/v1/spec").json()["algorithm"]
                assert said["drafter"].startswith(why)
        finally:
            process.terminate()
    assert log.read_text().count(f"drafter: {why}") == 1 == log.read_text().count("drafter: ")


@pytest.mark.parametrize("which", MODELS)
def test_generate(which: str, bare: Path, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    options, _, algorithm = asked(which, bare)
    assert generate.run([PROMPT, "--temperature", "0", "--max-tokens", str(TOKENS), *SMALL, *options]) == 0
    shown, said = capsys.readouterr()
    assert shown == text.removesuffix("\n") + "\n" and ("nothing drafted" in said) == (algorithm is None)


@pytest.mark.parametrize("which", MODELS)
def test_offline(which: str, bare: Path, text: str) -> None:
    options, why, algorithm = asked(which, bare)
    given = {option.removeprefix("--").replace("-", "_"): value for option, value in zip(options[::2], options[1::2], strict=True)}
    with LLM(**given, max_total_tokens=2048) as llm:  # type: ignore[arg-type]
        assert llm.generate(PROMPT, llm.sampling(max_tokens=TOKENS, temperature=0))[0].text == text
        assert (llm.engine.card.algorithm, llm.config.spec.speculative_algorithm) == (algorithm, algorithm or "none")
        assert llm.engine.card.drafting.startswith(why) and llm.config.spec.steps == (3 if algorithm else 0)


@pytest.mark.parametrize("which", MODELS)
def test_inspect(which: str, bare: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options, why, algorithm = asked(which, bare)
    assert inspect.run(["--json", *options]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sum(note.startswith(f"drafter: {why}") for note in found["notes"]) == 1
    assert any("weights, MTP layer" in row["what"] for row in found["memory"]) == (algorithm is not None) == bool(found["arch"]["mtp"])


def test_bench_spec(bare: Path, tmp_path: Path) -> None:
    out, short = tmp_path / "out.json", ["--input-len", "8", "--output-len", "8", "--rounds", "1", "--batch-sizes", "1", "--num-steps", "1"]
    assert bench_spec.run(["--model", "demo", *short, "--output-file", str(out)]) == 0
    assert json.loads(out.read_text())["engine"]["speculative_algorithm"] == "MTP"
    with pytest.raises(ConfigError, match=r"--speculative-num-steps 1 needs a source of drafts, and .* has no MTP layer"):
        bench_spec.run(["--model", str(bare), *short])


def test_integrations_leave_it_to_the_engine() -> None:
    assert not checked_settings(values_of({"model": "demo"}), (), "Ray's").engine.spec.named
