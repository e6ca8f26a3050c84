"""The depths that the policy chooses: on simulated devices, where what steps cost and what is accepted are known."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from itertools import pairwise, product
from math import exp, sin
from random import Random
from typing import NamedTuple

import pytest

from mtpserve.cache.groups import PageGroups
from mtpserve.config import SpecConfig
from mtpserve.core.plan import SpanPlan, StepPlan
from mtpserve.core.request import Proposal, Request
from mtpserve.core.sampling import SamplingParams, Speculation
from mtpserve.core.spec_sizes import SpecSizes
from mtpserve.core.state.request_state import RequestState
from mtpserve.core.stats.reports import SpecChange
from mtpserve.engine.depth.depth_config import CONFIG
from mtpserve.engine.depth.policy import DepthPolicy
from mtpserve.engine.depth.step_shapes import StepWork
from mtpserve.engine.scheduler import Scheduler
from mtpserve.engine.steps import ScheduledStep, event_of
from mtpserve.spec.sizes import spec_sizes
from mtpserve.tools.simulate.costs import PROFILES, ModelShape, StepCost
from mtpserve.tools.simulate.simulated import SimulatedDevice
from mtpserve.tools.simulate.simulator import Simulation
from mtpserve.tools.simulate.traces import TraceConversation, TraceTurn
from tests import selection

DEEP, BUDGET, PROMPT = 3, 2048, 8
# Of a model that has 60 layers, as those have that come with a layer for drafting.
SHAPE = ModelShape(layers=60, weight_bytes=30_000_000_000, parameters=15_000_000_000)
NEVER, UNTRAINED, FAIR, DEMO = (0.01, 0.01, 0.01), (0.05, 0.05, 0.05), (0.4, 0.4, 0.4), (0.8, 0.75, 0.7)


class Ran(NamedTuple):
    speed: float  # tokens per second
    policy: DepthPolicy | None
    depths: list[int]  # of all steps


def run(
    conversations: Seq[TraceConversation], batch: int, cost: StepCost, depth: int, rates: Seq[float] = (), adaptive: bool = False,
    change: Callable[[float], Seq[float]] | None = None, see: Callable[[Simulation, ScheduledStep], None] | None = None,
    kind: type[Simulation] = Simulation, captured: Seq[int] = (), apart: bool = False,
) -> Ran:  # fmt: skip
    """`change`: rates of acceptance by the time. `see`: is called with each step that is planned. `captured`, `apart`: the policy's."""
    spec = SpecConfig(speculative_algorithm="MTP", speculative_num_steps=depth) if depth else SpecConfig(speculative_algorithm="none")
    device = SimulatedDevice(spec_sizes(spec, BUDGET), rates, seed=1)
    policy = measured(device.sizes, batch, cost, captured, apart) if adaptive else None
    pages, depths = PageGroups([None], [20_000], 16, BUDGET), list[int]()
    scheduler = device.limited(Scheduler)(pages, max_running=batch, token_budget=BUDGET, eos_ids=(), apart=apart)

    def watch(planned: ScheduledStep) -> None:
        depths.append(planned.plan.draft_depth)
        if change is not None:
            device.rates = change(simulation.now)
        if see is not None:
            see(simulation, planned)

    simulation = kind(scheduler, pages, device, cost, cached=False, policy=policy, watch=watch)
    result = simulation.run(conversations)
    return Ran(result.output_tokens / result.seconds, policy, depths)


def measured(sizes: SpecSizes, batch: int, cost: StepCost, captured: Seq[int] = (), apart: bool = False) -> DepthPolicy:
    """As the engine does at start."""
    policy = DepthPolicy(sizes, sizes.steps, captured, apart)
    for requests in [*(1 << i for i in range((batch - 1).bit_length())), batch]:
        for depth in reversed(policy.depths):
            rows, context = requests * (1 + depth), requests * 10
            for _ in range(5):
                seconds = cost.seconds(rows, context, rows * 10, depth, [rows] if depth else [])
                policy.times.observe(StepWork(requests, rows, depth, False, context), seconds)
    policy.times.serve()
    policy.forget()
    return policy


