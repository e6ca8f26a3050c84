"""An engine's process that is alive and gets on with nothing: how that is seen, and what is written to the
log before it is ended.

Silence is counted while the front end itself gets on: a machine that slept, and a group of processes that was
stopped and goes on, have lost no time. It does not count while a debugger holds the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable
from pathlib import Path
from time import monotonic

log = logging.getLogger(__name__)

LOOKS = 8  # within the time after which a process counts as hung; at least one each second
DUMP_S = 1.5  # for all of its processes to write their stacks


async def silence(count: Callable[[], int], process: int, limit: float) -> None:
    """Returns when `count` has not changed for `limit` seconds."""
    pause = min(1.0, limit / LOOKS)
    last_count, silent, at = -1, 0.0, monotonic()
    while silent < limit:
        await asyncio.sleep(pause)
        passed, at = min(monotonic() - at, 2 * pause), monotonic()
        if (now := count()) != last_count or is_traced(process):
            last_count, silent = now, 0.0
        else:
            silent += passed


async def dump_stacks(process: int) -> None:
    """Into the log: of the process, and of those that it has started, such as ranks. One that was stopped is
    continued, so that it can."""
    family = [process, *children(process)]
    for pid in family:
        log.error("stack traces of process %d (state: %s):", pid, status(pid, "State") or "there")
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGUSR1)  # see engine/process/process.begin
            os.kill(pid, signal.SIGCONT)
        await asyncio.sleep(DUMP_S / len(family))


def children(process: int) -> list[int]:
    """Returns the ids of a process's children; none if the system does not tell."""
    try:
        threads = list(Path(f"/proc/{process}/task").iterdir())
        return [int(pid) for thread in threads for pid in (thread / "children").read_text().split()]
    except OSError:
        return []


def is_traced(process: int) -> bool:
    return status(process, "TracerPid") not in ("", "0")


def status(process: int, name: str) -> str:
    """A line of what Linux knows of a process; "": it does not tell."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(f"{name}:")), "")
