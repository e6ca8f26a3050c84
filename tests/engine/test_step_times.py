"""What steps take, as it is learned from observations."""

from __future__ import annotations

from math import exp
from random import Random

import pytest

from mtpserve.engine.depth.depth_config import CONFIG
from mtpserve.engine.depth.step_shapes import StepWork
from mtpserve.engine.depth.step_times import StepTimes

DEEP = 3


def flat(seconds: float, *shapes: tuple[int, int, int]) -> StepTimes:
    """Steps of these requests, rows and passes take so long, each."""
    times = StepTimes()
    for shape in shapes:
        for _ in range(20):
            times.observe(StepWork(*shape), seconds)
    times.serve()
    return times


def test_what_long_contexts_take_is_learned_from_one_depth() -> None:
    """Other depths are known from a start with short contexts alone."""
    random, requests = Random(0), 64

    def seconds(depth: int, context: int, pace: float) -> float:
        read = 3e-6 * context * (1 + CONFIG.further_row_fraction * depth)
        return (0.05 * (1 + 0.8 * depth) + read) * pace

    times = StepTimes()
    for depth in range(DEEP + 1):
        for _ in range(4):
            times.observe(StepWork(requests, requests * (1 + depth), depth, False, requests * 8), seconds(depth, requests * 8, 1.0))
    times.serve()
    for tokens in range(200):
        work = StepWork(requests, requests, 0, False, requests * (100 + tokens))
        times.observe(work, seconds(0, work.context, 1.05) * exp(random.gauss(0, 0.03)))
    for depth in range(DEEP + 1):
        work = StepWork(requests, requests * (1 + depth), depth, False, requests * 300)
        assert times.seconds(work) == pytest.approx(seconds(depth, work.context, 1.05), rel=0.08)


def test_what_prompts_add_is_learned_apart() -> None:
    """Of 16 requests of which each step computes another one's prompt of 20 to 60 rows, which take twice as long as the formula says."""
    times, random, work = StepTimes(), Random(0), StepWork(16, 32, 1)
    for requests, rows in ((1, 1), (16, 16), (16, 32), (64, 64), (64, 256)):
        times.observe(StepWork(requests, rows, 1), 0.01 + 0.001 * rows)
    times.serve()
    assert times.prompts(work, 50) == pytest.approx(0.05, rel=0.2)
    for _ in range(60):
        rows = random.randrange(20, 60)
        times.observe_prompts(work, rows, (0.042 + 0.002 * rows) * (1 + random.gauss(0, 0.03)))
    times.observe_prompts(work, 50, 30.0)  # a disturbance
    assert times.prompts(work, 50) == pytest.approx(0.1, rel=0.1) and times.seconds(work) == pytest.approx(0.042, rel=0.02)


@pytest.mark.parametrize("lengths", [[128] * 20 + [256], [20, 60, 150, 400]])
def test_what_any_prompt_takes_is_no_row_s(lengths: list[int]) -> None:
    """Steps with prompts take 20 ms more, and 10 µs for each of their rows. Hardly any difference in lengths is enough to see it."""
    times, random, work = flat(0.005, (1, 1, 0), (32, 32, 0), (32, 128, 3), (1, 4, 3)), Random(0), StepWork(32, 128, 3)
    for _ in range(100):
        times.count(100.0, prompts=True)
        rows = random.choice(lengths)
        times.observe_prompts(work, rows, (0.025 + 10e-6 * rows) * (1 + random.gauss(0, 0.02)))
    assert times.prompts(work, 128) == pytest.approx(0.0213, rel=0.1)
    # A mean row of a prompt takes 145 µs.
    assert times.more_beside_prompts(work) < 96 * 80e-6


def test_sampled_steps_are_learned_apart_from_greedy_ones() -> None:
    """Drawing may cost more where drafts are drawn, too: what is known of greedy steps holds until sampled ones are seen."""
    times = StepTimes()
    for _ in range(300):
        for depth, seconds in ((0, 0.02), (1, 0.025)):
            times.observe(StepWork(4, 4 * (1 + depth), depth), seconds)
    times.serve()
    drawn = [StepWork(4, 4 * (1 + depth), depth, sampled=True) for depth in (0, 1)]
    assert [times.seconds(work) for work in drawn] == pytest.approx([0.02, 0.025], rel=0.02)
    for _ in range(40):
        times.observe(drawn[1], 0.03)
        times.observe(drawn[0], 0.02)
    assert times.seconds(drawn[1]) / times.seconds(drawn[0]) == pytest.approx(1.5, rel=0.05)
    greedy = [times.seconds(work._replace(sampled=False)) for work in drawn]
    assert greedy[1] / greedy[0] == pytest.approx(1.25, rel=0.02)