def texts(count: int, tokens: int = 300, at: float = 0.0) -> list[TraceConversation]:
    return [TraceConversation(at, [TraceTurn(list(range(PROMPT)), [1] * tokens)]) for _ in range(count)]


def costs(device: str) -> tuple[StepCost, StepCost]:
    """Without and with a layer for drafting."""
    return StepCost.of(SHAPE, PROFILES[device]), StepCost.of(SHAPE, PROFILES[device], drafts=True)


# Many requests take seconds: of those --all has each combination, and more tokens.
QUICK = {("h100", 16, UNTRAINED), ("cpu", 16, FAIR), ("cpu", 16, DEMO), ("cpu", 128, UNTRAINED), ("h100", 128, FAIR)}
CELLS = [
    pytest.param(*cell, marks=() if cell[1] == 1 or cell in QUICK else pytest.mark.thorough)
    for cell in product(("h100", "cpu"), (1, 16, 128), (UNTRAINED, FAIR, DEMO))
]


@pytest.mark.parametrize(("device", "batch", "rates"), CELLS)
def test_it_is_never_slower_than_plain_and_nearly_as_fast_as_the_best_depth(device: str, batch: int, rates: Seq[float]) -> None:
    """Where nothing is worth drafting, what is lost is the layer's pass over the rows of many steps, by which drafting can come back."""
    plain_cost, cost = costs(device)
    load = texts(batch * 4) if batch < 128 else texts(batch * 3) if selection.ALL else texts(batch * 2, 150)
    plain = run(load, batch, plain_cost, 0).speed
    fixed = [run(load, batch, cost, depth, rates).speed for depth in range(1, DEEP + 1)]
    chosen = run(load, batch, cost, DEEP, rates, adaptive=True)
    assert chosen.speed / plain >= 0.98
    assert chosen.speed / max(fixed) >= 0.95


@pytest.mark.parametrize(
    ("prompt", "rate"),
    [
        (256, 0.15),
        (512, 0.35),
        pytest.param(512, 0.15, marks=pytest.mark.thorough),
        pytest.param(256, 0.25, marks=pytest.mark.thorough),
    ],
)
def test_rows_of_drafts_are_not_free_beside_those_of_prompts(prompt: int, rate: float) -> None:
    """On a GPU three drafts of each of 64 requests cost next to nothing in steps without prompts here, and most steps have some."""
    plain_cost, cost = costs("h100")
    load = [TraceConversation(0.0, [TraceTurn([1] * prompt, [1] * (32 + 37 * i % 64))]) for i in range(1536 if selection.ALL else 512)]
    fixed = [run(load, 64, cost, depth, [rate] * 3).speed for depth in range(1, DEEP + 1)]
    chosen = run(load, 64, cost, DEEP, [rate] * 3, adaptive=True).speed
    assert chosen / run(load, 64, plain_cost, 0).speed >= 0.98
    assert chosen / max(fixed) >= 0.98


class LaunchedPrompts(StepCost):
    """An H200 with 475 million parameters in 36 layers. Decoding is captured; steps with prompts are launched kernel by kernel, which takes
    18 ms whatever their rows. Steps vary by 6 %."""

    __slots__ = ("random",)
    random: Random

    def __init__(self, drafts: bool = True) -> None:
        super().__init__(overhead=0.0032, row=25e-6, draft_pass=0.00035, extend=drafts * 0.0003, absorbed_row=drafts * 1e-6)
        object.__setattr__(self, "random", Random(1))

    def seconds(self, rows: int, tokens: int, pairs: int, passes: int = 0, absorbed: Seq[int] = ()) -> float:
        launched = 0.018 * (rows > 32 * (1 + DEEP))  # of 32 requests
        return (super().seconds(rows, tokens, pairs, passes, absorbed) + launched) * (1 + 0.06 * self.random.gauss(0, 1))


