"""How deep each request drafts next, so that as many tokens as possible are committed in a second.

    what steps cost (engine/depth/step_times) ─┐
                                         ├─→ choose ─→ the step's depth, and how many drafts each request may
                                         have
    what is accepted (engine/depth/survival) ────┘

For each depth the drafts of all requests compete for the step's rows: the likeliest come first, as long as
the whole batch gets more tokens per second by them,

    tokens / seconds = (requests + Σ chances of the drafts taken) / (seconds of a step with so many rows and
    so many passes,
                                                                     in part beside rows of prompts)

Another depth must have been better for 12 steps, and a deeper one by 2 %, so that errors of the expected
times do not make a step slower than a plain one, and changes, which cost something themselves, are few. What
is not drafted is not learned, so that now and then a step tries another depth, where that is expected to cost
no more than 0.25 % of the time. So drafting comes back when the text changes.

Texts do not depend on any of this: greedy text never depends on drafts, the law of a sampled text does not,
and a request with a seed gets drafts that are coupled to the target's noise (spec/verify/accept), by which
its text is that of plain decoding.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence as Seq
from math import ceil
from typing import NamedTuple

from mtpserve.core.draft_sizes import DraftSizes
from mtpserve.core.state.request_state import RequestState
from mtpserve.core.stats.engine_stats import DepthState, EngineStats
from mtpserve.core.stats.reports import SpecChange, SpecReport, StepCosts
from mtpserve.engine.depth.ranking import Ranking
from mtpserve.engine.depth.step_shapes import StepShapes
from mtpserve.engine.depth.step_times import StepTimes, StepWork
from mtpserve.engine.depth.survival import Survival, part_of
from mtpserve.engine.steps import RequestOutput, ScheduledStep

log = logging.getLogger(__name__)

# value of drafting at all, relative to what is expected of it: prompts take longer with it, and expected
# times err
RISK = 0.99
GAIN = 0.02  # by which a deeper choice must be better; a less deep one needs none
OFTEN, PAUSE = 2, 0.08  # steps, and seconds of steps, between two choices, which take 0.1 to 0.4 ms each
SHORT = 0.004  # seconds of a step, of which a request's drafts are looked at once: that takes 10 µs
EVERY, SELDOM = 8, 64  # steps between two trials, at least, and after one whose turn it was not
AGAIN, FAR = 1, 3  # and after one of which so many times more was accepted than expected
RESERVED = 4  # trials that what is saved must be enough for, where the turn is another one's
# steps for which another depth must have been better: changing has a cost of its own, and times of few steps
# are noise
SURE = 12
CLEAR = 1.25  # how many times as good another depth must be to be taken at once
STEPS = 20  # of a request's factor: requests with nearly the same are one kind
TRIALS = 0.0025  # of the time
FIRST = 0.02  # seconds that the first trials may cost
# seconds of work from which a share is saved for trials, at most, where no single step costs more
SAVED = 40.0
POINTS = 8  # numbers of drafts of the whole batch that are compared for each depth
TRIED = 8  # requests that a trial of a single step drafts for: it is for what is accepted
FRESH, FRESH_S = 200, 1.0  # steps, and seconds of steps, after which a time may be measured again
TIMED = 1 / 3  # of a step's time that is not that of prompts, at least: less of it is not known well enough
# steps of a trial beyond what is expected of it, and times after which it ends: its first step verifies older
# drafts
HELD, SEEN = 8, 3
# Seconds of steps that are not measured after the number of passes has changed. A processor's caches have
# what the other steps needed: on 2 cores of Zen 4 steps of 0.92 ms take 1.13, 1.04, 1.02, 1.00, 0.98, 0.95 …
# ms at first, and trials would consist of such steps.
SETTLING, MOST_SETTLING = 0.01, 40  # and steps of a trial, at most
LEARNED = 0.02  # seconds of steps of which one is learned, where nothing changes: learning takes 12 to 35 µs
CHANGE = 0.001  # seconds that the first steps after a trial's beginning and end take longer
NEAR = 0.9  # a depth that is expected to give this share of the best is tried for as long
# times of depths that are expected to give less than this share of the best are not measured, but for plain
# decoding's
CLOSE = 0.6


Kind = tuple[int, int | None]  # requests with nearly the same factor, rounded, and the same limit


class DepthChoice(NamedTuple):
    depth: int
    most: list[int]  # drafts of each request
    tokens: float  # that a step yields
    value: float  # of them per second


def kinds_of(reqs: Iterable[RequestState]) -> dict[Kind, list[int]]:
    kinds = dict[Kind, list[int]]()
    for i, req in enumerate(reqs):
        kinds.setdefault((round(req.draft.acceptance_factor * STEPS), req.request.max_depth), []).append(i)
    return kinds


class DepthPolicy:
    """`deepest`: no request drafts deeper; it may be changed at any time. `captured`: see StepShapes."""

    def __init__(self, sizes: DraftSizes, deepest: int, captured: Seq[int] = (), apart: bool = False) -> None:
        self.shapes = StepShapes(sizes, captured)
        self.sizes, self.configured, self.deepest, self.adaptive = sizes, deepest, deepest, True
        self.times, self.survival = StepTimes(apart), Survival(sizes.num_proposed, sizes.trees)
        self.depth, self.value, self._tokens = deepest, 0.0, 1.0  # of the last choice
        self.changes = self.trials = 0
        self.forced: int | None = None  # while step times are measured at start
        # seconds that may be spent on trials, and how many may be saved
        self._saved, self._most = 0.0, TRIALS * SAVED
        self._count, self._age = -1, OFTEN  # requests of the last choice, and the steps since
        self._every = OFTEN  # steps from the last choice to the next one
        self._rest = EVERY  # steps without a trial that are left
        self._steps, self._settled = 0, -SURE  # in all, and the last one at which no other depth was better
        # steps for which a trial goes on, its depth, and the times that it has measured
        self._held, self._trial, self._seen = 0, 0, 0.0
        # of a step in its place, and the seconds that what each of its steps yields more are worth
        self._drafts, self._gain = 0, 0.0
        self._passes, self._since = 0, 0.0  # of the last step, and seconds since they have changed
        self._unlearned = 0.0  # seconds of steps since one was learned
        self._timing = False  # the next trial is for what times are
        self._measurable = True  # enough of the last step was not that of prompts
        self._turn = 0  # steps of which was learned: see part_of
        # whose drafts are a trial's, and how many are expected to be accepted
        self._trying: dict[str, float] = {}
        # of the drafts of a trial's step: how many were expected to be accepted, and were
        self._hoped, self._found = 0.0, 0

    # ------------------------------------------------------------------------------------------------- choice

    def choose(self, reqs: Seq[RequestState]) -> int:
        """The depth of the next step's drafts; each request is told how many it may have."""
        if self.forced is not None or not self.adaptive:
            for req in reqs:
                req.draft.max_draft_tokens = None
            if self.forced is not None:
                return self.forced
            self.depth = self.deepest
            return self.depth
        if not reqs:  # the first ones are about to be admitted
            return min(self.depth, self.deepest)
        self._steps += 1
        if self._held > 0:
            self._held -= 1
            return self._trial
        self._age, self._rest = self._age + 1, self._rest - 1
        if self._age < self._every:
            if self._count != len(reqs):
                self._take(reqs, self._best(self.shapes.work(reqs, 0, 0), kinds_of(reqs), self.depth))
            return self.depth
        for req in reqs:
            if not req.draft.max_draft_tokens:
                req.draft.acceptance_factor = self.survival.unseen(req.draft.acceptance_factor)
        work, kinds = self.shapes.work(reqs, 0, 0), kinds_of(reqs)
        choices = {
            depth: self._best(work, kinds, depth) for depth in {*self.depths, min(self.depth, self.deepest)}
        }
        self._decide(reqs, choices)
        tried = self._tried(reqs, {depth: choice.value for depth, choice in choices.items()})
        return self.depth if tried is None else tried

    def _decide(self, reqs: Seq[RequestState], choices: Mapping[int, DepthChoice]) -> None:
        best = max((choices[depth] for depth in self.depths), key=lambda choice: choice.value)
        current = choices[min(self.depth, self.deepest)]
        if best.value <= current.value * (1 + GAIN * (best.depth > self.depth)):
            best, self._settled = current, self._steps
        elif self._steps - self._settled < SURE and best.value < CLEAR * current.value:
            best = current
        else:
            self.changes, self._settled = self.changes + 1, self._steps
        self._age = 0
        self._take(reqs, best)
        self._every = max(OFTEN, round(PAUSE / (self._usual(reqs) or PAUSE)))

    def _take(self, reqs: Seq[RequestState], choice: DepthChoice) -> None:
        self.depth, self.value, self._tokens, self._count = (
            choice.depth,
            choice.value,
            choice.tokens,
            len(reqs),
        )
        for req, max_draft_tokens in zip(reqs, choice.most, strict=True):
            req.draft.max_draft_tokens = max_draft_tokens

    @property
    def depths(self) -> Seq[int]:
        return self.shapes.depths(self.deepest)

    def _best(self, work: StepWork, kinds: Mapping[Kind, list[int]], depth: int) -> DepthChoice:
        """The best numbers of drafts for a step of this depth. `work`: of a step without drafts."""
        ranks = self.shapes.drafts(depth)
        ranking = Ranking(
            (
                self.survival.chances(factor / STEPS, ranks if limit is None else min(ranks, limit)),
                batch_indices,
            )
            for (factor, limit), batch_indices in kinds.items()
        )
        # Passes for drafts that no request has are worth nothing; their steps are hardly ever seen, and
        # expected with large errors.
        least = ranking.least(0 if self.sizes.trees else ranks - 1) if depth else 0
        # In a captured step all have their rows.
        step = len(ranking) or 1 if self.shapes.captured else max(len(ranking) // POINTS, 1)
        none = self.times.seconds(work._replace(passes=depth))
        tried = (*range(step, len(ranking), step), len(ranking)) if depth else (0,)
        counts = {count: ranking.gained(count) for count in tried if count >= least}
        value, count = max(
            (self._value(self.shapes.drafting(work, n, depth), gained, none), n)
            for n, gained in counts.items()
        )
        return DepthChoice(depth, ranking.shared(count, work.requests), work.requests + counts[count], value)

    def _value(self, work: StepWork, gained: float, none: float) -> float:
        """Tokens per second. `none`: seconds of such a step without drafts."""
        tokens = work.requests + gained
        seconds = self.times.with_prompts(work, tokens, none)
        # Before anything was measured all depths cost the same.
        return tokens / (seconds or 1.0) * (RISK if work.passes else 1.0)

    # ------------------------------------------------------------------------------------------------- trials

    def _tried(self, reqs: Seq[RequestState], values: Mapping[int, float]) -> int | None:
        """The depth of a trial, where one is due: for what steps take and for what is accepted, in turn.
        Where one costs too much, the other may come sooner, or a single step. `values`: tokens per second by
        depth."""
        if self._rest > 0:
            return None
        oldest, deeper = self._oldest(reqs, values), self._deeper(reqs, values)
        single = deeper and (deeper[0], 1)
        candidates = [
            candidate
            for candidate in ((oldest, deeper, single) if self._timing else (deeper, oldest, single))
            if candidate is not None
        ]
        for number, (depth, steps) in enumerate(candidates):
            if self._tries(reqs, depth, steps, values[depth], RESERVED if number else 1):
                self._rest = SELDOM if number else EVERY
                self._timing ^= number == 0
                return depth
        return None

    def _tries(self, reqs: Seq[RequestState], depth: int, steps: int, value: float, reserve: int) -> bool:
        """A trial begins, if `reserve` such trials can be afforded, or if one can and no more is saved."""
        if steps > 1 and not self._measurable:
            return False
        # Steps of fewer rows would not tell what this depth's own ones take.
        tried = (
            reqs
            if depth < self.depth or steps > 1
            else sorted(reqs, key=lambda req: req.draft.last_probe)[:TRIED]
        )
        gained = sum(
            self._expected(req, self.shapes.drafts(depth))
            - self._expected(req, req.draft.max_draft_tokens or 0)
            for req in tried
        )
        self._drafts, self._gain = (
            sum(req.draft.max_draft_tokens or 0 for req in reqs),
            gained / max(self.value, 1e-9),
        )
        cost = self._cost(reqs, depth, tried, value)
        # A captured step has the rows of drafts that were not made yet, and makes drafts that nobody will
        # verify.
        first = cost + self._gain if self.shapes.captured and depth > self.depth else 0.0
        whole = steps * cost + first + CHANGE
        if steps == 1:
            self._most = max(TRIALS * SAVED, whole)
        if max(whole, min(reserve * whole, self._most)) > self._saved:
            return False
        self._saved -= CHANGE + (max(cost + first, 0.0) if steps == 1 else 0.0)
        self.trials += 1
        if depth > self.depth:
            self._trying = {req.id: self._expected(req, self.shapes.drafts(depth)) for req in tried}
        for req in tried:
            req.draft.max_draft_tokens, req.draft.last_probe = self.shapes.drafts(depth), self.trials
        self._age = self._every  # the numbers of drafts are chosen anew
        # It ends as soon as its time was measured. Where that is not known yet, more steps than expected fit
        # into the time to settle.
        self._held, self._trial, self._seen = 0 if steps == 1 else HELD + 3 * steps // 2, depth, 0.0
        return True

    def _oldest(self, reqs: Seq[RequestState], values: Mapping[int, float]) -> tuple[int, int] | None:
        """The depth whose time was not measured for longest, and steps until it was."""
        count, old, fresh = len(reqs), [], max(FRESH, FRESH_S / (self._usual(reqs) or FRESH_S))
        for depth in self.depths:
            age = self.times.age(self.shapes.work(reqs, count * self.shapes.drafts(depth), depth))
            if (
                depth != self.depth
                and (age is None or age > fresh)
                and values[depth] > CLOSE * self.value * (depth > 0)
            ):
                old.append((age is None, age or 0, -depth))
        return (depth := -max(old)[2], self._long(reqs, depth)) if old else None

    def _deeper(self, reqs: Seq[RequestState], values: Mapping[int, float]) -> tuple[int, int] | None:
        """The best of the deeper ones, to learn what is accepted, and for how many steps."""
        if not (deeper := [depth for depth in self.depths if depth > self.depth]):
            return None
        best = max(deeper, key=values.__getitem__)
        return best, self._long(reqs, best) if values[best] > NEAR * self.value else 1

    def _long(self, reqs: Seq[RequestState], depth: int) -> int:
        """Steps that a trial is expected to take until it has measured this depth's time."""
        count = len(reqs)
        seconds = self.times.seconds(self.shapes.work(reqs, count * self.shapes.drafts(depth), depth))
        return SEEN + min(ceil(SETTLING / (seconds or SETTLING)), MOST_SETTLING)

    def _cost(self, reqs: Seq[RequestState], depth: int, tried: Seq[RequestState], expected: float) -> float:
        """Seconds that a trial is expected to lose against the step in its place. `expected`: its tokens per
        second with all requests."""
        usual = self.times.with_prompts(self.shapes.work(reqs, self._drafts, self.depth), self._tokens)
        if depth < self.depth:
            return usual * (1 - expected / max(self.value, 1e-9))
        drafts = self._drafts + sum(
            self.shapes.drafts(depth) - (req.draft.max_draft_tokens or 0) for req in tried
        )
        tokens = self._tokens + self._gain * self.value
        return self.times.with_prompts(self.shapes.work(reqs, drafts, depth), tokens) - usual - self._gain

    def _expected(self, req: RequestState, drafts: int) -> float:
        """How many of a request's drafts are accepted."""
        return sum(self.survival.chances(req.draft.acceptance_factor, drafts))

    def _usual(self, reqs: Seq[RequestState]) -> float:
        """Seconds of a step as it was chosen."""
        return self.times.seconds(
            self.shapes.work(reqs, sum(req.draft.max_draft_tokens or 0 for req in reqs), self.depth)
        )

    # ---------------------------------------------------------------------------------------- what is learned

    def stepped(self, planned: ScheduledStep, passes: int, seconds: float) -> None:
        """A step took so long. `passes`: as passes_of. The first step of a depth, which catches up on rows to
        draft, is not learned."""
        self._saved = min(self._saved + TRIALS * seconds, self._most)
        spans = planned.plan.spans  # of which those of prompts are the last ones
        self.times.count(self._tokens, bool(spans and spans[-1].num_tokens > 1))
        settled = passes == self._passes and self._since >= SETTLING
        self._passes, self._since = passes, seconds + (self._since if passes == self._passes else 0.0)
        # The step after the one at which it is due: a slow step is likelier to be the latter, and would be
        # learned too often.
        due, self._unlearned = self._unlearned >= LEARNED, self._unlearned + seconds
        if settled and self._held == 0 and not due and self.forced is None:
            self.times.observed += 1
            return
        trial = self._held > 0 and passes == self._trial
        if not settled and not trial:
            return
        work, prompts = self.shapes.planned(planned.plan, planned.reqs)
        if not work.requests:
            return
        # what the step took without them
        alone = seconds - (self.times.prompts(work, prompts) if prompts else 0.0)
        self._measurable = alone > TIMED * seconds
        if trial:
            # Prompts that took less than expected have not made the trial cheaper.
            step_seconds = alone if self._measurable else self.times.seconds(work)
            self._charge(work, step_seconds + (self.times.more_beside_prompts(work) if prompts else 0.0))
        if not settled:
            return
        self._unlearned = 0.0
        tried = trial and self._held > 0 and (work.rows > work.requests) == (self._trial > 0)
        if not prompts or (tried and self._measurable):
            noise = (seconds / alone) ** 2 if prompts else 1.0  # what prompts take varies as much as the rest
            self.times.observe(work, alone, noise)
            if tried:
                self._seen += 1 / noise
                self._held *= self._seen < SEEN
        elif not trial:
            self.times.observe_prompts(work, prompts, seconds)

    def _charge(self, work: StepWork, seconds: float) -> None:
        """What a step of a trial has lost, which ends when nothing is left for it."""
        usual = self.times.seconds(self.shapes.drafting(work, self._drafts, self.depth))
        self._saved = max(self._saved - (seconds - usual - self._gain), -self._most)
        if self._saved < 0:
            self._held = 0

    def learn(self, outcomes: Seq[RequestOutput]) -> None:
        """What one step yielded. Drafts of trials are always looked at."""
        self._turn, self._hoped, self._found = self._turn + 1, 0.0, 0
        least = max(int(self._every * SHORT / PAUSE), 1)
        for outcome in part_of(outcomes, self._turn, least) if not self._trying else outcomes:
            if outcome.proposal.tokens:
                self.verified(outcome.req, len(outcome.proposal.tokens), outcome.proposal.path)
        if self._found > FAR * self._hoped:
            self._rest = min(self._rest, AGAIN)

    def verified(self, req: RequestState, drafts: int, path: Seq[int]) -> None:
        """What came of a request's drafts: the nodes that were accepted, from 1 on."""
        drafts = min(drafts, self.sizes.num_proposed)
        accepted = [node for node in path if node <= drafts]
        self.survival.observe(drafts, accepted)
        req.draft.acceptance_factor = self.survival.follow(req.draft.acceptance_factor, drafts, len(accepted))
        expected = self._trying.pop(req.id, None)
        if expected is not None and self.value > 0:
            saved = self._saved + (len(accepted) - expected) / self.value
            self._hoped, self._found = self._hoped + expected, self._found + len(accepted)
            self._saved = min(max(saved, min(self._saved, 0.0)), self._most)

    def forget(self) -> None:
        """What was accepted is void; what steps take is not."""
        self.survival, self._saved = Survival(self.sizes.num_proposed, self.sizes.trees), FIRST
        self._trying.clear()

    # ------------------------------------------------------------------------------------------- from outside

    def set(self, change: SpecChange) -> None:
        """From the next step on. The depth is one that the engine was started with, or less."""
        if change.adaptive is not None:
            self.adaptive = change.adaptive
        if change.num_steps is not None:
            assert 0 <= change.num_steps <= self.configured
            self.deepest = change.num_steps
        if change.reset:
            self.forget()
        self._age, self._held = self._every, 0
        self._settled, self.depth = self._steps - SURE, min(self.depth, self.deepest)
        log.info(
            "drafts are %s %d deep%s",
            "at most" if self.adaptive else "always",
            self.deepest,
            ", and are learned anew" * change.reset,
        )

    @property
    def state(self) -> DepthState:
        value = self.value if self.adaptive and any(self.times.coefficients) else 0.0
        return DepthState(
            self.adaptive,
            self.deepest,
            self.depth,
            value or None,
            self.changes,
            self.trials,
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
