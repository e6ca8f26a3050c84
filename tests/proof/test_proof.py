"""`mtpserve prove` on the demo model: it holds, and what does not hold is found."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from mtpserve.core.errors import ConfigError
from mtpserve.spec.verify import accept as accept_module
from mtpserve.text.outputs import Completion
from mtpserve.tools.prove import prove as command
from mtpserve.tools.prove.divergence import Divergence, LawTest, divergence, two_sample
from mtpserve.tools.prove.proof import Excuse, Proof, ProofStage, prove
from mtpserve.tools.prove.proof_progress import ProofProgress
from mtpserve.tools.prove.prove import next_steps
from mtpserve.tools.prove.rounding import Rounding, Share

SMALL = {"model": "demo", "max_total_tokens": 8192, "max_running_requests": 32}
ROUNDING = Rounding("bfloat16", "float32", 1.0, (0.01,) * 98 + (0.1,) * 2, Share(1, 100), Share(1, 100))
MTP: dict[str, Any] = {**SMALL, "speculative_algorithm": "MTP", "speculative_num_steps": 2}
PROMPTS = ["import os\n\ndef read_lines(path):", "class Stack:\n"]


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("topk", [1, 3])
def test_it_holds_for_the_demo_model(topk: int, dtype: str) -> None:
    options = {**MTP, "speculative_eagle_topk": topk, "dtype": dtype}
    told: list[ProofStage] = []
    proof = prove(options, PROMPTS, tokens=24, draws=12, progress=told.append)
    assert proof.holds and len(proof.laws) == 12 and proof.accept_length > 1
    assert all((law.same_text is not None) == (topk == 3 or law.feature == "grammar") for law in proof.laws)
    names = list(dict.fromkeys(stage.name for stage in told))
    assert names[:2] == ["with drafts", "plain decoding"] and len(names) == told[-1].number == told[-1].stages
    for number, name in enumerate(names, 1):
        stages = [stage for stage in told if stage.name == name]
        counts = [stage.done for stage in stages[1:]]
        # Loading, then one request after the other.
        assert stages[0].done is None and counts == list(range(stages[-1].of + 1)) and {stage.number for stage in stages} == {number}
        assert stages[-1].before == sum(stage.of for stage in told if stage.done == stage.of and stage.number < number)
    assert told[-1].later == 0 and (len(names) == 6) == (proof.excuse is not None)


def keep_every_draft(chosen: torch.Tensor, batch: Any, depth: int) -> Any:
    if batch.drafts.shape[1]:
        chosen = torch.cat([torch.where(batch.num_draft_tokens[:, None] > 0, batch.drafts, chosen[:, :-1]), chosen[:, -1:]], 1)
    return WALK(chosen, batch, depth)


def other_logits(logits: torch.Tensor, batch: Any, depth: int, thresholds: Any) -> Any:
    """As if the model's numbers changed by up to 1 wherever drafts are verified."""
    if batch.drafts.shape[1]:
        logits = logits + torch.sin(torch.arange(logits.shape[-1]) * 1.7)
    return DECIDE(logits, batch, depth, thresholds)


WALK, DECIDE = accept_module.walk, accept_module.verify


DEFECTS = [("walk", keep_every_draft, "bfloat16"), ("verify", other_logits, "float32")]
MORE_DEFECTS = [("walk", keep_every_draft, "float32"), ("verify", other_logits, "bfloat16")]


@pytest.mark.parametrize(
    ("name", "defect", "dtype"), [*DEFECTS, *(pytest.param(*defect, marks=pytest.mark.thorough) for defect in MORE_DEFECTS)]
)
def test_defects_are_found(monkeypatch: pytest.MonkeyPatch, name: str, defect: Any, dtype: str) -> None:
    monkeypatch.setattr(accept_module, name, defect)
    proof = prove({**MTP, "dtype": dtype, "attention_backend": "reference"}, PROMPTS, tokens=24, draws=2)
    assert not proof.holds and proof.divergences
    assert proof.divergences[0].plain != proof.divergences[0].speculative
    assert proof.excuse is not None and proof.excuse.exact.count > 0


def test_a_given_tie_excuses_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accept_module, "walk", keep_every_draft)
    for tie in (0.0, 1e-3):
        proof = prove({**MTP, "attention_backend": "reference"}, PROMPTS, tokens=24, draws=2, tie=tie)
        assert not proof.holds and proof.excuse is None and proof.tie == tie


