"""`mtpserve doctor`: facts for a bug report, and tests whose failures are seen."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from mtpserve import __version__
from mtpserve.cli import main as cli
from mtpserve.tools.doctor import environment, self_test
from mtpserve.tools.doctor.self_test import CheckResult


def report(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, dict[str, Any]]:
    code = cli.main(["doctor", "--json", *options])
    return code, json.loads(capsys.readouterr().out)


def test_facts_name_versions_device_and_kernels(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("MTPSERVE_DISABLE_PDL", "1")
    code, facts = report(capsys, "--no-self-test")
    assert code == 0 and facts["tests"] == []
    known = facts["environment"]
    assert known["mtpserve"] == __version__ and known["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert known["MTPSERVE_DISABLE_PDL"] == "1" and known["HF_TOKEN"] == "(hidden)"
    assert {"python", "cpu", "cores", "instruction sets", "cpu kernels"} <= known.keys()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU's kernels are compiled for minutes")
def test_this_machine_passes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    code = cli.main(["doctor"])
    out = capsys.readouterr().out
    assert code == 0 and "FAILED" not in out
    assert "engine" in out and "equal texts" in out


def test_a_wrong_kernel_and_one_that_raises_are_failures(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def other(name: Any) -> Any:
        if name == "cpu.accept:argmax":
            return lambda logits: logits.argmin(-1)
        if name == "cpu.accept:draw":
            raise RuntimeError("no such instruction\nmore")
        return real(name)

    def no_engine(device: str) -> Iterator[CheckResult]:
        yield from ()

    real = self_test.function_of
    monkeypatch.setattr(self_test, "function_of", other)
    monkeypatch.setattr(self_test, "kernel_set", lambda device: "cpu")
    monkeypatch.setattr(self_test, "check_engine", no_engine)
    assert cli.main(["doctor", "--device", "cpu"]) == 1
    captured = capsys.readouterr()
    lines = {line.split()[1]: line for line in captured.out.splitlines() if line.startswith("FAILED")}
    assert "largest difference inf, more than 0e+00" in lines["argmax"]
    assert lines["draw"].endswith("RuntimeError: no such instruction")
    assert captured.err == "mtpserve doctor: failed: draw, argmax\n"


def test_different_texts_are_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_test, "SPECULATION", {"plain": "none", "speculation": "none"})
    prompts = iter([["import os\n"], ["import os\n"], ["import re\n"], ["class A:\n"]])
    real = self_test.LLM.generate
    monkeypatch.setattr(self_test.LLM, "generate", lambda llm, _, sampling: real(llm, next(prompts), sampling))
    (result,) = self_test.check_engine("cpu")
    assert not result.passed and result.detail.startswith("different texts")


def test_an_engine_that_does_not_start_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_test, "SPECULATION", {"plain": "NO SUCH"})
    (result,) = self_test.check_engine("cpu")
    assert not result.passed and result.detail.startswith("ConfigError")


def test_warnings_name_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(environment.os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setattr(environment.torch.cuda, "is_available", lambda: False)
    facts = {"gpu": "torch is a CPU build", "cpu kernels": "not used: no C++ compiler"}
    found = list(environment.warnings_of(facts))
    assert "install a CUDA build of torch" in found[0] and "not used: no C++ compiler" in found[1] and len(found) == 2
    monkeypatch.setattr(environment.os, "getloadavg", lambda: (100.0, 0.0, 0.0))
    assert "keep 100.0 of" in next(environment.warnings_of({"gpu 0": "", "cpu kernels": "avx2"}))


def test_a_gpu_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["doctor", "--device", "cuda"]) == 2
    assert "--device cuda: torch finds no GPU" in capsys.readouterr().err
