"""Depths that are chosen beside prompts that are longer than answers, in the first seconds."""

from __future__ import annotations

import pytest

from tests import selection
from tests.engine.beside_prompts import ratios
from tests.engine.captured import Apart, Captured

SECONDS, SEEDS = (10.0, 3) if selection.ALL else (5.0, 1)


@pytest.mark.parametrize(("batch", "rate"), [pytest.param(64, 0.05, marks=pytest.mark.thorough), (128, 0.2)])
def test_the_first_seconds_beside_prompts_lose_little(batch: int, rate: float) -> None:
    """What is learned in that time takes most of it. Room for further rows, which a step has on a GPU, is taken by prompts: while that was
    not known drafts seemed to be worth more."""
    [found] = ratios(batch, 256, rate, [SECONDS], SEEDS)
    assert found >= 0.98


def test_captured_prompts_have_passes_of_their_own() -> None:
    """Each pass that drafts is there twice in a step with prompts, which most steps have here."""
    [found] = ratios(64, 128, 0.05, [3.0], SEEDS, kind=Apart)
    assert found >= 0.985


@pytest.mark.parametrize(("batch", "rate"), [(64, 0.05), pytest.param(128, 0.2, marks=pytest.mark.thorough)])
def test_captured_steps_with_prompts_lose_little(batch: int, rate: float) -> None:
    [found] = ratios(batch, 128, rate, [SECONDS], SEEDS, kind=Captured)
    assert found >= 0.98
