"""Keys and values in float8: the text still does not depend on drafts, and the logits are near those of a cache that rounds nothing."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

from mtpserve.config import SpecConfig
from mtpserve.core.sampling import SamplingParams
from tests.models.checkpoints import deepseek, mimo
from tests.models.harness import Harness
from tests.spec.diagonal import diagonal
from tests.spec.test_trees import tree
from tests.tiny import prompts, run, tiny_engine, tiny_model

FP8 = torch.float8_e4m3fn
GREEDY = SamplingParams(max_tokens=24, temperature=0)
ASKED, LONG = prompts(8), prompts(4, longest=40)
FAMILIES = ["deepseek", "sparse", "mimo"]
DEEP: dict[str, int | SpecConfig] = {"3": 3, "7": 7, "tree": tree(3, 4, 12)}
SHAPES: dict[str, int | SpecConfig] = {"0": 0, "1": 1} | DEEP


@cache
def texts_alone(family: str) -> list[list[int]]:
    model = tiny_model(family, kernels="torch")
    expected = [run(tiny_engine(model, 0, kv_dtype=FP8), [prompt], GREEDY)[0] for prompt in ASKED]
    assert expected != [run(tiny_engine(model, 0), [prompt], GREEDY)[0] for prompt in ASKED], "it would show nothing"
    return expected


@pytest.mark.parametrize(("shape", "family"), diagonal(SHAPES, FAMILIES))
def test_greedy_text_does_not_depend_on_drafts_or_chunks(family: str, shape: int | SpecConfig) -> None:
    assert run(tiny_engine(tiny_model(family, kernels="torch"), shape, budget=33, kv_dtype=FP8), ASKED, GREEDY) == texts_alone(family)


@cache
def exact_texts_alone(family: str) -> list[list[int]]:
    model = tiny_model(family, dtype=torch.bfloat16, kernels="exact")
    return [run(tiny_engine(model, 0, exact=True, kv_dtype=FP8), [prompt], GREEDY)[0] for prompt in LONG]


@pytest.mark.parametrize(("shape", "family"), diagonal(DEEP, FAMILIES))
def test_exact_mode_stays_exact(family: str, shape: int | SpecConfig) -> None:
    model = tiny_model(family, dtype=torch.bfloat16, kernels="exact")
    assert run(tiny_engine(model, shape, budget=45, seats=3, exact=True, kv_dtype=FP8), LONG, GREEDY) == exact_texts_alone(family)


@pytest.mark.parametrize("make", [deepseek, mimo], ids=["deepseek", "mimo"])
def test_logits_are_near(tmp_path: Path, make: type) -> None:
    make(tmp_path)
    ids = [torch.randint(24, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (40, 17)]
    rounded, exact = (torch.cat(Harness(tmp_path, ids, 4, cache=cache).all_logits((7, 3))) for cache in (FP8, torch.bfloat16))
    difference = (rounded - exact).std() / exact.std()
    assert 0 < difference < 0.1
