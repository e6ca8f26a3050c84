"""How likely drafts are accepted, learned from verifications.

Drafts are counted by their rank: of a chain the depth, of a tree the place in the order of scores
(spec/draft/tree), so that the first n drafts are what a proposal of n would have been.

    chain    chance(j) = rate(1) · … · rate(j)       rate(j): acceptance of depth j after depth j - 1's
    tree     chance(j) = rate(j)                     rate(j): how often node j is on the accepted path

A request whose drafts are accepted more or less often than others' has a factor for all rates, which follows
what comes of its own drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import pow
from typing import TypeVar

PRIOR, STRENGTH = 0.8, 4.0  # a rate before anything was seen, as so many verifications
# A chain's deeper drafts are expected to do as the one before, as so many verifications: of depths that are
# not in use few are seen, and some that were rejected at the beginning of a text kept a depth out of use for
# ten seconds.
ALIKE = 16.0
KEEP = 1 - 1 / 300  # of what was counted, with each further verification of the rank
HIGHEST = 0.98  # of a rate
RATE, BACK = 0.03, 0.995  # how fast a request's factor follows its drafts, and returns to 1
UNSEEN = 0.9  # and how fast, from one choice of depths to the next, while it has no drafts
LOWEST_FACTOR, HIGHEST_FACTOR = 0.2, 1.6
PART = 8  # requests of a step of which is learned

T = TypeVar("T")


class Survival:
    """`ranks`: drafts of one request, at most."""

    def __init__(self, ranks: int, trees: bool = False) -> None:
        self.ranks, self.trees = ranks, trees
        self.rates = [pow(PRIOR, rank) if trees else PRIOR for rank in range(1, ranks + 1)]
        self._first = self.rates[:]
        self._hits, self._trials = [0.0] * ranks, [0.0] * ranks

    def observe(self, drafts: int, accepted: Sequence[int]) -> None:
        """One verification of `drafts` drafts: the ranks that were accepted, from 1 on."""
        num_ranks = min(drafts, self.ranks)
        # Of a chain, what follows the first draft that was rejected says nothing.
        for i in range(num_ranks if self.trees else min(num_ranks, len(accepted) + 1)):
            self._hits[i] = self._hits[i] * KEEP + (i + 1 in accepted)
            self._trials[i] = self._trials[i] * KEEP + 1
        for i in range(self.ranks):
            before, strength = (
                (self.rates[i - 1], ALIKE) if i and not self.trees else (self._first[i], STRENGTH)
            )
            self.rates[i] = (self._hits[i] + strength * before) / (self._trials[i] + strength)

    def chances(self, factor: float, max_ranks: int) -> list[float]:
        """Of each of the first `max_ranks` to be accepted. Of a tree, each is a mean over its neighbours
        where that makes them fall."""
        if self.trees:
            return falling([min(rate * factor, HIGHEST) for rate in self.rates[:max_ranks]])
        chances, chance = list[float](), 1.0
        for rate in self.rates[:max_ranks]:
            chance *= min(rate * factor, HIGHEST)
            chances.append(chance)
        return chances

    def follow(self, factor: float, drafts: int, accepted: int) -> float:
        """A request's factor after one of its verifications."""
        expected = sum(self.chances(factor, drafts))
        moved = pow(factor, BACK) * (1 + RATE * (accepted - expected) / (1 + expected))
        return min(max(moved, LOWEST_FACTOR), HIGHEST_FACTOR)

    def unseen(self, factor: float) -> float:
        """A request's factor after some steps without drafts."""
        return pow(factor, UNSEEN)


def part_of(requests: Sequence[T], turn: int, least: int = 1) -> Sequence[T]:
    """Some of a step's requests, in turn: of many of them a part tells as much, and each takes some
    microseconds. Each of them is in one of `least` steps, or of more."""
    every = max(len(requests) // PART, least)
    return requests if every == 1 else requests[turn % every :: every]


def falling(numbers: Sequence[float]) -> list[float]:
    """The nearest numbers that never rise: those that do are replaced by their mean."""
    blocks = list[tuple[float, int]]()  # sums, of so many
    for number in numbers:
        total, count = number, 1
        while blocks and blocks[-1][0] * count < total * blocks[-1][1]:
            before, size = blocks.pop()
            total, count = total + before, count + size
        blocks.append((total, count))
    return [total / count for total, count in blocks for _ in range(count)]
