"""The drafts that the requests of a step may have, those that are likeliest to be accepted first.

A request's second draft comes after its first one, since it is accepted with it alone. Requests that are
alike are one kind: ranking 128 of them takes as long as ranking one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate


class Ranking:
    def __init__(self, kinds: Iterable[tuple[Sequence[float], list[int]]]) -> None:
        """`kinds`: the chances of a request's drafts, which do not rise, and the numbers of the requests that
        have these."""
        self._nodes = sorted(
            (
                (chance, -rank, batch_indices)
                for chances, batch_indices in kinds
                for rank, chance in enumerate(chances)
            ),
            reverse=True,
        )
        self._ends = [0, *accumulate(len(batch_indices) for _, _, batch_indices in self._nodes)]
        self._gains = [
            0.0,
            *accumulate(chance * len(batch_indices) for chance, _, batch_indices in self._nodes),
        ]

    def __len__(self) -> int:
        return self._ends[-1]

    def gained(self, count: int) -> float:
        """Tokens that the first `count` drafts are expected to yield."""
        n = bisect_left(self._ends, count)
        return self._gains[n] - (self._ends[n] - count) * self._nodes[n - 1][0] if n else 0.0

    def least(self, rank: int) -> int:
        """How many drafts come up to the first one with so many before it in its request; all, if there is
        none."""
        return next(
            (
                end + 1
                for end, (_, before, _) in zip(self._ends, self._nodes, strict=False)
                if -before == rank
            ),
            len(self),
        )

    def shared(self, count: int, requests: int) -> list[int]:
        """How many of the first `count` drafts each of the requests has."""
        num_draft_tokens = [0] * requests
        for first, (_, _, batch_indices) in zip(self._ends, self._nodes, strict=False):
            for i in batch_indices[: max(count - first, 0)]:
                num_draft_tokens[i] += 1
        return num_draft_tokens
