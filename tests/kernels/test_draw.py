"""Drafts that are drawn from logits, and their distributions, against the law written down plainly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mtpserve_kernels.arrivals import arrival_counters
from mtpserve_kernels.spec import reference
from mtpserve_kernels.spec.draw import draw
from torch import Tensor

from tests.kernels.cases import settings

NO_CUTS = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


def case(vocab: int, seed: int, given: dict[str, Any]) -> tuple[Any, ...]:
    """logits, seats, index and what the seats have, of five rows."""
    dice = torch.Generator().manual_seed(seed)
    per_seat = settings(7, dice, **given)
    logits, req_indices = torch.randn(5, vocab, generator=dice) * 3 - 40, torch.randperm(7, generator=dice)[:5]
    index = torch.randint(1, 1000, (5,), generator=dice)
    return logits, req_indices, index, *(per_seat[name] for name in ("temperature", "top_k", "top_p", "min_p", "seed", "coupled"))


def compare(device: torch.device, arguments: tuple[Any, ...], with_q: bool, **options: bool) -> tuple[Tensor, Tensor]:
    """q has rows that are a part of wider ones, and is full of NaN before."""
    logits: Tensor = arguments[0]
    expected_q = torch.zeros_like(logits)
    expected = reference.draw(*arguments, expected_q)
    q = torch.full((len(logits), 2, logits.shape[1]), torch.nan, device=device)
    on_device = [x if x is None else x.to(device) for x in arguments]
    tokens = draw(*on_device, q[:, 1] if with_q else None, **options).cpu()
    assert tokens.equal(expected), (tokens, expected)
    assert not arrival_counters("draw", len(logits), device).any()
    if with_q:
        assert q[:, 0].isnan().all()
        torch.testing.assert_close(q[:, 1].cpu(), expected_q, rtol=1e-4, atol=1e-9)
    return tokens, q[:, 1].cpu()


@pytest.mark.parametrize("with_q", [False, True], ids=["tokens", "law"])
@pytest.mark.parametrize("given", [{}, NO_CUTS, {"temperature": 0.0}], ids=["cuts", "temperature", "greedy"])
@pytest.mark.parametrize("vocab", [1, 100, 9001])
def test_drafts(device: torch.device, vocab: int, given: dict[str, Any], with_q: bool) -> None:
    options = {f"any_{name}": not given for name in ("top_k", "top_p", "min_p")}
    compare(device, case(vocab, vocab, given), with_q, **options)


@pytest.mark.parametrize("name", ["top_k", "top_p", "min_p"])
def test_one_kind_of_cut(device: torch.device, name: str) -> None:
    """The kernel has no pointer of the other two. Some chunks of a row lie below the cut."""
    given = {other: value for other, value in NO_CUTS.items() if other != name} | {"temperature": 0.7}
    options = {f"any_{other}": other == name for other in NO_CUTS}
    for with_q in (False, True):
        compare(device, case(9001, 5, given), with_q, **options)


def test_all_coupled(device: torch.device) -> None:
    """Without `coupled` each takes the noise of the target's choice."""
    arguments = case(300, 3, NO_CUTS | {"temperature": 1.0, "coupled": 1})
    with_flags, _ = compare(device, arguments, False)
    without, _ = compare(device, (*arguments[:-1], None), False)
    assert with_flags.equal(without)
    drawn, _ = compare(device, case(300, 3, NO_CUTS | {"temperature": 1.0, "coupled": 0}), False)
    assert not drawn.equal(without), "another stream"


def test_rows_that_are_not_finite(device: torch.device) -> None:
    """Any token, from a distribution."""
    arguments = case(5000, 1, {"temperature": 1.0})
    logits = arguments[0]
    logits[0, 4500], logits[1, 7], logits[2], logits[3, :4990] = torch.nan, torch.inf, -torch.inf, -torch.inf
    tokens, q = compare(device, arguments, True)
    assert tokens[:3].tolist() == [4500, 7, 0] and tokens[3] >= 4990
    torch.testing.assert_close(q.sum(1), torch.ones(5))
