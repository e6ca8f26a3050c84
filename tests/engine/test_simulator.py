"""The scheduler and its cache under whatever arrives: nothing is lost, nobody starves, everybody ends."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
from hypothesis import example, given, strategies as st

from mtpserve.engine.queue import MAX_OVERTAKEN
from mtpserve.tools.simulate.costs import StepCost
from mtpserve.tools.simulate.simulator import Simulated, percentile
from mtpserve.tools.simulate.traces import TraceConversation, TraceTurn, random_trace
from tests import selection
from tests.engine.simulate import EOS, POLICIES, simulate

SHARED = {name: range(first, first + 24) for name, first in (("", 0), ("p", 1000), ("q", 2000))}


@dataclass(frozen=True)
class Said:
    """A turn, in few numbers: hypothesis shrinks them."""

    prefix: int = 0  # tokens of one of the shared prompts
    family: str = "p"
    own: int = 1
    answer: int = 1
    pause: int = 0  # steps
    patience: int | None = None  # steps
    copies: int = 1
    more: int = 0


@dataclass(frozen=True)
class Schedule:
    conversations: tuple[tuple[int, tuple[Said, ...], str, int], ...]  # steps after the one before it, turns, salt, priority

    def trace(self) -> list[TraceConversation]:
        made, at, fresh = [], 0.0, 5000
        for gap, said, salt, priority in self.conversations:
            turns = []
            for each in said:
                prompt = [*SHARED[each.family][: each.prefix], *range(fresh, fresh + each.own)]
                answer = [*range(fresh + 100, fresh + 100 + each.answer), *([EOS] if each.more else [])]
                patience = None if each.patience is None else each.patience * 0.01
                turns.append(TraceTurn(prompt, answer, each.pause * 0.01, patience, each.copies, each.more))
                fresh += 200
            at += gap * 0.01
            made.append(TraceConversation(at, turns, salt, priority))
        return made


SAID = st.builds(
    Said,
    prefix=st.integers(0, 24),
    family=st.sampled_from("pq"),
    own=st.integers(1, 12) | st.integers(1, 60),
    answer=st.integers(1, 20) | st.integers(1, 80),
    pause=st.integers(0, 5),
    patience=st.none() | st.integers(0, 15),
    copies=st.sampled_from((1, 1, 1, 3)),
    more=st.sampled_from((0, 0, 9)),
)
SCHEDULES = st.builds(
    Schedule,
    st.lists(
        st.tuples(st.integers(0, 4), st.lists(SAID, min_size=1, max_size=3).map(tuple), st.sampled_from(("", "", "s")), st.integers(0, 2)),
        min_size=1, max_size=10,
    ).map(tuple),
)  # fmt: skip
OPTIONS = st.fixed_dictionaries(
    {
        "pool": st.integers(48, 300),  # tokens
        "page_size": st.sampled_from((1, 4, 16)),
        "seats": st.integers(1, 6),
        "budget": st.sampled_from((4, 7, 16, 64)),
        "steps": st.sampled_from((0, 1, 3)),
        "overlap": st.integers(0, 2),
        "policy": st.sampled_from(POLICIES),
        "reserved": st.sampled_from((0.0, 0.1, 1.0)),
        "long_prompt": st.none() | st.sampled_from((3, 16)),
        "max_long": st.integers(1, 2),
        "cached": st.sampled_from((True, True, False)),
    }
)


def run(schedule: Schedule, options: dict[str, Any], window: int | None = None, few: int = 0, **below: Any) -> Simulated:
    """`few`: pages of the window's group beyond those that one request needs."""
    rest, size = {name: value for name, value in options.items() if name != "pool"}, options["page_size"]
    pages = [-(-options["pool"] // size)]
    if window is not None:
        pages.append(-(-(window + options["budget"] + 4 * 4) // size) + 2 + few)
    windows = (None,) if window is None else (None, window)
    return simulate(schedule.trace(), pages=tuple(pages), windows=windows, **rest, **below)[0]


@selection.examples(200)
@given(schedule=SCHEDULES, options=OPTIONS)
def test_whatever_arrives_everything_is_in_order_after_each_step_and_everybody_ends(schedule: Schedule, options: dict[str, Any]) -> None:
    result = run(schedule, options)
    assert result.cached_tokens == 0 or options["cached"]


@selection.examples(60)
@given(schedule=SCHEDULES, options=OPTIONS, window=st.sampled_from((1, 6, 20)), few=st.integers(0, 20))
def test_so_it_is_where_layers_have_windows(schedule: Schedule, options: dict[str, Any], window: int, few: int) -> None:
    run(schedule, options, window, few)


@selection.examples(80)
@given(
    schedule=SCHEDULES, options=OPTIONS, window=st.none() | st.sampled_from((1, 6, 20)), few=st.integers(0, 20), host=st.integers(1, 40),
    disk=st.none() | st.integers(1, 40), page_time=st.sampled_from((0.0001, 0.003, 0.1)),
)  # fmt: skip
def test_so_it_is_with_tiers_below(
    schedule: Schedule, options: dict[str, Any], window: int | None, few: int, host: int, disk: int | None, page_time: float
) -> None:
    run(schedule, options | {"cached": True}, window, few, host=host, disk=disk, page_time=page_time)


def test_who_waits_for_pages_from_below_starts_at_last() -> None:
    """Each loading pushed out what the one before it had brought, so that nobody ever started: found by the test above."""
    said = partial(Said, patience=None)
    schedule = Schedule((
        (0, (said(7, "q", 23, 9, pause=1, copies=3, more=9), said(0, "q", 54, 14, pause=4, copies=3, more=0)), "", 0),
        (1, (said(19, "p", 9, 1, pause=5, copies=1, more=0),), "", 1),
        (4, (said(3, "q", 19, 3, pause=1, copies=1, more=0), said(24, "p", 4, 2, pause=1, copies=1, more=0)), "", 1),
    ))  # fmt: skip
    options = {"pool": 299, "page_size": 1, "seats": 2, "budget": 7, "steps": 1, "overlap": 0, "policy": "fcfs", "reserved": 0.0,
               "long_prompt": 3, "max_long": 1, "cached": True}  # fmt: skip
    assert run(schedule, options, window=1, few=19, host=31, disk=None, page_time=0.1).finished == 9


def test_pages_come_back_from_host_memory_and_from_disk() -> None:
    prompts = [range(1000 * i, 1000 * i + 160) for i in range(4)]
    trace = [conversation(TraceTurn(prompts[i % 4], [1]), at=float(i)) for i in range(8)]
    plain, host, disk = (simulate(trace, pages=12, **below)[0] for below in ({}, {"host": 100}, {"host": 12, "disk": 100}))
    assert plain.hit_rate == 0 and host.hit_rate == disk.hit_rate == 159 * 4 / (160 * 8)
    slow = simulate(trace, pages=12, host=100, page_time=0.01)[0]
    assert max(host.first_token) < max(slow.first_token) < 0.15


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("overlap", [0, 1])
def test_a_thousand_requests_with_too_few_pages(policy: str, overlap: int) -> None:
    trace = random_trace(480, seed=overlap, rate=80, prompt=48, output=24, stop=EOS, priorities=3 if policy == "priority" else 1)
    result, scheduler = simulate(trace, pages=160, seats=64, overlap=overlap, policy=policy, reserved=0.0, every=10)
    assert result.preemptions > 0 and result.num_left > 0 and 0.1 < result.hit_rate < result.ideal_hit_rate and scheduler.checked > 50


@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
def test_nobody_starves_while_others_find_all_of_their_prompts(policy: str) -> None:
    """A stream of requests that find everything, more than the device can serve, and in the middle one that finds nothing."""
    hot = [conversation(TraceTurn(SHARED["p"], range(10_000 + 9 * i, 10_008 + 9 * i)), at=0.01 * i) for i in range(600)]
    cold = conversation(TraceTurn(range(3000, 3040), [7]), at=1.0)
    result, scheduler = simulate(sorted([*hot, cold], key=lambda each: each.at), seats=4, steps=0, policy=policy, long_prompt=None, every=1)
    assert scheduler.overtaken == {"fcfs": 0, "lpm": MAX_OVERTAKEN}[policy] and result.finished == 601


def test_a_schedule_gives_the_same_twice() -> None:
    def made() -> Simulated:
        return simulate(random_trace(50, rate=80, stop=EOS), pages=100)[0]

    assert made() == made()


def conversation(*turns: TraceTurn, at: float = 0.0, salt: str = "") -> TraceConversation:
    return TraceConversation(at, turns, salt)


def test_the_next_turn_finds_prompt_and_answer() -> None:
    trace = [conversation(TraceTurn(range(40), range(100, 120)), TraceTurn(range(200, 208), range(300, 305)))]
    result, _ = simulate(trace, page_size=4)
    # 59 of its first 60 tokens were computed: the last one of an answer never is.
    assert (result.requests, result.prompt_tokens, result.cached_tokens, result.findable_tokens) == (2, 40 + 68, 56, 56)
    assert result.output_tokens == 25


def test_another_salt_finds_nothing() -> None:
    trace = [conversation(TraceTurn(range(40), [1]), at=at, salt=salt) for at, salt in ((0.0, "a"), (1.0, "b"), (2.0, "a"))]
    result, _ = simulate(trace, page_size=4)
    assert result.cached_tokens == result.findable_tokens == 39


def test_without_a_prefix_cache_nothing_is_found_and_the_ideal_is_none() -> None:
    trace = [conversation(TraceTurn(range(40), [1]), at=at) for at in (0.0, 1.0)]
    result, _ = simulate(trace, cached=False)
    assert (result.cached_tokens, result.findable_tokens, result.prompt_tokens) == (0, 0, 80)


def test_a_pool_that_is_too_small_forgets() -> None:
    prompts = [range(1000 * i, 1000 * i + 160) for i in range(4)]
    trace = [conversation(TraceTurn(prompts[i % 4], [1]), at=float(i)) for i in range(8)]
    rates = [simulate(trace, pages=pages, page_size=16)[0].hit_rate for pages in (12, 100)]
    assert rates[0] == 0 and rates[1] == 159 * 4 / (160 * 8)


def test_what_no_pool_of_this_size_holds_is_refused_and_its_conversation_ends() -> None:
    trace = [conversation(TraceTurn(range(999), [1]), TraceTurn([5], [1])), conversation(TraceTurn([1], [2]))]
    result, _ = simulate(trace, pages=10, page_size=16)
    assert (result.requests, result.refused, result.finished) == (2, 1, 1)


def test_times_are_those_of_the_steps() -> None:
    trace = [conversation(TraceTurn(range(10), range(100, 105)), at=7.0)]
    result, _ = simulate(trace, steps=0, overlap=0)
    assert result.first_token == pytest.approx([0.01]) and result.between_tokens == pytest.approx([0.01])
    assert (result.steps, result.seconds) == (5, pytest.approx(7.05))


def test_a_client_that_leaves_frees_its_pages() -> None:
    trace = [conversation(TraceTurn(range(10), range(100, 1100), patience=0.1)), conversation(TraceTurn([1], [2]), at=5.0)]
    result, _ = simulate(trace)
    assert (result.num_left, result.finished) == (1, 1) and result.seconds < 6


def test_drafts_are_accepted_as_often_as_the_curve_says() -> None:
    trace = [conversation(TraceTurn([1], range(100, 8100)))]
    plain, chains = (simulate(trace, steps=steps, pages=600, every=500)[0] for steps in (0, 3))
    assert plain.steps - 1 <= 8000 <= plain.steps + 1
    assert plain.steps / chains.steps == pytest.approx(2.99, abs=0.1)  # GLM-5.2's curve, 3 drafts


@pytest.mark.parametrize(("share", "value"), [(0.0, 1.0), (0.5, 2.0), (0.9, 4.0), (1.0, 4.0)])
def test_percentiles(share: float, value: float) -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], share) == value
    assert percentile([], share) == 0


def test_a_step_costs_what_the_formula_says() -> None:
    cost = StepCost(overhead=1.0, weights=10.0, row=1.0, token=0.1, pair=0.01)
    assert cost.seconds(5, 100, 100) == 1 + 10 + 10
    assert cost.seconds(20, 100, 2000) == 1 + 20 + 20


@example(seed=0)
@selection.examples(5)
@given(seed=st.integers(0, 1 << 30))
def test_random_traces_arrive_in_order(seed: int) -> None:
    times = [each.at for each in random_trace(50, seed)]
    assert times == sorted(times) and len(times) == 50
