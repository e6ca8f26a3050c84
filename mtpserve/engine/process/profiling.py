"""Traces of the steps that a process computes, by torch's profiler, as files that Perfetto and
chrome://tracing open. One at a time.

Each process has one; that of the engine's process tells those of the other ranks when to begin and to end.
torch is imported when a trace begins.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mtpserve.core.profile import ProfileChange, ProfileReport
from mtpserve.engine.parallel.rank_messages import ProfileRank

if TYPE_CHECKING:
    from torch.profiler import profile

    from mtpserve.engine.parallel.ranks import RankProcesses

log = logging.getLogger(__name__)


class Profiling:
    """`others`: of the ranks that compute the same model. `announce` is called before a trace is written,
    which may take minutes."""

    def __init__(
        self,
        engine: int,
        rank: int = 0,
        others: RankProcesses | None = None,
        announce: Callable[[], None] = lambda: None,
    ) -> None:
        self._announce = announce
        self._which = f"engine{engine}-rank{rank}"
        self._theirs = [f"engine{engine}-rank{other}" for other in range(1, others.size if others else 1)]
        self._others = others
        self._running: tuple[profile, ProfileChange] | None = None
        self._steps_left = 0  # steps until it ends by itself
        self._ended = ProfileReport()  # the report of a trace that has ended by itself, until somebody asks

    def take(self, change: ProfileChange) -> ProfileReport:
        """Never raises: a trace that cannot be taken or written harms no request."""
        try:
            return self._begin(change) if change.folder else self._end()
        except Exception as error:
            self._running = None
            log.warning("profiling failed: %s", error)
            return ProfileReport(failed=f"{type(error).__name__}: {error}")

    def step(self) -> AbstractContextManager[None]:
        """Around a step."""
        return nullcontext() if self._running is None else self._step()

    @contextmanager
    def _step(self) -> Iterator[None]:
        from torch.profiler import record_function

        with record_function("step"):
            yield
        self._steps_left -= 1
        if self._steps_left == 0:
            self._ended = self.take(ProfileChange())

    def _begin(self, change: ProfileChange) -> ProfileReport:
        if self._running is not None:
            return ProfileReport(refused="a profile is being taken already")
        from torch import cuda, profiler

        Path(change.folder).mkdir(parents=True, exist_ok=True)
        file_of(change, self._which).touch(exist_ok=False)  # what cannot be written is said now
        activities = {
            profiler.ProfilerActivity.CPU: change.cpu,
            profiler.ProfilerActivity.CUDA: change.gpu and cuda.is_available(),
        }
        profile = profiler.profile(
            activities=[activity for activity, is_wanted in activities.items() if is_wanted],
            profile_memory=change.memory,
            with_stack=change.stacks,
            record_shapes=change.shapes,
        )
        if self._others is not None:
            self._others.tell(ProfileRank(replace(change, steps=0)))  # they end when this one does
        profile.start()
        self._running, self._steps_left, self._ended = (profile, change), change.steps, ProfileReport()
        log.info("profiling the next %d steps", change.steps)
        return ProfileReport()

    def _end(self) -> ProfileReport:
        if self._running is None:
            ended, self._ended = self._ended, ProfileReport()
            return ended if ended != ProfileReport() else ProfileReport(refused="no profile is being taken")
        (profile, change), self._running = self._running, None
        if self._others is not None:
            self._others.tell(ProfileRank(ProfileChange()))
        file = file_of(change, self._which)
        self._announce()
        profile.stop()
        profile.export_chrome_trace(str(file))
        log.info("the profile was written to %s", file)
        return ProfileReport(files=[str(file), *(str(file_of(change, which)) for which in self._theirs)])


def file_of(change: ProfileChange, which: str) -> Path:
    return Path(change.folder) / f"{change.name}-{which}.trace.json.gz"


def profiling_of(engine: object, number: int, announce: Callable[[], None]) -> Profiling:
    """Returns the profiling of an engine's process. Its runner may be inside of others, one of which has all
    ranks do what it does."""
    inner, others = engine, None
    while others is None and (inner := getattr(inner, "runner", None)) is not None:
        others = getattr(inner, "others", None)
    return Profiling(number, others=others, announce=announce)
