"""`--speculative-exact`: in bfloat16, where near ties abound, greedy text is the same for any drafts, any company and any chunking."""

from __future__ import annotations

import pytest
import torch

from mtpserve.config import SpecConfig
from mtpserve.core.request import Request
from mtpserve.core.sampling import SamplingParams
from mtpserve.layers import torch_kernels
from tests.spec.test_trees import tree
from tests.tiny import prompts, run, tiny_engine, tiny_model

GREEDY = SamplingParams(max_tokens=24, temperature=0)
SHAPES: list[int | SpecConfig] = [0, 3, 7, tree(3, 4, 12)]


@pytest.mark.parametrize("family", ["deepseek", "deepseek, experts one by one", "mimo", "mimo, windows"])
def test_text_is_bitwise_the_same(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    if "one by one" in family:
        monkeypatch.setattr(torch_kernels, "ALL_EXPERTS", 0)
    window = 10 if "windows" in family else None
    model = tiny_model(family.split(",")[0], dtype=torch.bfloat16, kernels="exact", window=window)
    asked = prompts(5, longest=40)
    alone = [run(tiny_engine(model, 0, exact=True), [prompt], GREEDY)[0] for prompt in asked]
    for shape in SHAPES:
        engine = tiny_engine(model, shape, budget=45, seats=3, exact=True)
        assert run(engine, asked, GREEDY) == alone


@torch.inference_mode()
def test_a_rows_logits_do_not_depend_on_the_pass() -> None:
    """Bit by bit, not only in the choice: log-probabilities of the same text under plain decoding and under a tree."""
    model, asked = tiny_model(dtype=torch.bfloat16, kernels="exact"), prompts(6, longest=20)
    params = SamplingParams(max_tokens=20, temperature=0, logprobs=5)
    heard = []
    for shape, budget in ((0, 64), (3, 33), (tree(3, 3, 9), 64)):
        engine = tiny_engine(model, shape, budget=budget, exact=True)
        found: dict[str, list[object]] = {}
        for i, prompt in enumerate(asked):
            engine.add(Request(str(i), prompt, params))
        while engine.has_work:
            for event in engine.step():
                found.setdefault(event.id, []).extend(event.logprobs or [])
        heard.append(found)
    assert heard[0] == heard[1] == heard[2]
