"""How long steps took, each from the end of the last one to its own.

Where a device computes, its own clock tells the ends. The host reads a step after it has launched the next
one, and the launch may take longer than the device. A step with prompts is launched kernel by kernel, in
27 ms with 36 layers on an H200. The host would find that the step before it had taken so long.

    host     launch 1 | launch 2: prompts, kernel by kernel | read 1 | launch 3 | read 2
    device            | 1 |  2  …  …  …  …  …  …  …  …  … |        | 3 |
"""

from __future__ import annotations

from time import perf_counter
from typing import NamedTuple

from mtpserve.core.protocols.runner import StepEnd
from mtpserve.engine.steps import ScheduledStep


class TimedStep(NamedTuple):
    step: ScheduledStep
    max_seconds: float  # from planning it to its result: it took no longer
    end: StepEnd
    previous_end: StepEnd | None


class StepClock:
    def __init__(self) -> None:
        self._last_read = 0.0  # when the last step was read; 0: none was since the engine was idle
        self._last_step: TimedStep | None = None

    def idle(self) -> None:
        self._last_read = 0.0

    def booked(
        self, step: ScheduledStep, start: float, end: StepEnd | None
    ) -> tuple[ScheduledStep, float] | None:
        """A step has been read, whose planning began at `start`.

        → the last step whose time is known, and its seconds: this one, or with a device's clock the one
        before it, whose end is certainly over.
        """
        last_read, self._last_read = self._last_read or start, perf_counter()
        elapsed, interval = self._last_read - start, self._last_read - last_read
        if end is None:
            # While steps follow each other, each takes from the end of the last one to its own. A longer
            # pause is the caller's.
            return step, interval if interval <= 2 * elapsed else elapsed
        last = self._last_step
        self._last_step = TimedStep(step, elapsed, end, None if last is None else last.end)
        if last is None or last.previous_end is None:
            return None
        seconds = last.end.seconds_after(last.previous_end)
        return None if seconds is None else (last.step, min(seconds, last.max_seconds))
