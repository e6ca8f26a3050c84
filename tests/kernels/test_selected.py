"""Layers that attend to selected tokens, by the kernels: logits against transformers, tokens against plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from mtpserve.config import SpecConfig
from mtpserve.core.sampling import SamplingParams
from tests.kernels.test_engine import CHAIN, TREE
from tests.models.sparse_checkpoints import deepseek_v32, glm_dsa
from tests.models.test_parity import compare
from tests.runtime.recorders import Again
from tests.tiny import prompts, run, tiny_engine, tiny_model

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the tiny engine is on the CPU: interpreted alone")


@pytest.mark.parametrize("make", [deepseek_v32, glm_dsa])
def test_logits_are_transformers(tmp_path: Path, make: Any) -> None:
    options = {"indexer_types": ["full", "shared"]} if make is glm_dsa else {}
    compare(make(tmp_path, num_hidden_layers=2, n_routed_experts=4, num_experts_per_tok=1, **options), 4, "triton")


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_tokens_are_those_of_plain_torch(shape: SpecConfig) -> None:
    """Replayed steps, padding rows and all."""
    asked, greedy = [prompts(1, longest=8)[0], list(range(25))], SamplingParams(max_tokens=5, temperature=0)
    wanted = run(tiny_engine(tiny_model("sparse"), 0), asked, greedy)
    model, recorder = tiny_model("sparse", kernels="triton"), Again()
    engine = tiny_engine(model, shape, page_size=16, backend="triton", overlap=1, recorder=recorder, seats=4)
    assert run(engine, asked, greedy) == wanted
    assert recorder.replayed
    assert wanted != run(tiny_engine(tiny_model(), 0), asked, greedy), "the choice would not matter"