def test_what_a_step_with_prompts_takes_in_any_case_is_not_what_rows_take() -> None:
    """As measured on an H200, where one draft was chosen and three gave 1.16 times as many tokens per second."""
    load = [TraceConversation(0.0, [TraceTurn([1] * 300, [1] * (64 + 37 * i % 128))]) for i in range(32 * 12)]
    fixed = [run(load, 32, LaunchedPrompts(), depth, DEMO).speed for depth in range(1, DEEP + 1)]
    chosen = run(load, 32, LaunchedPrompts(), DEEP, DEMO, adaptive=True)
    assert chosen.speed >= 0.97 * max(fixed)


class SharedMachine(StepCost):
    """Two cores on which other programs run, with 475 million parameters in 36 layers: steps vary by 12 %, one of twenty takes 1.6 times as
    long, and all get slower and faster by some ten percent for seconds."""

    __slots__ = ("clock", "random")
    random: Random
    clock: list[float]

    def __init__(self, seed: int, drafts: bool = True) -> None:
        super().__init__(overhead=0.0145, row=0.0029, draft_pass=0.0014, extend=drafts * 0.0007, absorbed_row=drafts * 13e-6)
        object.__setattr__(self, "random", Random(seed))
        object.__setattr__(self, "clock", [7.0 * seed])

    def seconds(self, rows: int, tokens: int, pairs: int, passes: int = 0, absorbed: Seq[int] = ()) -> float:
        (now,) = self.clock
        computed = self.overhead + self.row * min(rows, 8) + 0.0013 * max(rows - 8, 0)
        own = passes * self.draft_pass + sum(self.extend + self.absorbed_row * number for number in absorbed)
        pace = 0.2 * (sin(now / 1.3) + sin(now / 4.1))
        took = (computed + own) * exp(pace + self.random.gauss(0, 0.12)) * (1.6 if self.random.random() < 0.05 else 1)
        self.clock[0] = now + took
        return took


@pytest.mark.parametrize(("batch", "requests", "rates"), [(1, 20, FAIR), (1, 6, DEMO), (4, 24, UNTRAINED), (16, 80, DEMO)])
def test_noise_of_a_shared_machine_changes_little(batch: int, requests: int, rates: Seq[float]) -> None:
    """Of the sum of some runs, since single ones vary themselves by some percent."""
    load, seeds = texts(requests, 200 if selection.ALL else 100), range(5 if selection.ALL else 2)

    def speed(depth: int, adaptive: bool = False) -> float:
        return sum(run(load, batch, SharedMachine(seed, depth > 0), depth, rates, adaptive).speed for seed in seeds)

    plain, fixed, chosen = speed(0), [speed(depth) for depth in range(1, DEEP + 1)], speed(DEEP, adaptive=True)
    assert chosen / plain >= 0.97
    assert chosen / max(fixed) >= 0.95


def test_it_beats_every_depth_where_load_and_text_change() -> None:
    """Few requests with text that is easy to guess, then many, then text that is not."""
    _, cost = costs("h100")
    load = [*texts(2, 1500), *texts(512, 200, at=3.0)]

    def change(now: float) -> Seq[float]:
        return DEMO if now < 6 else NEVER if now < 11 else FAIR

    fixed = [run(load, 128, cost, depth, DEMO, change=change).speed for depth in range(1, DEEP + 1)]
    chosen = run(load, 128, cost, DEEP, DEMO, adaptive=True, change=change)
    assert chosen.speed > max(fixed)
    assert set(chosen.depths) >= {0, DEEP}


@pytest.mark.parametrize(("before", "after"), [(NEVER, DEMO), (DEMO, NEVER)])
def test_it_follows_the_text_by_itself(before: Seq[float], after: Seq[float]) -> None:
    _, cost = costs("h100")
    ran = run(texts(4, 3000), 4, cost, DEEP, before, adaptive=True, change=lambda now: before if now < 8 else after)
    usual = [max(set(part), key=part.count) for part in (ran.depths[200:500], ran.depths[-300:])]
    assert usual == ([0, DEEP] if after is DEMO else [DEEP, 0])