def test_further_rows_take_what_those_of_prompts_take_beside_them() -> None:
    """Steps take 10 ms whatever is in them, but 10 ms more where 48 drafts are beside 200 rows of prompts."""
    times, work = flat(0.01, (1, 1, 0), (16, 16, 0), (16, 64, 3), (1, 4, 3)), StepWork(16, 64, 3)
    assert times.more_beside_prompts(work) == 0
    for _ in range(60):
        times.observe_prompts(work, 200, 0.02)
    assert times.more_beside_prompts(work) == pytest.approx(48 * 50e-6, rel=0.15) and times.more_beside_prompts(StepWork(16, 16, 1)) == 0
    assert times.prompts(work, 200) == pytest.approx(0.01, rel=0.05)
    assert times.prompts(StepWork(16, 16, 0), 200) == pytest.approx(0.0076, rel=0.05)  # all of it but what the drafts' rows took


def test_as_many_prompts_come_with_as_many_tokens() -> None:
    """Four of five steps have no prompts. With twice as many tokens in each it is as likely as two such steps in a row, 0.64."""
    times, work = flat(0.01, (1, 1, 0), (16, 16, 0), (16, 64, 3), (1, 4, 3)), StepWork(16, 64, 3)
    for step in range(300):
        times.count(20.0, prompts=step % 5 == 0)
        if step % 5 == 0:
            times.observe_prompts(StepWork(16, 16, 0), 200, 0.02)
    for tokens, share in ((20.0, 0.2), (40.0, 0.36), (400.0, 0.99)):
        assert times.with_prompts(work, tokens) - times.seconds(work) == pytest.approx(share * 48 * 50e-6, rel=0.15)
    for _ in range(200):
        times.count(20.0, prompts=False)
    assert times.with_prompts(work, 20.0) == pytest.approx(times.seconds(work), rel=0.001)


@pytest.mark.parametrize("room", [0, 300])
def test_room_that_prompts_take_is_not_saved_by_fewer_steps(room: int) -> None:
    """Prompts of 350 to 2000 rows, of which each step has room for some: with prompts in all steps only the rest of a step is saved."""
    times, random, work = flat(0.02, (1, 1, 0), (16, 16, 0), (16, 64, 3), (1, 4, 3)), Random(0), StepWork(16, 16, 0)
    for _ in range(100):
        rows = random.randrange(350, 2000)
        times.count(16.0, prompts=True)
        times.observe_prompts(work, rows, 0.02 + 40e-6 * (rows - room))
    assert times.prompts(work, 500) == pytest.approx(40e-6 * (500 - room), rel=0.15)
    assert times.with_prompts(work, 16.0) == pytest.approx(0.02 - 40e-6 * room, rel=0.2)


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize(("slower", "deep"), [(1.5, None), (1.5, 1.2), (1.3, 1.0)])
def test_drafts_for_some_requests_take_what_drafts_for_none_and_for_all_do(slower: float, deep: float | None, sampled: bool) -> None:
    """Steps of 128 requests take longer than those of fewer ones would let one expect. None with drafts for some of them was seen."""
    times, requests = StepTimes(), 128

    def formula(work: StepWork) -> float:
        return 0.01 + 0.001 * work.rows + 0.003 * work.passes

    for count in (1, 2, 4, 8, 16, 32, 64):
        for passes in (0, 1):
            for _ in range(4):
                work = StepWork(count, count * (1 + passes), passes)
                times.observe(work, formula(work))
    times.serve()
    plain, full = StepWork(requests, requests, 0, sampled), StepWork(requests, 2 * requests, 1, sampled)
    for _ in range(30):
        times.observe(plain, slower * formula(plain))
        if deep is not None:
            times.observe(full, deep * formula(full))
        for work in (StepWork(8, 8, 0), StepWork(8, 16, 1)):  # the pace is as it was
            times.observe(work, formula(work))
    few, half = (plain._replace(rows=requests + drafts, passes=1) for drafts in (13, 64))
    assert times.seconds(few) == pytest.approx(slower * formula(few), rel=0.12)
    if deep is not None:
        assert times.seconds(half) == pytest.approx((slower * deep) ** 0.5 * formula(half), rel=0.12)
    assert times.seconds(few) > times.seconds(plain)


def test_slow_steps_teach_others_within_seconds() -> None:
    """Steps of 128 requests take half as long again as those of fewer would let one expect, and so do those of 118, which were not seen."""
    times = StepTimes()
    for count in (1, 2, 4, 8, 16, 32):
        for _ in range(60):
            times.observe(StepWork(count, count, 0), 0.01 + 0.001 * count)
    times.serve()
    others = StepWork(118, 118, 0)
    for _ in range(30):
        times.observe(StepWork(128, 128, 0), 0.2)
        times.observe(StepWork(8, 8, 0), 0.018)  # the pace is as it was
    assert times.seconds(others) == pytest.approx(0.2 * 118 / 128, rel=0.1)