def test_nothing_to_prove() -> None:
    for options, told in (
        ({"speculative_algorithm": "MTP", "speculative_num_steps": 0}, "--speculative-num-steps must be at least 1, got 0"),
        ({"speculative_algorithm": "none"}, "--speculative-algorithm none leaves nothing to compare"),
        (
            {"chunked_prefill_size": 3},
            "there is nothing to prove without drafts. Drafter: none, plain decoding: the checkpoint's MTP layer cannot",
        ),
    ):
        with pytest.raises(ConfigError, match=re.escape(told)):
            prove({**SMALL, **options}, PROMPTS, tokens=1, draws=1)


def test_the_two_sample_test() -> None:
    generator = torch.Generator().manual_seed(0)

    def draws(p: list[float]) -> list[tuple[int, ...]]:
        return [(int(i),) for i in torch.multinomial(torch.tensor(p), 2000, replacement=True, generator=generator)]

    assert two_sample(draws([0.5, 0.3, 0.2]), draws([0.5, 0.3, 0.2])) > 1e-3
    assert two_sample(draws([0.5, 0.3, 0.2]), draws([0.4, 0.4, 0.2])) < 1e-4
    assert two_sample([(1,)] * 9, [(1,)] * 9) == 1.0


def completion(*tokens: int) -> Completion:
    return Completion("", list(tokens), "length", prompt_tokens=1, cached_tokens=0, drafted=0, accepted=0)


def test_divergences() -> None:
    assert divergence(0, completion(1, 2), completion(1, 2)) is None
    found = divergence(3, completion(1, 2, 3), completion(1, 4, 3))
    assert found is not None and (found.prompt, found.place, found.plain, found.speculative) == (3, 1, 2, 4) and found.gap == float("inf")
    assert divergence(0, completion(1, 2), completion(1)) is not None
    lossy = Proof(1, 0.0, lossy=True)
    assert not lossy.holds and not Proof(1, 0.0, laws=[LawTest("a", 9, 1e-9, None)]).holds and Proof(1, 0.0).holds
    other_text = Proof(1, 0.0, laws=[LawTest("a", 9, 1.0, 0.9)])
    assert not other_text.holds
    for exact, holds in ((0, True), (1, False)):
        other_text.excuse = Excuse(ROUNDING, Share(0, 100), Share(1, 10), Share(exact, 1))
        assert other_text.holds is holds
    other_text.excuse = Excuse(ROUNDING, Share(0, 100), Share(900, 1000), Share(0, 64))
    assert not other_text.holds, "far more seeds differ than rounding explains"
    other_text.excuse = Excuse(ROUNDING, Share(90, 100), Share(1, 10), Share(0, 64))
    assert not other_text.holds, "far more tokens do"


def test_the_gap_of_a_tie() -> None:
    """Plain decoding gave 0.1 of error at most: 0.2 is a tie, 0.3 is none, and many of 0.2 are too many."""

    def proof(*gaps: float) -> Proof:
        found = [Divergence(0, place, 1, 2, -1.0, -1.0 - gap) for place, gap in enumerate(gaps)]
        return Proof(1, ROUNDING.bound, divergences=found, excuse=Excuse(ROUNDING, Share(0, 100), Share(0, 10), Share(0, 1)))

    assert proof(0.0, 0.1).holds and proof(0.2 - 1e-9).holds
    assert not proof(0.3).holds and not proof(*[0.19] * 40).holds


def test_what_is_shown_of_an_excuse(capsys: pytest.CaptureFixture[str]) -> None:
    divergences = [Divergence(0, place, 7, 8, -1.0, None if place == 9 else -1.0) for place in range(10)]
    excuse = Excuse(ROUNDING, Share(90, 100), Share(1, 10), Share(1, 3))
    command.show(Proof(2, ROUNDING.bound, divergences, [LawTest("top_p", 10, 1.0, 0.9)], excuse))
    shown = capsys.readouterr().out
    assert "1 of 2 prompts give the same text" in shown and "and 2 more" in shown
    assert "token 9: plain 7 (-1.00000), speculative 8 (not among the likeliest): DIFFERS: rounding explains up to 0.2" in shown
    assert "token 0: plain 7 (-1.00000), speculative 8 (-1.00000): 0 apart, tie within rounding, which explains up to 0.2" in shown
    assert "90 of 100 differ" in shown and "2 of the 3 requests that differ give the same text: DIFFERS" in shown
    assert "DOES NOT HOLD" in shown


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, out = tmp_path / "prompts", tmp_path / "proof.json"
    file.write_text('"import os\\n"\nclass A:\n')
    arguments = ["--prompts", str(file), "--tokens", "8", "--draws", "2", "--json", str(out), "--max-total-tokens", "4096"]
    assert command.run(arguments) == 0
    written = json.loads(out.read_text())
    assert written["holds"] and written["prompts"] == 2 and len(written["laws"]) == 12
    shown, told = capsys.readouterr()
    assert "2 of 2 prompts give the same text" in shown and "holds" in shown and written["next"] == []
    assert shown.startswith("drafter     MTP, up to 3 drafts in a row: the checkpoint's MTP layer") and written["drafting"] in shown
    lines = told.splitlines()
    assert (
        lines[0] == "prove: stage 1 of 2, with drafts: the model is loading"
        and "prove: stage 1 of 2, with drafts: 26 of 26 requests" in told
    )
    assert lines[-1].startswith("prove: stage 2 of 2, plain decoding: 26 of 26 requests")
    assert command.run([*arguments, "--quiet"]) == 0
    assert capsys.readouterr() == (shown, "")
    with pytest.raises(ConfigError, match="--draws"):
        command.run(["--draws", "0"])
    with pytest.raises(ConfigError, match="--prompts"):
        command.run(["--prompts", str(tmp_path / "none")])


