"""A device that computes nothing: it answers plans as one would whose text is known, and accepts drafts at
random by a curve's rates.

For simulations of the scheduler and the cache (simulator.py). It sees plans alone, as a runner does, and
answers at once what a device would have written by the time somebody reads it. Trees are accepted like chains
of the same depth.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import TypeVar

from mtpserve.config import SpecConfig
from mtpserve.config.spec import NONE
from mtpserve.core.errors import ConfigError
from mtpserve.core.plan import SpanPlan, SpanResult, StepPlan, StepResult
from mtpserve.core.spec_sizes import SpecSizes
from mtpserve.core.state.request_state import RequestState
from mtpserve.spec.curves import Curve, read_curve
from mtpserve.spec.sizes import spec_sizes

T = TypeVar("T")
CURVE = "glm-5.2-mtp"  # unless the options name one
# that matter here
OPTIONS = ("speculative_algorithm", "speculative_num_steps", "speculative_synthetic_acceptance")
AFTER_THE_END = 0  # the token that follows a text


def passes(spec: SpecConfig) -> int:
    """Returns the passes of a draft model in each step: n-grams need none."""
    return 0 if spec.drafter is None else spec.steps


def named(spec: SpecConfig, has_mtp: bool) -> SpecConfig:
    """Returns `spec` with a drafter: the named one, or MTP if the model has such a layer. Raises ConfigError
    if options need a drafter and there is none."""
    if spec.named:
        return spec
    if not has_mtp and spec.drafter_options:
        raise ConfigError(
            f"--{spec.drafter_options[0].replace('_', '-')} needs something that drafts: "
            f"--speculative-algorithm names it"
        )
    return spec.drafting_with("MTP" if has_mtp else NONE)


def noted(spec: SpecConfig) -> str:
    return f"{'+'.join(spec.parts)} drafts, {spec.steps} deep" if spec.steps else "plain decoding"


class Speaker:
    """One seat: the text that its request is to get, and how far it has got."""

    __slots__ = ("answer", "committed", "num_draft_tokens")

    def __init__(self, answer: Sequence[int], committed: int) -> None:
        self.answer, self.committed, self.num_draft_tokens = answer, committed, 0


class SimulatedDevice:
    """`answers`: the text of each request by its id; the caller adds and removes them. `rates`: of
    acceptance, depth by depth."""

    def __init__(self, sizes: SpecSizes, rates: Sequence[float] = (), seed: int = 0) -> None:
        self.sizes, self.want = sizes, sizes.steps
        self.answers: dict[str, Sequence[int]] = {}
        self.rates, self._random = rates, Random(seed)
        self._seats: dict[int, Speaker] = {}

    @classmethod
    def of(cls, spec: SpecConfig, budget: int, seed: int = 0) -> SimulatedDevice:
        """Raises ConfigError for a curve that cannot be read."""
        curve: Curve = read_curve(spec.speculative_synthetic_acceptance or CURVE)
        return cls(spec_sizes(spec, budget), curve.rates(spec.steps), seed)

    def limited(self, scheduler: Callable[..., T]) -> Callable[..., T]:
        """A scheduler's class, told how many drafts a request may bring to a step, and how many of its rows
        may wait to be absorbed."""
        return partial(
            scheduler, max_drafts=self.sizes.nodes, max_deferred_tokens=self.sizes.max_deferred_tokens
        )

    def prepare(self, req: RequestState, overlap: int) -> None:
        """What the engine tells the scheduler about a request's drafts."""
        req.num_write_ahead = self.sizes.num_write_ahead(plain=True)
        req.num_lookahead_tokens = self.sizes.num_lookahead_tokens(overlap, plain=True)
        req.draft.max_pending_draft_tokens = self.sizes.max_draft_tokens(self.want, plain=True)

    def launch(self, plan: StepPlan) -> StepResult:
        for new_request in plan.new_requests:
            answer = self.answers[new_request.id]
            self._seats[new_request.req_idx] = Speaker(answer, len(new_request.output_ids))
        return StepResult([self._run(span, plan.draft_depth) for span in plan.spans])

    def _run(self, span: SpanPlan, draft_depth: int) -> SpanResult:
        req_idx = self._seats[span.req_idx]
        accepted, tokens, drafts = 0, [], 0
        if span.samples:
            # The plan has a bound where a step is in flight, and no draft beyond the last token that the
            # request may have.
            drafts = min(req_idx.num_draft_tokens, span.num_draft_tokens)
            accepted = self._accepted(drafts)
            end = req_idx.committed + accepted + 1
            tokens = list(req_idx.answer[req_idx.committed : end])
            tokens += [AFTER_THE_END] * (accepted + 1 - len(tokens))
            req_idx.committed = end
        req_idx.num_draft_tokens = (
            self.sizes.max_draft_tokens(draft_depth, True, span.max_draft_tokens) if span.drafts_next else 0
        )
        chain = list(range(drafts))
        return SpanResult(
            tokens,
            accepted,
            req_idx.num_draft_tokens,
            chain,
            chain,
            [0] * drafts,
            list(range(1, accepted + 1)),
        )

    def _accepted(self, drafts: int) -> int:
        for depth, rate in enumerate(self.rates[:drafts]):
            if self._random.random() >= rate:
                return depth
        return min(drafts, len(self.rates))
