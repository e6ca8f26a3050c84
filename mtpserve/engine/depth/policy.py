"""How deep each request drafts next, so that as many tokens as possible are committed in a second.

    what steps cost (engine/depth/step_times) ─┐
                                         ├─→ choose ─→ the step's depth, and how many drafts each request may
                                         have
    what is accepted (engine/depth/survival) ────┘

For each depth the drafts of all requests compete for the step's rows. The likeliest come first, as long as
they give the whole batch more tokens per second:

    tokens / seconds = (requests + Σ chances of the drafts taken) / (seconds of a step with so many rows and
    so many passes,
                                                                     in part beside rows of prompts)

Another depth must have been better for some steps, and a deeper one by a margin. So errors of the expected
times do not make a step slower than a plain one. Changes, which cost something themselves, are few. What is
not drafted is not learned: now and then a step probes another depth (engine/depth/probes). So drafting comes
back when the text changes.

Texts do not depend on any of this. Greedy text never depends on drafts; a sampled text's distribution does
not. A request with a seed gets drafts that are coupled to the target's noise (spec/verify/accept), by which
its text is that of plain decoding.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence as Seq

from mtpserve.core.spec_sizes import SpecSizes
from mtpserve.core.state.request_state import RequestState
from mtpserve.core.stats.engine_stats import DepthState, EngineStats
from mtpserve.core.stats.reports import SpecChange, SpecReport, StepCosts
from mtpserve.engine.depth.depth_config import CONFIG, DepthPolicyConfig
from mtpserve.engine.depth.probes import DepthProbes
from mtpserve.engine.depth.ranking import DepthChoice, DepthModel
from mtpserve.engine.depth.step_shapes import StepShapes
from mtpserve.engine.depth.step_times import StepTimes
from mtpserve.engine.depth.survival import Survival, sample_of
from mtpserve.engine.steps import RequestEvent, ScheduledStep

log = logging.getLogger(__name__)


class DepthPolicy:
    """`max_depth`: no request drafts deeper; it may change at any time. `captured`: see StepShapes. `apart`:
    see StepTimes."""

    def __init__(
        self,
        sizes: SpecSizes,
        max_depth: int,
        captured: Seq[int] = (),
        apart: bool = False,
        config: DepthPolicyConfig = CONFIG,
    ) -> None:
        self.sizes, self.config = sizes, config
        self.configured_depth, self.max_depth, self.adaptive = max_depth, max_depth, True
        self.shapes = StepShapes(sizes, captured)
        survival = Survival(sizes.num_proposed, sizes.trees, config)
        self.model = DepthModel(self.shapes, StepTimes(apart, config), survival, config)
        self.probes = DepthProbes(self.model, config)
        self.choice = DepthChoice(max_depth, [], 1.0, 0.0)  # the last one
        self.num_changes = 0
        self.forced_depth: int | None = None  # while step times are measured at start
        # requests of the last choice, the steps since, and the steps from it to the next one
        self._num_requests, self._age, self._period = -1, 1, 1
        # steps in all, and the last one at which no other depth was better
        self._num_steps, self._settled_step = 0, -config.min_steps_between_changes
        self._passes, self._passes_s = 0, 0.0  # of the last step, and seconds since they have changed
        self._unlearned_s = 0.0  # seconds of steps since one was learned
        self._num_learned = 0  # steps of which acceptance was learned: see sample_of

    @property
    def times(self) -> StepTimes:
        return self.model.times

    @property
    def survival(self) -> Survival:
        return self.model.survival

    @property
    def depth(self) -> int:
        return self.choice.depth

    @property
    def depths(self) -> Seq[int]:
        return self.shapes.depths(self.max_depth)

    # ------------------------------------------------------------------------------------------------- choice

    def choose(self, reqs: Seq[RequestState]) -> int:
        """→ the depth of the next step's drafts. Sets how many drafts each request may have."""
        if self.forced_depth is not None or not self.adaptive:
            for req in reqs:
                req.draft.max_draft_tokens = None
            if self.forced_depth is not None:
                return self.forced_depth
            self.choice = self.choice._replace(depth=self.max_depth)
            return self.depth
        if not reqs:  # the first ones are about to be admitted
            return min(self.depth, self.max_depth)
        self._num_steps += 1
        if (probed_depth := self.probes.next_depth()) is not None:
            return probed_depth
        self._age += 1
        self.probes.steps_to_wait -= 1
        if self._age < self._period:
            if self._num_requests != len(reqs):
                work, kinds = self.shapes.work(reqs, 0, 0), self.model.kinds(reqs)
                self._use(reqs, self.model.best_choice(work, kinds, self.depth))
            return self.depth
        return self._choose_anew(reqs)

    def _choose_anew(self, reqs: Seq[RequestState]) -> int:
        for req in reqs:
            if not req.draft.max_draft_tokens:
                factor = req.draft.acceptance_factor
                req.draft.acceptance_factor = self.survival.factor_without_drafts(factor)
        work, kinds = self.shapes.work(reqs, 0, 0), self.model.kinds(reqs)
        choices = {
            depth: self.model.best_choice(work, kinds, depth)
            for depth in {*self.depths, min(self.depth, self.max_depth)}
        }
        self._use(reqs, self._decide(choices))
        self._age = 0
        usual_s = self.model.chosen_seconds(reqs, self.depth)
        interval_s = self.config.choice_interval_s
        self._period = max(round(interval_s / (usual_s or interval_s)), 1)
        values = {depth: choices[depth].value for depth in self.depths}
        probed_depth = self.probes.begin(reqs, self.choice, values)
        if probed_depth is None:
            return self.depth
        self._age = self._period  # the numbers of drafts are chosen anew after the probe
        return probed_depth

    def _decide(self, choices: Mapping[int, DepthChoice]) -> DepthChoice:
        """→ the choice of the best depth, or of the present one until another was better for long enough."""
        best = max((choices[depth] for depth in self.depths), key=lambda choice: choice.value)
        current = choices[min(self.depth, self.max_depth)]
        if best.value <= current.value * (1 + self.config.min_gain_fraction * (best.depth > self.depth)):
            self._settled_step = self._num_steps
            return current
        better_steps = self._num_steps - self._settled_step
        is_clear = best.value >= self.config.clear_value_ratio * current.value
        if better_steps < self.config.min_steps_between_changes and not is_clear:
            return current
        self.num_changes, self._settled_step = self.num_changes + 1, self._num_steps
        return best

    def _use(self, reqs: Seq[RequestState], choice: DepthChoice) -> None:
        self.choice, self._num_requests = choice, len(reqs)
        for req, max_draft_tokens in zip(reqs, choice.max_draft_tokens, strict=True):
            req.draft.max_draft_tokens = max_draft_tokens

    # ---------------------------------------------------------------------------------------- what is learned

    def stepped(self, step: ScheduledStep, passes: int, seconds: float) -> None:
        """A step took `seconds`. `passes`: as passes_of. The first step of a depth, which catches up on rows
        to draft, is not learned."""
        self.probes.earn(seconds)
        spans = step.plan.spans  # of which those of prompts are the last ones
        self.times.count(self.choice.tokens, bool(spans and spans[-1].num_tokens > 1))
        settled = passes == self._passes and self._passes_s >= self.config.settling_s
        self._passes, self._passes_s = passes, seconds + self._passes_s * (passes == self._passes)
        # The step after the one at which it is due: a slow step is likelier to be the latter, and would be
        # learned too often.
        due, self._unlearned_s = (
            self._unlearned_s >= self.config.learning_interval_s,
            self._unlearned_s + seconds,
        )
        probing = self.probes.remaining_steps > 0
        if settled and not probing and not due and self.forced_depth is None:
            self.times.skip(seconds)
            return
        is_probe = probing and passes == self.probes.depth
        if not settled and not is_probe:
            return
        work, prompts = self.shapes.plan_work(step.plan, step.reqs)
        if not work.requests:
            return
        # what the step took without its rows of prompts
        decode_s = seconds - (self.times.prompts(work, prompts) if prompts else 0.0)
        measurable = self.probes.measurable = decode_s > self.config.min_decode_fraction * seconds
        if is_probe:
            # Prompts that took less than expected have not made the probe cheaper.
            step_s = decode_s if measurable else self.times.seconds(work)
            more = self.times.more_beside_prompts(work) if prompts else 0.0
            self.probes.charge(work, step_s + more, self.depth)
        if not settled:
            return
        self._unlearned_s = 0.0
        is_full_step = self.probes.remaining_steps > 0 and (work.rows > work.requests) == (
            self.probes.depth > 0
        )
        if not prompts or (is_probe and is_full_step and measurable):
            noise = (
                (seconds / decode_s) ** 2 if prompts else 1.0
            )  # what prompts take varies as much as the rest
            self.times.observe(work, decode_s, noise)
            if is_probe and is_full_step:
                self.probes.count_time(1 / noise)
        elif not is_probe:
            self.times.observe_prompts(work, prompts, seconds)

    def learn(self, events: Seq[RequestEvent]) -> None:
        """Learns from what one step yielded. Drafts of probes are always looked at."""
        self._num_learned += 1
        self.probes.begin_verification()
        if not self.probes.expectations:
            share = self.config.learning_interval_s / self.config.choice_interval_s
            min_period = max(int(self._period * share), 1)
            size = self.config.max_sampled_requests
            events = sample_of(events, self._num_learned, min_period, size)
        for req, event in events:
            if event.proposal.tokens:
                self.verified(req, len(event.proposal.tokens), event.proposal.path)
        self.probes.end_verification()

    def verified(self, req: RequestState, drafts: int, path: Seq[int]) -> None:
        """A request's drafts were verified. `path`: the nodes that were accepted, from 1 on."""
        drafts = min(drafts, self.sizes.num_proposed)
        accepted = [node for node in path if node <= drafts]
        self.survival.observe(drafts, accepted)
        factor = req.draft.acceptance_factor
        req.draft.acceptance_factor = self.survival.updated_factor(factor, drafts, len(accepted))
        self.probes.verify(req, len(accepted), self.choice.value)

    def forget(self) -> None:
        """What was accepted is void. What steps take is not."""
        self.model.survival = Survival(self.sizes.num_proposed, self.sizes.trees, self.config)
        self.probes.forget()

    # ------------------------------------------------------------------------------------------- from outside

    def set(self, change: SpecChange) -> None:
        """Changes the policy from the next step on. The depth is at most that of the engine's start."""
        if change.adaptive is not None:
            self.adaptive = change.adaptive
        if change.num_steps is not None:
            assert 0 <= change.num_steps <= self.configured_depth
            self.max_depth = change.num_steps
        if change.reset:
            self.forget()
        self._age, self.probes.remaining_steps = self._period, 0
        self._settled_step = self._num_steps - self.config.min_steps_between_changes
        self.choice = self.choice._replace(depth=min(self.depth, self.max_depth))
        log.info(
            "drafts are %s %d deep%s",
            "at most" if self.adaptive else "always",
            self.max_depth,
            ", and acceptance is measured anew" * change.reset,
        )

    @property
    def state(self) -> DepthState:
        value = self.choice.value if self.adaptive and any(self.times.coefficients) else 0.0
        return DepthState(
            self.adaptive,
            self.max_depth,
            self.depth,
            value or None,
            self.num_changes,
            self.probes.count,
            self.survival.rates,
        )


def report(policy: DepthPolicy | None, configured: int, stats: EngineStats) -> SpecReport:
    """`configured`: the depth that the engine was started with."""
    fixed = None
    if policy is None:
        reason = "--no-speculative-adaptive, or with acceptance thresholds below 1"
        fixed = (
            f"the depth is fixed at {configured}: the engine was started with "
            f"{reason if configured else 'no speculation'}"
        )
    return SpecReport(
        configured,
        fixed,
        None if policy is None else policy.state,
        StepCosts() if policy is None else policy.times.costs(),
        stats.draft_tokens_per_position,
        stats.accepted_tokens_per_position,
        stats.steps_per_depth[: configured + 1],
    )
