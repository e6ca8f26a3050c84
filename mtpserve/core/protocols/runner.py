"""The device side of the engine, as the engine sees it."""

from __future__ import annotations

from typing import Protocol

from mtpserve.core.plan import StepPlan, StepResult
from mtpserve.core.spec_sizes import SpecShape, SpecSizes


class StepEnd(Protocol):
    """A moment on a device."""

    def seconds_after(self, before: StepEnd) -> float | None:
        """None: one of them may still be to come."""
        ...


class Launched(Protocol):
    """A step on its way."""

    @property
    def ended(self) -> StepEnd | None:
        """Its end as the device has it, which is certainly over when a later step has been read. None: it
        ends when it can be read."""
        ...

    def result(self) -> StepResult:
        """Waits for it. Raises what went wrong in it."""
        ...


class ModelRunner(Protocol):
    """The device side of the engine. Tests of the scheduler bring a fake one without tensors."""

    @property
    def sizes(self) -> SpecSizes: ...

    @property
    def processors(self) -> bool:
        """The operator's own processors run between steps: each step of a request must have been read before
        its next is launched."""
        ...

    def reshape(self, shape: SpecShape) -> None:
        """While nothing runs: `sizes` are this shape's from now on. Raises ConfigError for more than it was
        built with."""
        ...

    def launch(self, plan: StepPlan) -> Launched:
        """Start one step, after those that were started before. A request that cannot be seated has an error
        in its span's result, and in those of all its later spans; any other fault is raised here, or by
        `result`."""
        ...

    def check(self) -> None:
        """While nothing runs. Raises EngineDead where a process that computes a part of the model has
        ended."""
        ...

    def close(self) -> None:
        """Nothing is called any more."""
        ...
