"""Layers that see a sliding window, by the kernels: logits against transformers, tokens against plain torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mtpserve.config import SpecConfig
from mtpserve.core.sampling import SamplingParams
from tests import selection
from tests.kernels.test_engine import CHAIN, TREE
from tests.models.checkpoints import mimo
from tests.models.test_parity import FEW, compare
from tests.tiny import prompts, run, tiny_engine, tiny_model


def test_logits_are_transformers(tmp_path: Path) -> None:
    types = ["full_attention", "sliding_attention"]
    tiny = mimo(tmp_path, use_sliding_window=True, sliding_window=5, num_hidden_layers=2, layer_types=types)
    compare(tiny, 4, "triton", FEW if selection.ALL else FEW[1:])


@pytest.mark.parametrize(
    ("family", "shape"), [("deepseek", CHAIN), pytest.param("deepseek", TREE, marks=pytest.mark.thorough), ("mimo", TREE), ("oss", CHAIN)]
)
def test_tokens_are_those_of_plain_torch(family: str, shape: SpecConfig, device: torch.device) -> None:
    asked, greedy = [prompts(1, longest=8)[0], list(range(25))], SamplingParams(max_tokens=4, temperature=0)
    wanted = run(tiny_engine(tiny_model(family, window=10, kernels="torch"), 0), asked, greedy)
    engine = tiny_engine(tiny_model(family, window=10, kernels="triton"), shape, page_size=16, backend="triton", device=device)
    assert run(engine, asked, greedy) == wanted
    assert wanted != run(tiny_engine(tiny_model(family, kernels="torch"), 0), asked, greedy), "the window would not matter"
