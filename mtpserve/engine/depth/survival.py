"""How likely drafts are accepted, learned from verifications.

Drafts are counted by their rank. The rank of a chain's draft is its depth. The rank of a tree's node is its
place in the order of scores (spec/draft/tree). So the first n drafts are what a proposal of n would have
been.

    chain    chance(j) = rate(1) · … · rate(j)       rate(j): acceptance of depth j after depth j - 1's
    tree     chance(j) = rate(j)                     rate(j): how often node j is on the accepted path

Each request has a factor for all rates, the acceptance factor. It follows what comes of the request's own
drafts, which may be accepted more or less often than others'.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import pow
from operator import mul
from typing import TypeVar

from mtpserve.engine.depth.depth_config import CONFIG, DepthPolicyConfig

T = TypeVar("T")


class Survival:
    """`ranks`: drafts of one request, at most."""

    def __init__(self, ranks: int, trees: bool = False, config: DepthPolicyConfig = CONFIG) -> None:
        self.ranks, self.trees, self.config = ranks, trees, config
        prior = config.prior_acceptance
        self.rates = [pow(prior, rank) if trees else prior for rank in range(1, ranks + 1)]
        self._prior_rates = self.rates[:]
        # by rank: the drafts that were accepted, and those that were verified
        self._accepted, self._verified = [0.0] * ranks, [0.0] * ranks

    def observe(self, drafts: int, accepted: Sequence[int]) -> None:
        """One verification of `drafts` drafts. `accepted`: the ranks that were accepted, from 1 on."""
        num_ranks, keep = min(drafts, self.ranks), 1 - 1 / self.config.max_verifications
        # Of a chain, what follows the first draft that was rejected says nothing.
        for i in range(num_ranks if self.trees else min(num_ranks, len(accepted) + 1)):
            self._accepted[i] = self._accepted[i] * keep + (i + 1 in accepted)
            self._verified[i] = self._verified[i] * keep + 1
        for i in range(self.ranks):
            prior, strength = self._prior_rates[i], self.config.prior_verifications
            if i and not self.trees:
                prior, strength = self.rates[i - 1], self.config.prior_rank_verifications
            self.rates[i] = (self._accepted[i] + strength * prior) / (self._verified[i] + strength)

    def chances(self, factor: float, max_ranks: int) -> list[float]:
        """The chance of each of the first `max_ranks` drafts. They never rise: of a tree, neighbours that
        would rise have their mean."""
        rates = [min(rate * factor, 1.0) for rate in self.rates[:max_ranks]]
        return falling(rates) if self.trees else [*accumulate(rates, mul)]

    def updated_factor(self, factor: float, drafts: int, accepted: int) -> float:
        """A request's acceptance factor after one of its verifications."""
        expected = sum(self.chances(factor, drafts))
        return factor * (1 + self.config.factor_step * (accepted - expected) / (1 + expected))

    def factor_without_drafts(self, factor: float) -> float:
        """A request's acceptance factor after some steps without drafts."""
        return pow(factor, self.config.factor_memory_fraction)


def sample_of(
    requests: Sequence[T], step: int, min_period: int = 1, size: int = CONFIG.max_sampled_requests
) -> Sequence[T]:
    """Some of a step's requests, in turn. Each look at a request takes some microseconds, and about `size`
    requests of many tell as much as all. Each request is in one of `min_period` steps, or of more."""
    period = max(len(requests) // size, min_period)
    return requests if period == 1 else requests[step % period :: period]


def falling(numbers: Sequence[float]) -> list[float]:
    """The nearest numbers that never rise. Neighbours that rise are replaced by their mean."""
    blocks = list[tuple[float, int]]()  # sums, of so many
    for number in numbers:
        total, count = number, 1
        while blocks and blocks[-1][0] * count < total * blocks[-1][1]:
            before, size = blocks.pop()
            total, count = total + before, count + size
        blocks.append((total, count))
    return [total / count for total, count in blocks for _ in range(count)]
