"""How many cores this process can have, beside what else runs on the machine, and so how many threads.

A thread that shares its core with another process is late at each barrier of a step, and all others wait.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, process_time
from typing import NamedTuple

log = logging.getLogger(__name__)

WINDOW_S = 1.0  # cores are looked at so often; two windows in a row must agree
CPU_TIMES = Path("/proc/stat")


class CoreTimes(NamedTuple):
    """Seconds on three clocks."""

    now: float
    cpu: float  # CPU time of this process, all threads together, and of its parent: the server's front end
    idle: float  # of the cores that this process may use, together

    def available(self, before: CoreTimes) -> float:
        """Cores since `before`: what the server used, and what nobody used. The front end works on what this
        process writes: it does not keep a core busy by itself."""
        return (self.cpu - before.cpu + self.idle - before.idle) / (self.now - before.now)


def core_times() -> CoreTimes | None:
    """None where the system does not tell: it is Linux's `/proc`."""
    try:
        # Behind the name in brackets: state, … and 11 fields later utime and stime.
        parent = sum(
            map(int, Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[11:13])
        )
        cores = {f"cpu{core}" for core in os.sched_getaffinity(0)}
        # user, nice, system, idle, iowait, …
        idle = sum(
            sum(map(int, fields[4:6]))
            for fields in map(str.split, CPU_TIMES.read_text().splitlines())
            if fields and fields[0] in cores
        )
    except (AttributeError, OSError):
        return None
    ticks = os.sysconf("SC_CLK_TCK")
    return CoreTimes(perf_counter(), process_time() + parent / ticks, idle / ticks)


class CoreShare:
    """Uses fewer threads while others use the cores, and all of them again afterwards. No text depends on the
    number of threads. `max_threads` 0: the number stays."""

    def __init__(
        self,
        max_threads: int = 0,
        set_threads: Callable[[int], None] = lambda threads: None,
        read: Callable[[], CoreTimes | None] = core_times,
    ) -> None:
        self.max_threads = self.num_threads = max_threads
        self._set_threads, self._read = set_threads, read
        self._last = None if max_threads <= 1 else read()
        self._target = max_threads  # by the last window

    def update(self) -> None:
        """Called between steps."""
        if (before := self._last) is None or perf_counter() < before.now + WINDOW_S:
            return
        self._last = times = self._read()
        if times is None:
            return
        target = max(1, min(self.max_threads, round(times.available(before))))
        if target == self._target != self.num_threads:
            log.info(
                "using %d of %d CPU threads: %s",
                target,
                self.max_threads,
                "other processes use the cores" if target < self.num_threads else "the cores are free again",
            )
            self.num_threads = target
            self._set_threads(target)
        self._target = target
