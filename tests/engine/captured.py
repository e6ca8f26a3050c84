"""Simulated time as a GPU takes it, where steps are captured: a graph's rows for each request that decodes. Prompts are computed in the
same pass or, where drafts are trees, in passes of their own."""

from __future__ import annotations

from mtpserve.core.plan import StepPlan
from mtpserve.engine.depth.step_shapes import passes_of
from mtpserve.tools.simulate.simulator import Simulation

CAPTURED = (1, 3)  # runtime/graphs/graphs.DEPTHS


class Captured(Simulation):
    """At most three drafts. `apart`: prompts have passes of their own."""

    apart = False

    def _duration(self, plan: StepPlan) -> tuple[int, float]:
        prompts = [span for span in plan.spans if span.num_tokens > 1]
        decoding = [span for span in plan.spans if span.num_tokens == 1]
        deepest = max([passes_of(plan), *(span.num_draft_tokens for span in decoding)])
        depth = next(depth for depth in (0, *CAPTURED) if depth >= deepest)
        late = sum(span.num_deferred_tokens for span in plan.spans)
        if not self.apart:
            lengths = [1 + depth] * len(decoding) + [span.num_tokens for span in prompts]
            absorbed = [late, sum(lengths) if depth or prompts else 0]
            return self._part([span.start for span in [*decoding, *prompts]], lengths, depth, absorbed)
        taken = [
            self._part([span.start for span in spans], lengths, passes, absorbed)
            for spans, lengths, passes, absorbed in (
                (decoding, [1 + depth] * len(decoding), depth, [late, len(decoding) * (1 + depth) * (depth > 0)]),
                (prompts, [span.num_tokens for span in prompts], passes_of(plan), [sum(span.num_tokens for span in prompts)]),
            )
            if spans
        ]
        return sum(rows for rows, _ in taken), sum(seconds for _, seconds in taken)

    def _part(self, starts: list[int], lengths: list[int], passes: int, absorbed: list[int]) -> tuple[int, float]:
        """Of requests that are computed together."""
        tokens = sum(starts) + sum(lengths)
        pairs = sum(length * start + length * length // 2 for start, length in zip(starts, lengths, strict=True))
        return sum(lengths), self._cost.seconds(sum(lengths), tokens, pairs, passes, [rows for rows in absorbed if rows])


class Apart(Captured):
    apart = True
