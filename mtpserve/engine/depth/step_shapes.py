"""What a step computes. Steps of the same shape take the same time.

A step that is launched kernel by kernel has its requests' tokens and drafts, and rows of prompts among them.
Captured steps (runtime/graphs) exist for a few depths. A graph has the rows and passes of its depth, whoever
has fewer drafts. Prompts have passes of their own through the model.

    drafts of three requests, 2 deep   | 2 | 0 | 1 |
    launched                           6 rows, 2 passes
    captured for depths 0, 1 and 3     12 rows, 3 passes
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence as Seq
from dataclasses import dataclass
from functools import cache
from math import log2
from typing import NamedTuple

from mtpserve.core.plan import StepPlan
from mtpserve.core.spec_sizes import SpecSizes
from mtpserve.core.state.request_state import RequestState
from mtpserve.engine.depth.depth_config import CONFIG

TERM_NAMES = (
    "step",
    "first_rows",
    "rows",
    *(f"rows_above_{bend}" for bend in CONFIG.row_bends),
    "passes",
    "passes_x_requests",
)


class StepWork(NamedTuple):
    """What is in a step."""

    requests: int  # that decode
    rows: int  # of the trunk, without those of prompts
    passes: int  # after the trunk's
    sampled: bool = False  # some of the requests are not greedy: drawing costs by rows
    context: int = 0  # tokens before the rows, of all requests


class CellKey(NamedTuple):
    """Steps with the same key share one measurement. Requests and rows are buckets."""

    requests: int
    rows: int
    passes: int
    sampled: bool


@cache
def bucket(number: int) -> int:
    """Small numbers have buckets of their own. Five buckets double a larger number."""
    exact = CONFIG.max_exact_count
    return number if number <= exact else exact + round(5 * log2(number / exact))


def middle(bucket: int) -> int:
    """One of the numbers that share a bucket."""
    exact = CONFIG.max_exact_count
    return bucket if bucket <= exact else round(exact * 2 ** ((bucket - exact) / 5))


def key_of(work: StepWork) -> CellKey:
    return CellKey(bucket(work.requests), bucket(work.rows), work.passes, work.sampled)


def terms_of(work: StepWork) -> list[float]:
    """The numbers of a step that the formula of `StepTimes` weighs, in the order of TERM_NAMES."""
    requests, rows, passes = work[:3]
    convex = (max(rows - bend, 0) for bend in CONFIG.row_bends)
    return [1.0, min(rows, CONFIG.max_exact_count), rows, *convex, passes, passes * requests]


def passes_of(plan: StepPlan) -> int:
    """Passes of the draft model after the trunk's pass. They are 0 where no request needs new drafts."""
    return plan.draft_depth if plan.draft_depth and any(span.drafts_next for span in plan.spans) else 0


def is_sampled(reqs: Iterable[RequestState]) -> bool:
    return any(req.sampling.temperature > 0 for req in reqs)


@dataclass(frozen=True, slots=True)
class StepShapes:
    """`captured`: depths, without 0, in ascending order. Empty: steps are launched."""

    sizes: SpecSizes
    captured: Seq[int] = ()

    def depths(self, max_depth: int) -> Seq[int]:
        """The depths up to `max_depth` whose steps differ in their time."""
        # A tree is grown to its whole depth or not at all: fewer nodes are those with the best scores.
        if self.sizes.trees and max_depth > 0:
            return 0, max_depth
        if self.captured:
            shallower = (depth for depth in self.captured if depth < max_depth)
            return 0, *shallower, *([max_depth] if max_depth else [])
        return range(max_depth + 1)

    def drafts(self, depth: int) -> int:
        """The drafts of one request, at most."""
        return self.sizes.num_proposed if self.sizes.trees and depth else min(depth, self.sizes.num_proposed)

    def drafting(self, work: StepWork, drafts: int, depth: int) -> StepWork:
        """The same requests in a step that verifies `drafts` drafts in all and makes new ones."""
        if not self.captured or not (drafts or depth):
            return work._replace(rows=work.requests + drafts, passes=depth)
        # A tree has more drafts than it is deep.
        graph_depth = next(
            (captured_depth for captured_depth in self.captured if captured_depth >= depth), self.captured[-1]
        )
        return work._replace(rows=work.requests * (1 + self.drafts(graph_depth)), passes=graph_depth)

    def work(self, reqs: Seq[RequestState], drafts: int, depth: int) -> StepWork:
        """The work of a step that verifies `drafts` drafts of these requests."""
        context = sum(len(req.tokens) for req in reqs)
        return self.drafting(StepWork(len(reqs), len(reqs), 0, is_sampled(reqs), context), drafts, depth)

    def plan_work(self, plan: StepPlan, reqs: Seq[RequestState]) -> tuple[StepWork, int]:
        """→ the work of a plan, and its rows of prompts. The last row of a prompt counts as a row that
        decodes, since its request gets drafts."""
        requests = drafts = widest = rows = context = 0
        for span in plan.spans:
            requests, drafts = requests + span.drafts_next, drafts + span.num_draft_tokens
            context, widest = context + span.start * span.drafts_next, max(widest, span.num_draft_tokens)
            rows += span.num_tokens
        depth = plan.draft_depth if requests else 0
        if self.captured:
            depth = max(depth, widest)  # drafts of the step before may be deeper than the new ones
        work = StepWork(requests, requests, 0, is_sampled(reqs), context)
        return self.drafting(work, drafts, depth), rows - requests
