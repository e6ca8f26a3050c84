"""The depths that are chosen where steps are captured: drafts that are left out save nothing there, and prompts are computed apart."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import product

import pytest

from mtpserve.core.plan import SpanPlan, StepPlan
from mtpserve.core.spec_sizes import SpecSizes
from mtpserve.engine.depth.step_shapes import StepShapes, StepWork
from mtpserve.engine.depth.step_times import StepTimes
from mtpserve.tools.simulate.costs import StepCost
from mtpserve.tools.simulate.traces import TraceConversation, TraceTurn
from tests import selection
from tests.engine.captured import CAPTURED, Apart, Captured
from tests.engine.test_policy import DEEP, DEMO, FAIR, UNTRAINED, measured, run, sequence
from tests.runtime.recorders import Again
from tests.runtime.test_graphs import TREE
from tests.tiny import tiny_engine, tiny_model

CHAIN = SpecSizes(steps=DEEP, num_proposed=DEEP, written=DEEP)
# An H100 with 475 million parameters in 36 layers, and a thirty-seventh that drafts.
PLAIN = StepCost(overhead=0.004, row=5e-6)
COST = replace(PLAIN, draft_pass=0.00015, extend=0.0001)


def speed(rates: Seq[float], depth: int, rounds: int, kind: type[Captured], adaptive: bool = False) -> float:
    load = [TraceConversation(0.0, [TraceTurn([1] * 128, [1] * (64 + 37 * i % 128))]) for i in range(128 * rounds)]
    return run(load, 128, COST if depth else PLAIN, depth, rates, adaptive, kind=kind, captured=CAPTURED, apart=kind is Apart).speed


ROUNDS = (24, 6) if selection.ALL else (12, 3)  # where it takes long until nothing is drafted, and elsewhere
CELLS = [(UNTRAINED, ROUNDS[0], Captured), (FAIR, ROUNDS[1], Apart), (DEMO, ROUNDS[1], Captured)]
MORE_CELLS = [(UNTRAINED, ROUNDS[0], Apart), (FAIR, ROUNDS[1], Captured), (DEMO, ROUNDS[1], Apart)]


@pytest.mark.parametrize(("rates", "rounds", "kind"), [*CELLS, *(pytest.param(*cell, marks=pytest.mark.thorough) for cell in MORE_CELLS)])
def test_nearly_as_fast_as_the_best_captured_depth(rates: Seq[float], rounds: int, kind: type[Captured]) -> None:
    """128 requests, whose prompts are as long as their answers. A round takes a second."""
    chosen = speed(rates, DEEP, rounds, kind, adaptive=True)
    assert chosen >= 0.98 * speed(rates, 0, rounds, kind)
    assert rates is UNTRAINED or chosen >= 0.97 * max(speed(rates, depth, rounds, kind) for depth in CAPTURED)


@pytest.mark.parametrize("recorder", [None, Again()])
def test_an_engine_knows_its_graphs_depths(recorder: Again | None) -> None:
    policy = tiny_engine(tiny_model(), 4, adaptive=True, recorder=recorder).policy
    assert policy is not None and [*policy.depths] == ([0, 1, 2, 3, 4] if recorder is None else [0, 1, 3, 4])
    assert not policy.times.apart
    tree = tiny_engine(tiny_model(), TREE, adaptive=True, recorder=recorder).policy
    assert tree is not None and tree.times.apart == (recorder is not None)


def test_a_captured_step_has_the_rows_and_passes_of_its_graph() -> None:
    shapes, reqs = StepShapes(CHAIN, CAPTURED), [sequence(i) for i in range(4)]
    assert [*shapes.depths(3)] == [0, 1, 3] and [*shapes.depths(2)] == [0, 1, 2] and [*shapes.depths(0)] == [0]
    found = [shapes.work(reqs, drafts, depth)[:3] for drafts, depth in ((0, 0), (1, 1), (4, 2), (12, 3), (0, 1))]
    assert found == [(4, 4, 0), (4, 8, 1), (4, 16, 3), (4, 16, 3), (4, 8, 1)]
    assert [StepShapes(CHAIN).work(reqs, drafts, 2)[:3] for drafts in (0, 5)] == [(4, 4, 2), (4, 9, 2)]

    def planned(drafts: list[int], draft_depth: int) -> tuple[StepWork, int]:
        spans = [SpanPlan(req_idx, 10, 1, count, True, True) for req_idx, count in enumerate(drafts)]
        return shapes.plan_work(StepPlan([*spans, SpanPlan(9, 0, 50, 0, False, False)], draft_depth), reqs)

    assert planned([0, 0, 0], 0) == (StepWork(3, 3, 0, True, 30), 50)
    assert planned([0, 0, 0], 2) == (StepWork(3, 12, 3, True, 30), 50), "drafts are made, and none are verified"
    assert planned([0, 2, 0], 0) == (StepWork(3, 12, 3, True, 30), 50), "the last ones are verified"


def test_a_captured_tree_is_there_or_not() -> None:
    shapes = StepShapes(SpecSizes(steps=2, num_proposed=6, written=6, trees=True), (2,))
    assert [*shapes.depths(2)] == [0, 2] and shapes.work([sequence(0)], 3, 2)[:3] == (1, 7, 2)
    plan = StepPlan([SpanPlan(0, 10, 1, 6, True, True)], 0)
    assert shapes.plan_work(plan, [sequence(0)])[0][:3] == (1, 7, 2), "more drafts than it is deep"


def test_all_drafts_are_taken_where_they_are_computed_anyway() -> None:
    """Two requests whose drafts are accepted and two whose are not, where each further row costs a tenth of the step."""
    found = []
    for captured in ((), CAPTURED):
        policy, reqs = measured(CHAIN, 4, StepCost(overhead=0.01, row=0.001), captured), [sequence(i) for i in range(4)]
        for _ in range(60):
            for i, req in enumerate(reqs):
                policy.verified(req, 3, [1, 2, 3] if i < 2 else [])
        policy.choose(reqs)
        found.append([req.draft.max_draft_tokens for req in reqs])
    assert found == [[3, 3, 0, 0], [3, 3, 3, 3]]


def test_further_rows_cost_nothing_more_beside_prompts_that_are_computed_apart() -> None:
    """400 rows of prompts take 10 ms; 384 further rows of requests 1 ms, and three passes 0.3 ms, which prompts have too."""
    expected = []
    for apart in (False, True):
        times = StepTimes(apart)
        for requests, passes in product((1, 2, 8, 32, 128), (0, 1, 3)):
            rows = requests * (1 + passes)
            for _ in range(10):
                times.observe(StepWork(requests, rows, passes), 0.004 + (rows - requests) * 1e-3 / 384 + passes * 1e-4)
        times.serve()
        for step in range(60):
            prompt = 400 + 100 * (step % 3)
            times.observe_prompts(StepWork(128, 512, 3), prompt, 0.0053 + prompt * 25e-6 + apart * 3e-4)
            times.count(128.0, True)
        expected.append(times.with_prompts(StepWork(128, 512, 3), 128.0) - times.with_prompts(StepWork(128, 128, 0), 128.0))
    assert expected[1] == pytest.approx(0.0016, rel=0.1) and expected[0] > 0.004
