"""Depths that are chosen beside prompts that are longer than answers, in the first seconds."""

from __future__ import annotations

import pytest

from tests.engine.beside_prompts import ratios


@pytest.mark.parametrize(("batch", "prompt", "rate"), [(64, 256, 0.2), (128, 128, 0.1)])
def test_the_first_seconds_beside_prompts_lose_little(batch: int, prompt: int, rate: float) -> None:
    """The draft layer's pass over prompts takes a percent, and what is learned in that time the rest. Room for further rows, which a step
    has on a GPU, is taken by prompts: while that was not known drafts seemed to be worth more."""
    [first, tenth] = ratios(batch, prompt, rate, [3.0, 10.0], seeds=2)
    assert first >= 0.95 and tenth >= 0.974
