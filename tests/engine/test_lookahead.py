"""Tokens that are held ahead fit into the page tables and the memory plan, with steps in flight too."""

from __future__ import annotations

import pytest

from mtpserve.config import SpecConfig
from mtpserve.core.request import Request
from mtpserve.core.sampling import SamplingParams
from tests.tiny import CONTEXT, prompts, tiny_engine, tiny_model


@pytest.mark.parametrize("overlap", [0, 1, 2])
@pytest.mark.parametrize("predicted", [False, True], ids=["plain", "predicted"])
def test_a_request_may_fill_the_context(overlap: int, predicted: bool) -> None:
    """A chain of 3 and 8 free nodes: drafting with a prediction reaches 11 tokens ahead. Each step in flight holds as much again."""
    spec = SpecConfig(speculative_algorithm="MTP", speculative_num_steps=3)
    engine = tiny_engine(tiny_model(), spec, overlap=overlap, page_size=16)
    assert engine.runner.sizes.num_write_ahead() == 11
    prompt = (prompts(1, longest=30)[0] * 150)[: CONTEXT - 10]
    engine.add(Request("0", prompt, SamplingParams(max_tokens=10, temperature=0), prediction=[1, 2, 3, 4] if predicted else []))
    tokens: list[int] = []
    while engine.has_work:
        for event in engine.step():
            assert event.error is None, event.error
            tokens += event.tokens
    assert len(tokens) == 10
    engine.check_integrity()
