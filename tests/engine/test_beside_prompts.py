"""Depths that are chosen beside prompts that are longer than answers, in the first seconds."""

from __future__ import annotations

import pytest

from tests.engine.beside_prompts import ratios


@pytest.mark.parametrize(("rate", "least"), [(0.05, 0.975), (0.2, 0.98)])
def test_the_first_seconds_beside_prompts_lose_little(rate: float, least: float) -> None:
    """The draft layer's pass over prompts takes a percent, and what is learned in that time the rest. Room for further rows, which a step
    has on a GPU, is taken by prompts: while that was not known drafts seemed to be worth more."""
    [found] = ratios(64, 256, rate, [10.0], seeds=3)
    assert found >= least
