"""The Triton kernel of recurrent layers against its reference."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from mtpserve_kernels.recurrent.delta import recur
from mtpserve_kernels.recurrent.reference import Rule

from tests.kernels.recurrences import DELTA, MAMBA2, case
from tests.kernels.test_recurrent import compared, span


@pytest.mark.covering(1)
@pytest.mark.parametrize(("seed", "longest", "trees"), [(1, 9, False), (2, 1, True), (3, 20, True)])
@pytest.mark.parametrize("rule", DELTA[:-1])
def test_it_computes_what_the_reference_does(rule: Rule, seed: int, longest: int, trees: bool, device: torch.device) -> None:
    compared(case(rule, seed, trees, longest=longest).at(device), recur, 1e-4)


@pytest.mark.parametrize(("rule", "seed"), [(DELTA[1], 9), (DELTA[2], 7), (DELTA[3], 11)])
def test_tiles(rule: Rule, seed: int, device: torch.device) -> None:
    """Spans of which states are kept within tiles and after them, and what is left of these spans row by row."""
    given = case(rule, seed, trees=seed == 11, requests=2, longest=40)
    assert max(given.spans.length.tolist()) > 16
    compared(given.at(device), recur, 1e-4)


def test_tiles_of_a_text_that_repeats_itself(device: torch.device) -> None:
    """Equal keys that nothing decays: no sum of a tile may cancel where those of rows do not."""
    torch.manual_seed(0)
    rule, rows = Rule(1, 1, 20, 6, 2), 37
    x, conv, given = torch.randn(1, rule.channels).repeat(rows, 1), torch.randn(rule.taps, rule.channels), case(rule, 0, trees=False)
    gates = torch.stack([torch.zeros(rows, 1), torch.ones(rows, 1)], 1)
    one = replace(given, x=x, gates=gates, conv=conv, spans=span(rows, 0, 0, True)._replace(longest=rows))
    compared(one.at(device), recur, 2e-6)


def test_mamba2(device: torch.device) -> None:
    compared(case(MAMBA2[1], 1, trees=True, longest=2).at(device), recur, 1e-4)


@pytest.mark.parametrize("drafts", [1, 33])
def test_other_numbers_of_drafts(drafts: int, device: torch.device) -> None:
    rule, requests = (DELTA[1], 5) if drafts == 1 else (DELTA[0], 1)
    compared(case(rule, 5, trees=drafts > 1, ring=drafts, requests=requests).at(device), recur, 1e-4)


def test_bfloat16(device: torch.device) -> None:
    compared(case(DELTA[1], 1, trees=True, requests=2, longest=4).to(torch.bfloat16).at(device), recur, 2e-2)
