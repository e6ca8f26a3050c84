"""The Triton kernel of recurrent layers against its reference."""

from __future__ import annotations

import pytest
import torch
from mtpserve_kernels.recurrent.delta import recur
from mtpserve_kernels.recurrent.reference import Rule

from tests.kernels.recurrences import RULES, case
from tests.kernels.test_recurrent import compared


@pytest.mark.parametrize(("seed", "longest", "trees"), [(1, 9, False), (2, 1, True), (3, 20, True)])
@pytest.mark.parametrize("rule", RULES[:-1])
def test_it_computes_what_the_reference_does(rule: Rule, seed: int, longest: int, trees: bool, device: torch.device) -> None:
    compared(case(rule, seed, trees, longest=longest).at(device), recur, 1e-4)


@pytest.mark.parametrize("drafts", [1, 40])
def test_other_numbers_of_drafts(drafts: int, device: torch.device) -> None:
    compared(case(RULES[1], 5, trees=drafts > 1, ring=drafts, requests=5 if drafts == 1 else 2).at(device), recur, 1e-4)


def test_bfloat16(device: torch.device) -> None:
    compared(case(RULES[1], 1, trees=True).to(torch.bfloat16).at(device), recur, 2e-2)
