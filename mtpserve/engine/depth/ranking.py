"""The drafts of a step in the order of their chances, and what a step of each depth is worth.

A request's second draft comes after its first one, since it is accepted with it alone. Requests that are
alike are one kind: ranking 128 of them takes as long as ranking one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence as Seq
from itertools import accumulate
from typing import NamedTuple

from mtpserve.core.state.request_state import RequestState
from mtpserve.engine.depth.depth_config import CONFIG, DepthPolicyConfig
from mtpserve.engine.depth.step_shapes import StepShapes, StepWork
from mtpserve.engine.depth.step_times import StepTimes
from mtpserve.engine.depth.survival import Survival

RequestKind = tuple[int, int | None]  # the bucket of a request's acceptance factor, and its limit of depth


class DepthChoice(NamedTuple):
    depth: int
    max_draft_tokens: list[int]  # of each request
    tokens: float  # that a step yields
    value: float  # tokens per second


class Ranking:
    def __init__(self, kinds: Iterable[tuple[Seq[float], list[int]]]) -> None:
        """`kinds`: the chances of a request's drafts, which do not rise, and the batch indices of the
        requests that have these chances."""
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

    def expected_tokens(self, count: int) -> float:
        """Tokens that the first `count` drafts are expected to yield."""
        n = bisect_left(self._ends, count)
        return self._gains[n] - (self._ends[n] - count) * self._nodes[n - 1][0] if n else 0.0

    def min_count(self, rank: int) -> int:
        """The number of drafts up to the first one of this rank, from 0 on. Without such a draft: all."""
        return next(
            (
                end + 1
                for end, (_, before, _) in zip(self._ends, self._nodes, strict=False)
                if -before == rank
            ),
            len(self),
        )

    def drafts_per_request(self, count: int, requests: int) -> list[int]:
        """How many of the first `count` drafts each of the requests has."""
        num_draft_tokens = [0] * requests
        for first, (_, _, batch_indices) in zip(self._ends, self._nodes, strict=False):
            for i in batch_indices[: max(count - first, 0)]:
                num_draft_tokens[i] += 1
        return num_draft_tokens


class DepthModel:
    """What a step of each depth is expected to take and to yield."""

    def __init__(
        self, shapes: StepShapes, times: StepTimes, survival: Survival, config: DepthPolicyConfig = CONFIG
    ) -> None:
        self.shapes, self.times, self.survival, self.config = shapes, times, survival, config

    def kinds(self, reqs: Iterable[RequestState]) -> dict[RequestKind, list[int]]:
        """→ the batch indices of the requests of each kind."""
        kinds = dict[RequestKind, list[int]]()
        for i, req in enumerate(reqs):
            bucket = round(req.draft.acceptance_factor / self.config.factor_step)
            kinds.setdefault((bucket, req.request.max_depth), []).append(i)
        return kinds

    def best_choice(self, work: StepWork, kinds: Mapping[RequestKind, list[int]], depth: int) -> DepthChoice:
        """The best numbers of drafts for a step of this depth. `work`: of a step without drafts."""
        ranks, trees = self.shapes.drafts(depth), self.shapes.sizes.trees
        ranking = Ranking(
            (
                self.survival.chances(
                    bucket * self.config.factor_step,
                    ranks if limit is None else min(ranks, limit),
                ),
                batch_indices,
            )
            for (bucket, limit), batch_indices in kinds.items()
        )
        # Passes for drafts that no request has are worth nothing. Their steps are rarely measured, and their
        # expected times have large errors.
        min_count = ranking.min_count(0 if trees else ranks - 1) if depth else 0
        # In a captured step all have their rows.
        stride = max(len(ranking) // self.config.max_draft_counts, 1)
        if self.shapes.captured:
            stride = len(ranking) or 1
        plain = self.times.seconds(work._replace(passes=depth))
        counts = (*range(stride, len(ranking), stride), len(ranking)) if depth else (0,)
        tokens = {count: ranking.expected_tokens(count) for count in counts if count >= min_count}
        value, count = max(
            (self._value(self.shapes.drafting(work, count, depth), expected, plain), count)
            for count, expected in tokens.items()
        )
        drafts = ranking.drafts_per_request(count, work.requests)
        return DepthChoice(depth, drafts, work.requests + tokens[count], value)

    def _value(self, work: StepWork, accepted: float, plain: float) -> float:
        """Tokens per second. `accepted`: expected drafts. `plain`: seconds of such a step without drafts."""
        tokens = work.requests + accepted
        seconds = self.times.with_prompts(work, tokens, plain)
        # Before anything was measured all depths cost the same.
        return tokens / (seconds or 1.0)

    def accepted_drafts(self, req: RequestState, drafts: int) -> float:
        """The expected number of a request's drafts that are accepted."""
        return sum(self.survival.chances(req.draft.acceptance_factor, drafts))

    def chosen_seconds(self, reqs: Seq[RequestState], depth: int) -> float:
        """Seconds of a step of this depth with the drafts that the requests are limited to."""
        return self.times.seconds(self.shapes.work(reqs, num_drafts(reqs), depth))


def num_drafts(reqs: Iterable[RequestState]) -> int:
    """The drafts that these requests may have in one step."""
    return sum(req.draft.max_draft_tokens or 0 for req in reqs)
