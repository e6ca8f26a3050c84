"""What benchmarks/heads trains and writes is what the engine loads: its drafts are those of the module that was trained."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mtpserve.core.sampling import SamplingParams, Speculation
from mtpserve.llm import LLM
from mtpserve.text.outputs import Completion

HEADS = Path(__file__).parents[2] / "benchmarks" / "heads"
ALGORITHMS = {"eagle": "EAGLE", "eagle3": "EAGLE3", "medusa": "MEDUSA", "dflash": "DFLASH", "standalone": "STANDALONE"}
PROMPT, TOKENS = list(range(300, 316)), 20


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """All kinds, after two steps, in numbers that bfloat16 has. Blocks count more than they do so early, so that drafts differ."""
    sys.path.insert(0, str(HEADS))
    import train_heads as train

    train.HELD_OUT = 1
    out = tmp_path_factory.mktemp("heads")
    small = ["--files", "2", "--texts", "2", "--length", "48", "--tokens", "192", "--dtype", "float32", "--out", str(out)]
    pupils = train.main(["--kinds", *ALGORITHMS, *small])
    for pupil in pupils:
        gains = {name: 8.0 if "o_proj" in name or "down_proj" in name else 1.0 for name in pupil.drafter.state_dict()}
        state = {name: (gains[name] * p).bfloat16().float() for name, p in pupil.drafter.state_dict().items()}
        pupil.drafter.load_state_dict(state)
        pupil.save(out / f"demo-{pupil.kind}", {})
    return out, {pupil.kind: pupil for pupil in pupils}


def generated(**options: Any) -> Completion:
    with LLM("demo", dtype="float32", max_total_tokens=512, **options) as llm:
        (found,) = llm.generate(
            [PROMPT], SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True, speculation=Speculation(trace=True))
        )
    return found


@pytest.fixture(scope="module")
def plain() -> list[int]:
    return generated(speculative_algorithm="none").tokens


@pytest.mark.parametrize("kind", ALGORITHMS)
def test_the_engine_drafts_what_the_trained_module_does(kind: str, trained: tuple[Path, dict[str, Any]], plain: list[int]) -> None:
    out, pupils = trained
    path = str(out / f"demo-{kind}")
    steps = 7 if kind == "dflash" else 1  # a block's drafts depend on how long it is
    options = {"speculative_algorithm": ALGORITHMS[kind], "speculative_num_steps": steps, "speculative_adaptive": False}
    found = generated(speculative_draft_model_path=path, **options)
    assert found.tokens == plain
    drafter = pupils[kind].drafter
    ids = torch.tensor([[*PROMPT, *plain, *[0] * 10]])
    drafter.anchors = lambda texts, length: torch.arange(1, length - 8).unsqueeze(0)  # DFlash's: all places
    with torch.no_grad():
        logits, _ = next(drafter.drafted(drafter.given.trunk.see(ids, drafter.given.head, 1.0)))
    best, behind = logits[0].argmax(-1), 1 if kind == "standalone" else 0  # row p drafts token p + 2, a model of its own token p + 1
    place, drafts, wanted = len(PROMPT) - 2, list[int](), list[int]()
    for proposal in found.trace:
        drafts += proposal.tokens[:1]
        wanted += [int(best[place + behind])] * bool(proposal.tokens)
        place += 1 + len(proposal.path)
    assert drafts == wanted
    assert len(drafts) > TOKENS // 2 and len(set(drafts)) > 2


def test_drafters_are_compared(trained: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The heads have learnt nothing yet: the model's own layer is accepted more."""
    import compare

    few = ["--depths", "1", "3", "--batches", "1", "--temperatures", "0", "--output", "12", "--rounds", "1"]
    compare.main(["--heads", str(trained[0]), "--drafters", "MTP", "MEDUSA", *few, "--json", str(tmp_path / "out.json")])
    cells = json.loads((tmp_path / "out.json").read_text())["numbers"]["cells"]
    length = {(cell["drafter"], cell["num_draft_tokens"]): cell["accept_length"] for cell in cells}
    assert length["MTP", 4] > 1.5 > length["MEDUSA", 4] >= 1
    assert {cell["drafter"]: cell["parameters"] for cell in cells} == {"MTP": 1355656, "MEDUSA": 1770240}
    assert all(cell["same_text"] for cell in cells)
    assert "1 request: " in capsys.readouterr().out
