"""`mtpserve prove --lora-modules` proves the model and each adapter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mtpserve.tools.prove import prove as command
from tests.lora.adapters import Adapter
from tests.models.checkpoints import mimo
from tests.text import tiny


@pytest.mark.thorough
def test_each_adapter_is_proven(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = mimo(tmp_path / "base", vocab_size=tiny.VOCAB)
    tiny.write(made.directory)
    paths = [f"{name}={Adapter(seed).save(tmp_path / name, made.tensors)}" for seed, name in enumerate(("one", "two"), 1)]
    asked = ["--tokens", "12", "--draws", "6", "--quiet", "--max-total-tokens", "600", "--max-running-requests", "4", "--dtype", "float32"]
    code = command.run(
        ["--model", str(made.directory), "--lora-modules", *paths, *asked, "--max-loras", "1", "--json", str(tmp_path / "proof.json")]
    )
    assert code == 0
    printed = capsys.readouterr().out
    assert [line for line in printed.splitlines() if line.startswith("adapter ")] == ["adapter     one", "adapter     two"]
    assert printed.count("verdict     holds") == 3
    proof = json.loads((tmp_path / "proof.json").read_text())
    assert proof["holds"] and [proof["adapters"][name]["holds"] for name in ("one", "two")] == [True, True]
    assert proof["adapters"]["one"]["accepted"] != proof["accepted"]
