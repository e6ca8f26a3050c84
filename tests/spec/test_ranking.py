"""The drafts of a step's requests, the likeliest ones first: against a list of all of them."""

from __future__ import annotations

from random import Random

import pytest

from mtpserve.engine.depth.ranking import Ranking


@pytest.mark.parametrize("seed", range(5))
def test_it_is_a_list_of_all_drafts_in_order(seed: int) -> None:
    random = Random(seed)
    kinds = []
    for first in range(0, 12, 3):
        chances = sorted((random.random() for _ in range(random.randrange(5))), reverse=True)
        kinds.append((chances, [*range(first, first + random.randrange(1, 4))]))
    ranking = Ranking(kinds)
    drafts = sorted(((chance, -rank) for chances, own in kinds for _ in own for rank, chance in enumerate(chances)), reverse=True)
    assert len(ranking) == len(drafts)
    for count in range(len(drafts) + 1):
        shared = ranking.drafts_per_request(count, 12)
        taken = sorted((chances[rank] for chances, own in kinds for i in own for rank in range(shared[i])), reverse=True)
        assert taken == [chance for chance, _ in drafts[:count]]  # each request's first ones, and the likeliest of all
        assert ranking.expected_tokens(count) == pytest.approx(sum(taken))
    for rank in range(5):
        assert ranking.min_count(rank) == next((n for n, (_, own) in enumerate(drafts, 1) if -own == rank), len(drafts))


def test_without_drafts_nothing_is_gained() -> None:
    for ranking in (Ranking([]), Ranking([([], [0, 1])])):
        assert len(ranking) == ranking.min_count(0) == ranking.expected_tokens(0) == 0 and ranking.drafts_per_request(0, 2) == [0, 0]


def test_a_requests_drafts_of_one_chance_are_taken_in_order() -> None:
    assert Ranking([([0.5, 0.5], [0, 1])]).drafts_per_request(3, 2) == [2, 1]