@pytest.mark.parametrize("slower", [1, 10])
def test_many_requests_are_probed_though_times_are_not(slower: int) -> None:
    """To time drafts of 128 requests would cost more than probes may. A few requests are drafted for, so that drafting comes back."""
    cost = StepCost(overhead=0.3 * slower, row=0.0003 * slower, draft_pass=0.002 * slower)
    ran = run(texts(128, 1000), 128, cost, DEEP, NEVER, adaptive=True, change=lambda now: NEVER if now < 60 * slower else DEMO)
    assert ran.depths[100:150].count(0) > 45 and ran.depths[-50:].count(0) == 0


def test_it_does_not_oscillate() -> None:
    """Rates at which two depths are as good as each other."""
    _, cost = costs("h100")
    ran = run(texts(8, 2000), 8, cost, DEEP, (0.5, 0.42, 0.4), adaptive=True)
    assert ran.policy is not None and ran.policy.num_changes <= 12 and len(ran.depths) > 800
    assert ran.policy.probes.count <= len(ran.depths) / CONFIG.min_steps_between_changes


def test_probes_cost_little() -> None:
    _, cost = costs("h100")
    never = run(texts(1, 3000), 1, cost, DEEP, NEVER, adaptive=True)
    plain = run(texts(1, 3000), 1, cost, 0)
    assert never.policy is not None and never.policy.probes.count > 5
    assert never.speed >= 0.985 * plain.speed


def depths_beside_prompts(cost: StepCost, rate: float, seconds: float, more: float) -> tuple[DepthPolicy, list[int]]:
    """Of 1000 steps of so many `seconds`, with four requests and 400 rows of a prompt. `more`: of a step with drafts."""
    reqs, random, depths = [sequence(i) for i in range(4)], Random(0), list[int]()
    policy = measured(SpecSizes(steps=3, num_proposed=3, written=3), 4, cost)
    for req in reqs * 60:
        policy.verified(req, 3, [1] if random.random() < rate else [])
    for _ in range(1000):
        depths.append(policy.choose(reqs))
        spans = [SpanPlan(i, 10, 1, depths[-1], True, True, req.draft.max_draft_tokens) for i, req in enumerate(reqs)]
        planned = ScheduledStep(StepPlan([*spans, SpanPlan(4, 10, 400, 0, False, False)], depths[-1]), reqs)
        policy.stepped(planned, depths[-1], seconds + more * (depths[-1] > 0))
    return policy, depths


def test_a_probe_that_goes_on_costs_what_it_costs() -> None:
    """Steps with drafts take longer than expected: a probe ends early, and the next one waits until as much was saved again."""
    policy, depths = depths_beside_prompts(StepCost(overhead=0.1, row=0.0001, draft_pass=0.004), 0.0, 0.3, 0.06)
    lost = 0.06 * sum(depth > 0 for depth in depths)
    assert policy.probes.count > 3 and lost < 0.01 * (1000 * 0.3 + lost), (policy.probes.count, lost)


def test_a_prompt_that_took_less_than_expected_does_not_pay_for_probes() -> None:
    """The first prompts seemed to take 0.2 seconds for their rows; those that come in the middle of probes add nothing."""
    cost, reqs = StepCost(overhead=0.1, row=0.0001, draft_pass=0.001), [sequence(i) for i in range(4)]
    policy = measured(SpecSizes(steps=3, num_proposed=3, written=3), 4, cost)
    for _ in range(20):
        policy.times.observe_prompts(StepWork(4, 4, 0), 400, 0.3)
    for req in reqs * 60:
        policy.verified(req, 3, [])
    beside = 0
    for _ in range(100):
        depth, before = policy.choose(reqs), policy.probes.saved_s
        spans = [SpanPlan(i, 10, 1, depth, True, True, req.draft.max_draft_tokens) for i, req in enumerate(reqs)]
        prompts = [SpanPlan(4, 10, 400, 0, False, False)] if policy.probes.remaining_steps else []
        policy.stepped(ScheduledStep(StepPlan([*spans, *prompts], depth), reqs), depth, 0.1 + 0.01 * depth)
        beside += bool(prompts)
        assert policy.probes.saved_s <= before + 0.001
    assert beside > 3


