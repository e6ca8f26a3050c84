"""How long steps took, each from the end of the last one to its own.

Where a device computes, ends are what its own clock says. The host reads a step after it has launched the
next one, and the launch may take longer than the device: a step with prompts is launched kernel by kernel, in
27 ms with 36 layers on an H200, so that the host would find that the step before it had taken so long.

    host     launch 1 | launch 2: prompts, kernel by kernel | read 1 | launch 3 | read 2
    device            | 1 |  2  …  …  …  …  …  …  …  …  … |        | 3 |
"""

from __future__ import annotations

from time import perf_counter
from typing import NamedTuple

from mtpserve.core.protocols.runner import StepEnd
from mtpserve.engine.steps import ScheduledStep


class Unread(NamedTuple):
    planned: ScheduledStep
    own: float  # seconds from planning it to its result: it took no longer
    ended: StepEnd
    before: StepEnd | None  # the end of the step before it


class StepClock:
    def __init__(self) -> None:
        self._booked = 0.0  # when the last step was; 0: none was since the engine was idle
        self._unread: Unread | None = None

    def idle(self) -> None:
        self._booked = 0.0

    def booked(
        self, planned: ScheduledStep, began: float, ended: StepEnd | None
    ) -> tuple[ScheduledStep, float] | None:
        """A step whose planning began at `began` has been read. → the last step of which it is known, and its
        seconds: this one, or with a device's clock the one before it, whose end is certainly over."""
        last, self._booked = self._booked or began, perf_counter()
        elapsed, since = self._booked - began, self._booked - last
        if ended is None:
            # While steps follow each other, each takes from the end of the last one to its own. A longer
            # pause is the caller's.
            return planned, since if since <= 2 * elapsed else elapsed
        step, before = self._unread, None if self._unread is None else self._unread.ended
        self._unread = Unread(planned, elapsed, ended, before)
        if step is None or step.before is None:
            return None
        took = step.ended.seconds_after(step.before)
        return None if took is None else (step.planned, min(took, step.own))
