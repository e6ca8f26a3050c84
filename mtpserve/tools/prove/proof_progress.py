"""The progress of a proof on standard error: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from mtpserve.core.errors import quantity

if TYPE_CHECKING:
    from mtpserve.tools.prove.proof import ProofStage

PERIOD_S = 10.0  # between two lines


class ProofProgress:
    """Is told of each stage as it goes. `quiet`: shows nothing."""

    def __init__(
        self, quiet: bool = False, console: Console | None = None, clock: Callable[[], float] = perf_counter
    ) -> None:
        self.console = console or Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
        self.quiet, self.clock = quiet, clock
        columns = (
            TextColumn("[{task.fields[stage]}] {task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}"),
        )
        self.bar = Progress(*columns, console=self.console, transient=True)
        self.task = self.bar.add_task("", total=1, stage="", left="")
        self.spent = 0.0  # seconds of computing
        self.since: float | None = None  # when the last report was; None: the model was loading then
        self.last_print = clock()  # when the last line was

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.console.is_terminal:
            self.bar.stop()

    def __call__(self, stage: ProofStage) -> None:
        now = self.clock()
        if self.since is not None:
            self.spent += now - self.since
        self.since = None if stage.done is None or stage.done == stage.of else now
        if self.quiet:
            return
        if self.console.is_terminal:
            self.draw(stage)
        elif stage.done in (None, stage.of) or now - self.last_print >= PERIOD_S:
            self.last_print = now
            self.console.print(f"prove: {self.line(stage)}")

    def draw(self, stage: ProofStage) -> None:
        """While the model loads, the loader's own bar is there."""
        if stage.done is None:
            self.bar.stop()
            return
        self.bar.start()
        number = f"{stage.number}/{stage.stages}"
        self.bar.update(
            self.task,
            description=stage.name,
            completed=stage.done,
            total=stage.of,
            stage=number,
            left=self.time_left(stage),
        )

    def line(self, stage: ProofStage) -> str:
        begun = f"stage {stage.number} of {stage.stages}, {stage.name}"
        if stage.done is None:
            return f"{begun}: the model is loading"
        time_left = self.time_left(stage)
        return f"{begun}: {stage.done} of {quantity(stage.of, 'request')}{', ' * bool(time_left)}{time_left}"

    def time_left(self, stage: ProofStage) -> str:
        """Estimates the time that all known stages still take. All requests count alike, and loading is left
        out."""
        done = stage.before + (stage.done or 0)
        rest = stage.of - (stage.done or 0) + stage.later
        if not done or not rest:
            return ""
        seconds = self.spent / done * rest
        return f"about {seconds / 60:.0f} min left" if seconds >= 90 else f"about {seconds:.0f} s left"