def test_nothing_is_timed_where_prompts_take_most_of_each_step() -> None:
    """Drafting is nearly worth it here, and its time would be tried for some steps in a row: what prompts take varies by more."""
    policy, depths = depths_beside_prompts(StepCost(overhead=0.1, row=0.001, draft_pass=0.004), 0.02, 0.5, 0.01)
    assert policy.probes.count > 3 and not any(depth and after for depth, after in pairwise(depths))


@pytest.mark.parametrize(
    ("before", "accepted", "at_once"), [(0, [1], True), (0, [0], False), (1, [1] * 8, True), (1, [1] + [0] * 7, False)]
)
def test_a_probe_with_much_more_accepted_than_expected_is_followed_by_the_next_one(before: int, accepted: list[int], at_once: bool) -> None:
    """`before`: how many of ten drafts were accepted until now. Of many requests some are always lucky."""
    cost, reqs, probes = StepCost(overhead=0.01, row=0.0004, draft_pass=0.003), [sequence(i) for i in range(len(accepted))], list[int]()
    policy = measured(SpecSizes(steps=3, num_proposed=3, written=3), len(reqs), cost)
    for step in range(100):
        for req in reqs:
            policy.verified(req, 3, [1] * (step % 10 < before))
    for step in range(2000):
        begun, depth = policy.probes.count, policy.choose(reqs)
        probes += [step] * (policy.probes.count - begun)
        plan = StepPlan([SpanPlan(req_idx, 10, 1, 0, True, True, req.draft.max_draft_tokens) for req_idx, req in enumerate(reqs)], depth)
        policy.stepped(ScheduledStep(plan, reqs), depth, cost.seconds(len(reqs), 10, 10, depth))
        verified = [(req, count) for req, count in zip(reqs, accepted, strict=True) if depth and req.draft.max_draft_tokens]
        policy.learn([event_of(req, [], proposal=Proposal([0] * depth, path=[1] * count)) for req, count in verified])
    assert len(probes) > 3 and (min(after - first for first, after in pairwise(probes)) < CONFIG.min_steps_between_changes) == at_once


