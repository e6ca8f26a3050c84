"""Layers that attend to selected tokens, by the kernels: logits against transformers, tokens against plain torch."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mtpserve.attention.gpu.triton_selected import RowsSeen
from mtpserve.config import SpecConfig
from mtpserve.core.sampling import SamplingParams
from tests import selection
from tests.kernels.test_engine import CHAIN, TREE
from tests.models.sparse_checkpoints import glm_dsa
from tests.models.test_parity import FEW, compare
from tests.runtime.recorders import Again, nothing_is_read
from tests.tiny import prompts, run, tiny_engine, tiny_model


def test_logits_are_transformers(tmp_path: Path) -> None:
    """A layer that selects, and one that takes its choice."""
    few = {"num_hidden_layers": 2, "n_routed_experts": 4, "num_experts_per_tok": 1, "indexer_types": ["full", "shared"]}
    compare(glm_dsa(tmp_path, **few), 4, "triton", FEW if selection.ALL else FEW[1:])


@pytest.mark.thorough  # the logits above have drafts, and tests/spec/test_identity.py has both shapes in plain torch
@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_tokens_are_those_of_plain_torch(shape: SpecConfig, device: torch.device) -> None:
    """Replayed steps, padding rows and all. One layer, the second is the MTP layer."""
    asked, greedy = [prompts(1, longest=4)[0], list(range(14))], SamplingParams(max_tokens=3, temperature=0)
    wanted = run(tiny_engine(tiny_model("sparse", layers=1, kernels="torch"), 0), asked, greedy)
    model, recorder = tiny_model("sparse", kernels="triton", layers=1), Again()
    engine = tiny_engine(model, shape, page_size=16, backend="triton", overlap=1, recorder=recorder, seats=4, device=device)
    assert run(engine, asked, greedy) == wanted
    assert recorder.replayed
    assert wanted != run(tiny_engine(tiny_model(layers=1, kernels="torch"), 0), asked, greedy), "the choice would not matter"


def test_what_rows_see_is_computed_on_the_device(device: torch.device) -> None:
    """Two spans, the second a tree whose last two rows are padding; one row after the tokens that count sees no more than these."""
    given = {
        "input_ids": range(7), "query_start_loc": (0, 3, 7), "token_indices": (4, 5, 6, 10, 11, 12, 13), "seq_lens": (7, 12),
        "tree_start": (6, 10),
    }  # fmt: skip
    batch: Any = SimpleNamespace(**{name: torch.tensor(list(values), device=device) for name, values in given.items()})
    with nothing_is_read():
        seen = RowsSeen.of(batch)
    assert seen.ends.tolist() == [5, 6, 7, 11, 12, 12, 12]
    assert seen.starts is not None and seen.starts.tolist() == [6, 6, 6, 10, 10, 10, 10]
