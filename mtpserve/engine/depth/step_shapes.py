"""What steps compute, by which those that take as long as each other are known.

Launched kernel by kernel, a step has its requests' tokens and drafts, and rows of prompts among them.
Captured steps (runtime/graphs) are there for a few depths. They have as many rows of each request as their
depth has drafts, and as many passes, whoever has fewer; prompts have passes through the model of their own.

    drafts of three requests, 2 deep   | 2 | 0 | 1 |
    launched                           6 rows, 2 passes
    captured for depths 0, 1 and 3     12 rows, 3 passes
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence as Seq
from dataclasses import dataclass

from mtpserve.core.draft_sizes import DraftSizes
from mtpserve.core.plan import StepPlan
from mtpserve.core.state.request_state import RequestState
from mtpserve.engine.depth.step_times import StepWork


def passes_of(plan: StepPlan) -> int:
    """Of what proposes tokens, after the trunk's pass; those that are wanted."""
    return plan.draft_depth if plan.draft_depth and any(span.drafts_next for span in plan.spans) else 0


def is_sampled(reqs: Iterable[RequestState]) -> bool:
    return any(req.sampling.temperature > 0 for req in reqs)


@dataclass(frozen=True, slots=True)
class StepShapes:
    """`captured`: depths, without 0, in ascending order. Empty: steps are launched."""

    sizes: DraftSizes
    captured: Seq[int] = ()

    def depths(self, deepest: int) -> Seq[int]:
        """Those that differ in what they take."""
        # A tree is grown to its whole depth or not at all: fewer nodes are those with the best scores.
        if self.sizes.trees and deepest > 0:
            return 0, deepest
        if self.captured:
            return 0, *(depth for depth in self.captured if depth < deepest), *([deepest] if deepest else [])
        return range(deepest + 1)

    def drafts(self, depth: int) -> int:
        """Of each request, at most."""
        return self.sizes.num_proposed if self.sizes.trees and depth else min(depth, self.sizes.num_proposed)

    def drafting(self, work: StepWork, drafts: int, depth: int) -> StepWork:
        """The same requests in a step that verifies so many drafts of all of them together, and makes new
        ones."""
        if not self.captured or not (drafts or depth):
            return work._replace(rows=work.requests + drafts, passes=depth)
        # A tree has more drafts than it is deep.
        computed = next(
            (captured_depth for captured_depth in self.captured if captured_depth >= depth), self.captured[-1]
        )
        return work._replace(rows=work.requests * (1 + self.drafts(computed)), passes=computed)

    def work(self, reqs: Seq[RequestState], drafts: int, depth: int) -> StepWork:
        """Of a step that verifies so many of these requests' drafts."""
        context = sum(len(req.tokens) for req in reqs)
        return self.drafting(StepWork(len(reqs), len(reqs), 0, is_sampled(reqs), context), drafts, depth)

    def planned(self, plan: StepPlan, reqs: Seq[RequestState]) -> tuple[StepWork, int]:
        """And rows of prompts; the last one of a prompt counts as one that decodes, since the request is
        drafted for."""
        drafted = drafts = widest = rows = context = 0
        for span in plan.spans:
            drafted, drafts, rows = (
                drafted + span.drafts_next,
                drafts + span.num_draft_tokens,
                rows + span.num_tokens,
            )
            context, widest = context + span.start * span.drafts_next, max(widest, span.num_draft_tokens)
        depth = plan.draft_depth if drafted else 0
        if self.captured:
            depth = max(depth, widest)  # drafts of the step before may be deeper than the new ones
        return self.drafting(
            StepWork(drafted, drafted, 0, is_sampled(reqs), context), drafts, depth
        ), rows - drafted