@pytest.mark.parametrize(("forced", "least", "most"), [(0, 9_900, 10_000), (None, 150, 250)])
def test_each_short_step_is_learned_at_start_and_some_while_serving(
    forced: int | None, least: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 10,000. One in fifty takes six times as long, and not more of those that are learned do."""
    policy, reqs, random, learned = DepthPolicy(SpecSizes(steps=3, num_proposed=3, written=3), 0), [sequence(0)], Random(0), list[float]()
    monkeypatch.setattr(policy.times, "observe", lambda work, seconds, noise: learned.append(seconds))
    policy.forced_depth, plan = forced, StepPlan([SpanPlan(0, 10, 1, 0, True, True)], 0)
    for _ in range(10_000):
        policy.stepped(ScheduledStep(plan, reqs), 0, 0.0024 if random.random() < 0.02 else 0.0004)
    assert least <= len(learned) <= most and sum(seconds > 0.001 for seconds in learned) < 0.05 * len(learned)


def test_an_idle_engine_begins_with_the_depth_of_its_last_choice() -> None:
    policy = run(texts(1, 600), 1, costs("h100")[1], DEEP, NEVER, adaptive=True).policy
    assert policy is not None and policy.depth == policy.choose([]) == 0


def test_what_guesses_nothing_is_soon_not_drafted_for() -> None:
    """Steps of many requests are long, and each one tells much."""
    cost = costs("cpu")[1]
    assert 0 in run(texts(64), 64, cost, DEEP, NEVER, adaptive=True).depths[:6]


def test_each_depth_is_measured_with_all_requests() -> None:
    """More than those whose drafts a probe of one step looks at."""
    batch = 32
    policy = run(texts(batch, 1200), batch, costs("h100")[1], DEEP, (0.2, 0.2, 0.2), adaptive=True).policy
    assert policy is not None
    ages = [policy.times.age(StepWork(batch, batch * (1 + depth), depth, sampled=True)) for depth in range(DEEP + 1)]
    assert all(age is not None and age < 500 for age in ages), ages


def sequence(number: int, depth: int | None = None) -> RequestState:
    return RequestState(Request(str(number), [1] * 10, SamplingParams(speculation=Speculation(num_steps=depth)), seed=0), [1] * 50, 1000)


def test_the_likeliest_drafts_come_first() -> None:
    """Two requests whose drafts are accepted and two whose are not, where each further row costs a tenth of the step."""
    policy = measured(SpecSizes(steps=3, num_proposed=3, written=3), 4, StepCost(overhead=0.01, row=0.001))
    reqs = [sequence(i) for i in range(4)]
    for _ in range(60):
        for i, req in enumerate(reqs):
            policy.verified(req, 3, [1, 2, 3] if i < 2 else [])
    policy.choose(reqs)
    assert [req.draft.max_draft_tokens for req in reqs] == [3, 3, 0, 0]


def test_a_depth_without_drafts_is_never_chosen() -> None:
    """However cheap its passes seem to be."""
    policy = measured(SpecSizes(steps=3, num_proposed=3, written=3), 2, StepCost(overhead=0.01, row=0.001))
    reqs = [sequence(0), sequence(1)]
    for depth in (1, 2, 3):
        policy.times.observe(StepWork(2, 2, depth), 0.001)
    for _ in range(100):
        for req in reqs:
            policy.verified(req, 3, [])
    for _ in range(4 * CONFIG.min_steps_between_changes):
        depth = policy.choose(reqs)
        assert depth == 0 or any(req.draft.max_draft_tokens for req in reqs)


def test_a_request_may_want_less() -> None:
    policy = measured(SpecSizes(steps=3, num_proposed=3, written=3), 2, StepCost(overhead=0.01))
    reqs = [sequence(0), sequence(1, depth=1)]
    assert policy.choose(reqs) == 3 and [req.draft.max_draft_tokens for req in reqs] == [3, 1]
    policy.max_depth = 2
    for _ in range(CONFIG.min_steps_between_changes):
        depth = policy.choose(reqs)
    assert depth == 2 and [req.draft.max_draft_tokens for req in reqs] == [2, 1]
    policy.adaptive = False
    assert policy.choose(reqs) == 2 and [req.draft.max_draft_tokens for req in reqs] == [None, None]


def test_what_is_set_counts_from_the_next_step() -> None:
    policy = measured(SpecSizes(steps=3, num_proposed=3, written=3), 2, StepCost(overhead=0.01))
    reqs = [sequence(0), sequence(1)]
    assert policy.choose(reqs) == 3 and policy.state.tokens_per_second == policy.choice.value > 0
    policy.set(SpecChange(num_steps=1))
    assert policy.state.depth == 1 and policy.choose(reqs) == 1 and [req.draft.max_draft_tokens for req in reqs] == [1, 1]
    policy.set(SpecChange(num_steps=2, adaptive=False))
    assert policy.choose(reqs) == 2 and policy.state.depth == 2 and policy.state.tokens_per_second is None
    policy.set(SpecChange(num_steps=0))
    assert policy.choose(reqs) == 0
    policy.set(SpecChange(num_steps=3, adaptive=True))
    assert policy.choose(reqs) == 3
    for seq in reqs:
        policy.verified(seq, 3, [])
    assert policy.state.acceptance[0] < 0.8
    policy.set(SpecChange(reset=True))
    assert policy.state.acceptance == [0.8] * 3 and policy.times.num_observations > 0


def test_a_tree_gets_as_many_nodes_as_pay() -> None:
    policy, req = measured(SpecSizes(steps=3, num_proposed=8, written=8, trees=True), 1, StepCost(overhead=0.01, row=0.0004)), sequence(0)
    for i in range(300):
        policy.verified(req, 8, [1, 3, 6] if i % 3 else [2])
    assert policy.choose([req]) == 3 and req.draft.max_draft_tokens == 6  # no node after the sixth was ever accepted
