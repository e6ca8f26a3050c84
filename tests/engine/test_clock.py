"""How long steps took, by the host's clock and by a device's."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest

from mtpserve.core.protocols.runner import StepEnd
from mtpserve.engine.depth import clock
from mtpserve.engine.depth.clock import StepClock


@dataclass
class End:
    """core.protocols.StepEnd of a device whose clock is at `now`."""

    at: float
    over: bool = True

    def seconds_after(self, before: StepEnd) -> float | None:
        assert isinstance(before, End)
        return self.at - before.at if self.over else None


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The host's time."""
    time = [100.0]
    monkeypatch.setattr(clock, "perf_counter", lambda: time[0])
    return time


def test_a_launch_that_takes_long_is_that_of_its_own_step(now: list[float]) -> None:
    """Two steps in flight. The device takes 5 ms for each. Every fourth one is launched in 20 ms, during which it is computed; in the first
    5 of these the device is still at the step before."""
    steps, ended, found = StepClock(), 0.0, dict[int, float]()
    waiting: list[tuple[int, float, End]] = []
    for step in range(40):
        began, launch = now[0], 0.020 if step % 4 == 3 else 0.0003
        now[0] += launch
        ended = max(ended + 0.005, now[0]) if launch > 0.005 else max(ended, now[0]) + 0.005
        waiting.append((step, began, End(ended)))
        if len(waiting) > 1:
            number, planned, end = waiting.pop(0)
            now[0] = max(now[0], end.at)
            known: Any = steps.booked(number, planned, end)  # type: ignore[arg-type]
            if known is not None:
                found[known[0]] = known[1]
    assert set(range(1, 37)) <= found.keys()
    for step in range(8, 36):
        assert found[step] == pytest.approx(0.015 if step % 4 == 3 else 0.005, abs=0.0006), step


def test_what_the_device_waited_for_the_caller_is_not_a_step_s(now: list[float]) -> None:
    steps, found = StepClock(), list[float]()
    for step in range(6):
        now[0] += 7.0 if step == 3 else 0.0
        began = now[0]
        now[0] += 0.01
        known = steps.booked(step, began, End(now[0]))  # type: ignore[arg-type]
        found += [] if known is None else [known[1]]
    assert found == pytest.approx([0.01] * 4)


def test_an_end_that_may_be_to_come_is_left_out(now: list[float]) -> None:
    steps = StepClock()
    ends = [End(1.0), End(1.5, over=False), End(2.0), End(2.5)]
    known = [steps.booked(number, 90.0, end) for number, end in enumerate(ends)]  # type: ignore[arg-type]
    assert known == [None, None, None, (2, 0.5)]


def test_the_host_s_clock_counts_where_there_is_no_other(now: list[float]) -> None:
    """A pause of the caller is not a step's."""
    steps, found, times = StepClock(), list[float](), (0.01, 0.01, 0.02, 0.01)
    for number, took in enumerate(times):
        now[0] += 5.0 if number == 3 else 0.0
        began = now[0]
        now[0] += took
        known = steps.booked(number, began, None)  # type: ignore[arg-type]
        assert known is not None and known[0] == number
        found.append(known[1])
    assert found == pytest.approx(times) and all(a > 0 for a, _ in pairwise(found))
