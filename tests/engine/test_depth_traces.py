"""The depths that are chosen with steps' times and acceptance as they were recorded by benchmarks/depth_traces.py, on an H200 with 16
requests and on two cores with 4 and 16. Text that is easy to guess becomes text that nobody guesses, and easy again."""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import pytest

from mtpserve.cache.groups import PageGroups
from mtpserve.config import SpecConfig
from mtpserve.engine.depth.policy import DepthPolicy
from mtpserve.engine.depth.step_shapes import StepWork
from mtpserve.engine.scheduler import Scheduler
from mtpserve.engine.steps import ScheduledStep
from mtpserve.spec.sizes import spec_sizes
from mtpserve.tools.simulate.costs import StepCost
from mtpserve.tools.simulate.simulated import SimulatedDevice
from mtpserve.tools.simulate.simulator import Simulation
from mtpserve.tools.simulate.traces import TraceConversation, TraceTurn
from tests import selection

DEEP, BUDGET, PROMPT = 3, 2048, 8
TRACES = Path(__file__).parent / "traces"


class Over(Exception):
    """The trace has ended."""


class Trace:
    """`now`: seconds since its beginning, of a run that is going through it. `order`: recorded steps are taken from another place on."""

    def __init__(self, path: Path, order: int) -> None:
        recorded = json.loads(path.read_text())
        self.requests, self.turn, self.parts = recorded["requests"], recorded["turn_seconds"], recorded["parts"]
        self.turns = len(self.parts[0]["microseconds"][0])
        self.now, self.read, self.verified = 0.0, 5 * order, 35 * order

    @property
    def seconds(self) -> float:
        return len(self.parts) * self.turns * self.turn

    def place(self) -> tuple[dict[str, Any], int]:
        """Part and turn."""
        turn = min(int(self.now / self.turn), len(self.parts) * self.turns - 1)
        return self.parts[turn // self.turns], turn % self.turns

    def step(self, depth: int) -> float:
        """Seconds of one that was recorded at about this time."""
        part, turn = self.place()
        taken = part["microseconds"][depth][turn]
        self.read += 1
        took = 1e-6 * taken[self.read % len(taken)]
        self.now += took
        return took

    def accepted(self) -> int:
        """Drafts of a request, of as many as were recorded."""
        digits = self.place()[0]["accepted"]
        self.verified += 1
        return int(digits[self.verified % len(digits)])


class RecordedSteps(StepCost):
    __slots__ = ("trace",)
    trace: Trace

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        object.__setattr__(self, "trace", trace)

    def seconds(self, rows: int, tokens: int, pairs: int, passes: int = 0, absorbed: Seq[int] = ()) -> float:
        """After a change of depths a step still verifies what was drafted before."""
        return self.trace.step(max(passes, min(-(-rows // self.trace.requests) - 1, DEEP)))


class RecordedDevice(SimulatedDevice):
    trace: Trace

    def _accepted(self, drafts: int) -> int:
        return min(drafts, self.trace.accepted()) if drafts else 0


class Ran(NamedTuple):
    tokens: int
    policy: DepthPolicy | None
    depths: list[int]


def run(path: Path, order: int, depth: int, adaptive: bool = False) -> Ran:
    trace = Trace(path, order)
    spec = SpecConfig(speculative_algorithm="MTP", speculative_num_steps=depth) if depth else SpecConfig(speculative_algorithm="none")
    device = RecordedDevice(spec_sizes(spec, BUDGET))
    device.trace = trace
    policy, depths = None, list[int]()
    if adaptive:
        policy = DepthPolicy(device.sizes, DEEP)
        for each in reversed(policy.depths):
            for _ in range(5):  # as at start
                work = StepWork(trace.requests, trace.requests * (1 + each), each, True, trace.requests * PROMPT)
                policy.times.observe(work, trace.step(each))
        policy.times.serve()
        policy.forget()
        trace.now = 0.0
    pages = PageGroups([None], [20_000], 16, BUDGET)
    scheduler = device.limited(Scheduler)(pages, max_running=trace.requests, token_budget=BUDGET, eos_ids=())

    def watch(planned: ScheduledStep) -> None:
        depths.append(planned.plan.draft_depth)
        if trace.now >= trace.seconds:
            raise Over

    simulation = Simulation(scheduler, pages, device, RecordedSteps(trace), cached=False, policy=policy, watch=watch)
    with pytest.raises(Over):
        simulation.run(TraceConversation(0.0, [TraceTurn([1] * PROMPT, [1] * 4000)]) for _ in range(trace.requests))
    return Ran(simulation.result.output_tokens, policy, depths)


# Mean tokens relative to the best fixed depth. Single orders differ by 5 %, and by 10 % with the H200's trace, which lasts 3.6 s: it takes
# 0.3 s there until drafting has ended, and up to 1 s until it has come back.
@pytest.mark.parametrize(("name", "least"), [("h200_16", 0.85), ("zen5_4", 0.98), ("zen5_16", 1.03)])
def test_depths_follow_a_recorded_trace_and_do_not_oscillate(name: str, least: float) -> None:
    path, found = TRACES / f"{name}.json", []
    for order in range(6 if selection.ALL else 2):
        best = max(run(path, order, depth).tokens for depth in range(DEEP + 1))
        chosen = run(path, order, DEEP, adaptive=True)
        assert chosen.policy is not None and len(chosen.depths) > 300
        # The text changes twice. Without what keeps a depth for a while there are 17 to 29 changes with 4 requests on the two cores.
        assert 1 <= chosen.policy.num_changes <= 9
        found.append(chosen.tokens / best)
    assert mean(found) >= least