@pytest.mark.parametrize("terminal", [False, True])
def test_how_far_it_is(terminal: bool) -> None:
    """A request each second: 2 s of loading are not time that others will take."""
    told, now = io.StringIO(), [0.0]
    console = Console(file=told, force_terminal=terminal, width=120, highlight=False, markup=False, soft_wrap=True)
    with ProofProgress(console=console, clock=lambda: now[0]) as progress:
        for number, later in ((1, 40), (2, 0)):
            progress(ProofStage(number, 2, "with drafts", None, 40, 40 * (number - 1), later))
            now[0] += 2
            for done in range(41):
                now[0] += done > 0
                progress(ProofStage(number, 2, "with drafts", done, 40, 40 * (number - 1), later))
    if terminal:
        assert "[1/2] with drafts" in told.getvalue() and "40/40" in told.getvalue() and "about 40 s left" in told.getvalue()
        return
    lines = told.getvalue().splitlines()
    assert lines[:2] == [
        "prove: stage 1 of 2, with drafts: the model is loading",
        "prove: stage 1 of 2, with drafts: 8 of 40 requests, about 72 s left",
    ]
    assert len(lines) == 12 and lines[-1] == "prove: stage 2 of 2, with drafts: 40 of 40 requests"


def failing(exact: int, **options: Any) -> list[str]:
    found = [Divergence(0, 0, 1, 2, -1.0, -3.0)]
    proof = Proof(1, ROUNDING.bound, found, excuse=Excuse(ROUNDING, Share(0, 100), Share(0, 10), Share(exact, 1)))
    return next_steps(proof, {"model": "demo", "port": 1} | options, None)


def test_what_to_try_next() -> None:
    numbers, logic = failing(0), failing(1, kv_cache_dtype="fp8", page_size=8)
    assert [step.split(":")[0].split(" ")[0] for step in numbers] == ["--dtype", "--attention-backend", "--speculative-exact"]
    assert [step.split(" ")[0] for step in failing(0, dtype="float32", attention_backend="reference")] == ["without", "--speculative-exact"]
    assert logic[0].startswith("--speculative-num-steps 1 ") and logic[1].startswith("without --kv-cache-dtype, --page-size, one after")
    assert "--record-steps" in logic[2] and "mtpserve replay" in logic[2]
    law = Proof(1, 0.0, laws=[LawTest("a", 300, 1e-9, None)])
    assert next_steps(law, {}, None)[0].startswith("--draws 1200:")
    assert "accept-threshold" in next_steps(Proof(1, 0.0, lossy=True), {}, None)[0]
    assert next_steps(law, {}, 0.5) == ["without --tie: what rounding explains is then measured, and anything beyond it shown"]


def test_a_failure_says_what_to_try(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(accept_module, "walk", keep_every_draft)
    out = tmp_path / "proof.json"
    arguments = ["--tokens", "12", "--draws", "2", "--json", str(out), "--max-total-tokens", "4096", "--attention-backend", "reference"]
    assert command.run([*arguments, "--dtype", "float32"]) == 1
    shown, told = capsys.readouterr()
    steps = json.loads(out.read_text())["next"]
    assert len(steps) == 3 and f"next        {steps[0]}\n            {steps[1]}\n" in shown
    assert "DOES NOT HOLD" in shown and "forgiven" not in shown and "stage 6 of 6, exact mode, with drafts" in told
