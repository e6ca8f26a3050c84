"""The MTP layer for SmolLM2 that comes with the package."""

from __future__ import annotations

import json

import pytest

from mtpserve.weights.checkpoint.checkpoint import Checkpoint
from mtpserve.weights.checkpoint.hub import BUNDLED_LAYERS, TOKEN_MAP

LAYER = BUNDLED_LAYERS["smollm2"]


def test_it_is_small_and_says_how_it_was_trained() -> None:
    assert sum(file.stat().st_size for file in LAYER.iterdir()) < 10 << 20
    tensors = Checkpoint.open(LAYER).tensors
    assert tensors and all(name.startswith("model.layers.0.") for name in tensors)
    training = json.loads((LAYER / "training.json").read_text())
    assert training["acceptance_length"] == pytest.approx(1 + sum(training["accepted_by_position"]), abs=0.01)
    assert training["same_answers"] == training["prompts"]
    assert len(json.loads((LAYER / TOKEN_MAP).read_text())) == training["recipe"]["draft_vocab"]
