"""Probes: steps at another depth, which tell their time and what is accepted there.

What is not drafted is not learned. A share of the time of all steps is saved for probes. Each probe is
charged with what it has lost.

    depth      0 0 0 0 0 0 0 0 3 3 3 3 3 0 0 0 0 0 0 0 3 0 0 0
                               └── long: time ──┘       └ one step: acceptance
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from math import ceil

from mtpserve.core.state.request_state import RequestState
from mtpserve.engine.depth.depth_config import CONFIG, DepthPolicyConfig
from mtpserve.engine.depth.ranking import DepthChoice, DepthModel, num_drafts
from mtpserve.engine.depth.step_shapes import StepWork


class DepthProbes:
    """When another depth is probed, for how long, and what that has cost."""

    def __init__(self, model: DepthModel, config: DepthPolicyConfig = CONFIG) -> None:
        self.model, self.config = model, config
        self.count = 0  # probes since start
        # seconds that may be spent on probes, and the most that may be saved
        self.saved_s, self.max_saved_s = 0.0, config.max_saved_probe_s
        self.steps_to_wait = config.min_steps_between_changes  # before the next probe
        # of the probe that goes on: its depth, its further steps, and the times that it has measured
        self.depth, self.remaining_steps, self._num_times = 0, 0, 0.0
        # of a step in the probe's place: its drafts; and the seconds that more tokens of each step are worth
        self._replaced_drafts, self._gain_s = 0, 0.0
        self._times_first = False  # the next probe is for times
        self.measurable = True  # enough of the last step was not that of prompts
        # by request: how many of the probe's drafts are expected to be accepted
        self.expectations: dict[str, float] = {}
        # of the drafts of the probe's step: how many were expected to be accepted, and were
        self._expected, self._accepted = 0.0, 0

    # ---------------------------------------------------------------------------------------------- its begin

    def begin(self, reqs: Seq[RequestState], choice: DepthChoice, values: Mapping[int, float]) -> int | None:
        """→ the depth of a probe that begins now, or None. Probes for times and for acceptance take turns.
        Where one costs too much, the other may come sooner, or a single step.

        `choice`: what is in use. `values`: tokens per second by depth.
        """
        if self.steps_to_wait > 0:
            return None
        stalest, deeper = self._stalest(reqs, choice, values), self._deeper(reqs, choice, values)
        single = deeper and (deeper[0], 1)
        candidates = [
            candidate
            for candidate in ((stalest, deeper, single) if self._times_first else (deeper, stalest, single))
            if candidate is not None
        ]
        for number, (depth, steps) in enumerate(candidates):
            if self._begin(reqs, choice, depth, steps, values[depth], number == 0):
                self.steps_to_wait = self.config.min_steps_between_changes
                self._times_first ^= number == 0
                return depth
        return None

    def _begin(
        self,
        reqs: Seq[RequestState],
        choice: DepthChoice,
        depth: int,
        steps: int,
        value: float,
        has_turn: bool,
    ) -> bool:
        """→ whether a probe of `steps` steps begins: the saved seconds must pay for it. Out of turn it waits
        until no more can be saved. So enough is left for the probe in turn."""
        if steps > 1 and not self.measurable:
            return False
        drafts = self.model.shapes.drafts(depth)
        # Steps of fewer rows would not tell the time of this depth's usual steps.
        probed_reqs = (
            reqs
            if depth < choice.depth or steps > 1
            else sorted(reqs, key=lambda req: req.draft.last_probe)[: self.config.max_sampled_requests]
        )
        gain = sum(
            self.model.accepted_drafts(req, drafts)
            - self.model.accepted_drafts(req, req.draft.max_draft_tokens or 0)
            for req in probed_reqs
        )
        self._replaced_drafts, self._gain_s = num_drafts(reqs), gain / max(choice.value, 1e-9)
        step_cost_s = self._cost(reqs, choice, depth, probed_reqs, value)
        # A captured step has the rows of drafts that were not made yet, and makes drafts that nobody will
        # verify.
        first_s = step_cost_s + self._gain_s if self.model.shapes.captured and depth > choice.depth else 0.0
        total = steps * step_cost_s + first_s
        if steps == 1:
            self.max_saved_s = max(self.config.max_saved_probe_s, total)
        if self.saved_s < (total if has_turn else max(total, self.max_saved_s)):
            return False
        if steps == 1:
            self.saved_s -= max(step_cost_s + first_s, 0.0)
        self.count += 1
        if depth > choice.depth:
            self.expectations = {req.id: self.model.accepted_drafts(req, drafts) for req in probed_reqs}
        for req in probed_reqs:
            req.draft.max_draft_tokens, req.draft.last_probe = drafts, self.count
        # It ends as soon as its time was measured. More steps than expected may fit into the time to settle,
        # where this depth's time is not known yet.
        self.depth, self._num_times = depth, 0.0
        self.remaining_steps = 0 if steps == 1 else 3 * steps
        return True

    def _stalest(
        self, reqs: Seq[RequestState], choice: DepthChoice, values: Mapping[int, float]
    ) -> tuple[int, int] | None:
        """→ the depth whose time was not measured for longest, and the steps of its probe."""
        candidates = []
        for depth in values:
            age = self.model.times.age(self._full_work(reqs, depth))
            if (
                depth != choice.depth
                and (age is None or age > self.config.max_time_age_steps)
                and (depth == 0 or self._is_near(values[depth], choice))
            ):
                candidates.append((age is None, age or 0, -depth))
        return (depth := -max(candidates)[2], self._num_steps(reqs, depth)) if candidates else None

    def _deeper(
        self, reqs: Seq[RequestState], choice: DepthChoice, values: Mapping[int, float]
    ) -> tuple[int, int] | None:
        """→ the best of the deeper depths, to learn what is accepted, and the steps of its probe."""
        if not (deeper := [depth for depth in values if depth > choice.depth]):
            return None
        best = max(deeper, key=values.__getitem__)
        return best, self._num_steps(reqs, best) if self._is_near(values[best], choice) else 1

    def _is_near(self, value: float, choice: DepthChoice) -> bool:
        """A depth that is clearly worse is worth no long probe."""
        return value * self.config.near_value_ratio > choice.value

    def _full_work(self, reqs: Seq[RequestState], depth: int) -> StepWork:
        return self.model.shapes.work(reqs, len(reqs) * self.model.shapes.drafts(depth), depth)

    def _num_steps(self, reqs: Seq[RequestState], depth: int) -> int:
        """Steps that a probe is expected to take until it has measured this depth's time."""
        seconds = self.model.times.seconds(self._full_work(reqs, depth))
        settling_s = self.config.settling_s
        return self.config.times_per_probe + ceil(settling_s / (seconds or settling_s))

    def _cost(
        self,
        reqs: Seq[RequestState],
        choice: DepthChoice,
        depth: int,
        probed_reqs: Seq[RequestState],
        value: float,
    ) -> float:
        """Seconds that a probe's step is expected to lose against the step in its place. `value`: the depth's
        tokens per second with all requests."""
        shapes, times = self.model.shapes, self.model.times
        usual = times.with_prompts(shapes.work(reqs, self._replaced_drafts, choice.depth), choice.tokens)
        if depth < choice.depth:
            return usual * (1 - value / max(choice.value, 1e-9))
        more_drafts = len(probed_reqs) * shapes.drafts(depth) - num_drafts(probed_reqs)
        tokens = choice.tokens + self._gain_s * choice.value
        work = shapes.work(reqs, self._replaced_drafts + more_drafts, depth)
        return times.with_prompts(work, tokens) - usual - self._gain_s

    # ---------------------------------------------------------------------------------------------- its steps

    def next_depth(self) -> int | None:
        """→ the depth of the next step, if the probe goes on."""
        if self.remaining_steps <= 0:
            return None
        self.remaining_steps -= 1
        return self.depth

    def earn(self, seconds: float) -> None:
        """A step took `seconds`, a share of which is saved."""
        self.saved_s = min(self.saved_s + self.config.probe_budget_fraction * seconds, self.max_saved_s)

    def charge(self, work: StepWork, seconds: float, usual_depth: int) -> None:
        """A step of the probe took `seconds`. The probe ends when no saved seconds are left."""
        usual = self.model.times.seconds(self.model.shapes.drafting(work, self._replaced_drafts, usual_depth))
        self.saved_s = max(self.saved_s - (seconds - usual - self._gain_s), -self.max_saved_s)
        if self.saved_s < 0:
            self.remaining_steps = 0

    def count_time(self, weight: float) -> None:
        """The probe has measured the time of one step, which counts as `weight` steps."""
        self._num_times += weight
        if self._num_times >= self.config.times_per_probe:
            self.remaining_steps = 0

    # -------------------------------------------------------------------------------------- what was accepted

    def begin_verification(self) -> None:
        self._expected, self._accepted = 0.0, 0

    def verify(self, req: RequestState, accepted: int, value: float) -> None:
        """A request's drafts were verified. `value`: tokens per second of the depth in use."""
        expected = self.expectations.pop(req.id, None)
        if expected is None or value <= 0:
            return
        saved = self.saved_s + (accepted - expected) / value
        self._expected, self._accepted = self._expected + expected, self._accepted + accepted
        self.saved_s = min(max(saved, min(self.saved_s, 0.0)), self.max_saved_s)

    def end_verification(self) -> None:
        """The next probe comes at once where far more was accepted than expected."""
        if self._accepted > self.config.surprise_ratio * self._expected:
            self.steps_to_wait = 0

    def forget(self) -> None:
        """What was accepted is void."""
        self.saved_s = 0.0
        self.expectations.clear()
