"""The drafts that the requests of a step may have, those that are likeliest to be accepted first.

A request's second draft comes after its first one, since it is accepted with it alone. Requests that are alike are one kind: what is
computed here takes as long for 128 of them as for one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate


class Ranking:
    def __init__(self, kinds: Iterable[tuple[Sequence[float], list[int]]]) -> None:
        """`kinds`: the chances of a request's drafts, which do not rise, and the numbers of the requests that have these."""
        nodes = [(chance, -rank, own) for chances, own in kinds for rank, chance in enumerate(chances)]
        nodes.sort(reverse=True)
        self.chances, self.ranks, self.owners = [node[0] for node in nodes], [-node[1] for node in nodes], [node[2] for node in nodes]
        self._ends = [0, *accumulate(map(len, self.owners))]
        self._gains = [0.0, *accumulate(chance * len(own) for chance, _, own in nodes)]

    def __len__(self) -> int:
        return self._ends[-1]

    def gained(self, count: int) -> float:
        """Tokens that the first `count` drafts are expected to yield."""
        n = bisect_left(self._ends, count)
        return self._gains[n] - (self._ends[n] - count) * self.chances[n - 1] if n else 0.0

    def least(self, rank: int) -> int:
        """How many drafts come up to the first one with so many before it in its request; all, if there is none."""
        return self._ends[self.ranks.index(rank)] + 1 if rank in self.ranks else len(self)

    def shared(self, count: int, requests: int) -> list[int]:
        """How many of the first `count` drafts each of the requests has."""
        most = [0] * requests
        for first, own in zip(self._ends, self.owners, strict=False):
            for i in own[: max(count - first, 0)]:
                most[i] += 1
        return most
