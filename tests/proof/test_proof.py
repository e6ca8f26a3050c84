"""`mtpserve prove` on the demo model: it holds, and what does not hold is found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mtpserve.cli import prove as command
from mtpserve.core.errors import ConfigError
from mtpserve.llm import Completion
from mtpserve.proof import LawTest, Proof, divergence, prove, two_sample
from mtpserve.spec import accept as accept_module

SMALL = {"model": "demo", "max_total_tokens": 8192, "max_running_requests": 32}
PROMPTS = ["import os\n\ndef read_lines(path):", "class Stack:\n"]


@pytest.mark.parametrize("topk", [1, 3])
def test_it_holds_for_the_demo_model(topk: int) -> None:
    options: dict[str, Any] = {**SMALL, "speculative_algorithm": "MTP", "speculative_num_steps": 2, "speculative_eagle_topk": topk}
    told: list[tuple[str, int, int]] = []
    proof = prove(options, PROMPTS, tokens=24, draws=12, tie=0.0, progress=lambda *what: told.append(what))
    assert proof.holds and not proof.divergences and len(proof.laws) == 12 and proof.accept_length > 1
    assert all((law.same_text == 1.0) == (topk == 3 or law.feature == "grammar") for law in proof.laws)
    assert told[-1][1] == told[-1][2] and {name for name, _, _ in told} == {"plain", "speculative"}


def test_wrong_texts_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Acceptance that keeps every draft: greedy text differs, and the proof says where."""
    walk = accept_module.walk

    def everything(chosen: torch.Tensor, batch: Any, depth: int) -> Any:
        if batch.drafts.shape[1]:
            chosen = torch.cat([torch.where(batch.draft_count[:, None] > 0, batch.drafts, chosen[:, :-1]), chosen[:, -1:]], 1)
        return walk(chosen, batch, depth)

    monkeypatch.setattr(accept_module, "walk", everything)
    options: dict[str, Any] = {**SMALL, "speculative_algorithm": "MTP", "speculative_num_steps": 2}
    proof = prove(options, PROMPTS, tokens=24, draws=2, tie=0.0)
    assert not proof.holds and proof.divergences
    assert proof.divergences[0].plain != proof.divergences[0].speculative


def test_nothing_to_prove() -> None:
    with pytest.raises(ConfigError, match="num-steps"):
        prove({**SMALL, "speculative_algorithm": "MTP", "speculative_num_steps": 0}, PROMPTS, tokens=1, draws=1, tie=0.0)


def test_the_two_sample_test() -> None:
    generator = torch.Generator().manual_seed(0)

    def draws(p: list[float]) -> list[tuple[int, ...]]:
        return [(int(i),) for i in torch.multinomial(torch.tensor(p), 2000, replacement=True, generator=generator)]

    assert two_sample(draws([0.5, 0.3, 0.2]), draws([0.5, 0.3, 0.2])) > 1e-3
    assert two_sample(draws([0.5, 0.3, 0.2]), draws([0.4, 0.4, 0.2])) < 1e-4
    assert two_sample([(1,)] * 9, [(1,)] * 9) == 1.0


def completion(*tokens: int) -> Completion:
    return Completion("", list(tokens), "length", 1, 0, 0)


def test_divergences() -> None:
    assert divergence(0, completion(1, 2), completion(1, 2)) is None
    found = divergence(3, completion(1, 2, 3), completion(1, 4, 3))
    assert found is not None and (found.prompt, found.place, found.plain, found.speculative) == (3, 1, 2, 4) and found.gap == float("inf")
    assert divergence(0, completion(1, 2), completion(1)) is not None
    lossy = Proof(1, 0.0, lossy=True)
    assert not lossy.holds and not Proof(1, 0.0, laws=[LawTest("a", 9, 1e-9, None)]).holds and Proof(1, 0.0).holds
    assert not LawTest("a", 9, 1.0, 0.9).holds


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "prompts", tmp_path / "proof.json"
    file.write_text('"import os\\n"\nclass A:\n')
    arguments = ["--prompts", str(file), "--tokens", "8", "--draws", "2", "--json", str(out), "--max-total-tokens", "4096"]
    assert command.run(arguments) == 0
    written = json.loads(out.read_text())
    assert written["holds"] and written["prompts"] == 2 and len(written["laws"]) == 12
    shown = capsys.readouterr().out
    assert "2 of 2 prompts give the same text" in shown and "holds" in shown
    with pytest.raises(ConfigError, match="--draws"):
        command.run(["--draws", "0"])
    with pytest.raises(ConfigError, match="--prompts"):
        command.run(["--prompts", str(tmp_path / "none")])
