"""Keys and values in float8: the text still does not depend on drafts, and the logits are near those of a cache that rounds nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mtpserve.config import SpecConfig
from mtpserve.core.sampling import SamplingParams
from tests.models.checkpoints import deepseek, mimo
from tests.models.harness import Harness
from tests.spec.test_trees import tree
from tests.tiny import prompts, run, tiny_engine, tiny_model

FP8 = torch.float8_e4m3fn
GREEDY = SamplingParams(max_tokens=24, temperature=0)
SHAPES: list[int | SpecConfig] = [0, 1, 3, 7, tree(3, 4, 12)]


@pytest.mark.parametrize("family", ["deepseek", "sparse", "mimo"])
def test_greedy_text_does_not_depend_on_drafts_or_chunks(family: str) -> None:
    model, asked = tiny_model(family), prompts(8)
    expected = [run(tiny_engine(model, 0, stored=FP8), [prompt], GREEDY)[0] for prompt in asked]
    assert expected != [run(tiny_engine(model, 0), [prompt], GREEDY)[0] for prompt in asked], "it would show nothing"
    for drafts in SHAPES:
        assert run(tiny_engine(model, drafts, budget=33, stored=FP8), asked, GREEDY) == expected


@pytest.mark.parametrize("family", ["deepseek", "sparse", "mimo"])
def test_exact_mode_stays_exact(family: str) -> None:
    model, asked = tiny_model(family, dtype=torch.bfloat16, kernels="exact"), prompts(4, longest=40)
    alone = [run(tiny_engine(model, 0, exact=True, stored=FP8), [prompt], GREEDY)[0] for prompt in asked]
    for shape in SHAPES[2:]:
        assert run(tiny_engine(model, shape, budget=45, seats=3, exact=True, stored=FP8), asked, GREEDY) == alone


@pytest.mark.parametrize("make", [deepseek, mimo], ids=["deepseek", "mimo"])
def test_logits_are_near(tmp_path: Path, make: type) -> None:
    make(tmp_path)
    ids = [torch.randint(24, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (40, 17)]
    rounded, exact = (torch.cat(Harness(tmp_path, ids, 4, cache=cache).all_logits((7, 3))) for cache in (FP8, torch.bfloat16))
    difference = (rounded - exact).std() / exact.std()
    assert 0 < difference < 0.1
