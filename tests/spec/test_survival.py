"""What verifications teach of how likely drafts are accepted."""

from __future__ import annotations

import pytest

from mtpserve.engine.depth.survival import Survival


def test_what_follows_a_rejected_draft_of_a_chain_says_nothing() -> None:
    survival = Survival(3)
    for _ in range(50):
        survival.observe(3, [])
    assert survival._verified[1:] == [0.0, 0.0] and survival.rates[0] < 0.1


def test_nodes_of_a_tree_are_counted_each() -> None:
    survival = Survival(3, trees=True)
    survival.observe(3, [1, 3])
    assert survival._verified == [1.0, 1.0, 1.0] and survival._accepted == [1.0, 0.0, 1.0]


@pytest.mark.parametrize("factor", [0.3, 1.5])
def test_a_factor_returns_to_one_while_nothing_is_drafted(factor: float) -> None:
    survival, found = Survival(3), [factor]
    for _ in range(60):
        found.append(survival.factor_without_drafts(found[-1]))
    assert abs(found[1] - 1) < abs(factor - 1) and found[-1] == pytest.approx(1, abs=0.01)


def test_a_factor_follows_a_requests_own_drafts() -> None:
    survival = Survival(3)
    assert survival.updated_factor(1.0, 3, 3) > 1.0 > survival.updated_factor(1.0, 3, 0)
