"""Arms by waves: a wave's engines start together, since starting takes longest, and are measured one after the other.

All engines of a wave are on the device at once, and idle but the one that is measured. An arm that fails, or is late, is ended; the others
go on.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peers.gpu_engines.record import Arm, Row, Skipped, Start

WORKER = Path(__file__).parent / "worker.py"
LEAST_SECONDS = 60  # a wave with less time is not started
SAID = 300  # characters of an engine's last words
Said = tuple["Worker", dict[str, Any] | None]  # None: its events have ended


@dataclass(frozen=True, slots=True)
class Found:
    """What came of the arms so far. `changed` is called after each row."""

    changed: Callable[[], None]
    rows: list[Row] = field(default_factory=list)
    starts: list[Start] = field(default_factory=list)
    skipped: list[Skipped] = field(default_factory=list)

    def skip(self, arm: Arm, why: str) -> None:
        self.skipped.append(Skipped(arm.engine, arm.model, arm.drafts, f"{arm.name} {why}"))
        print(f"not measured: {arm.name} {why}", flush=True)
        self.changed()


def described(row: Row) -> str:
    name = Arm(row.engine, row.model, row.drafts).name
    whole = f"{row.tokens_per_s:.1f} tok/s ({row.least_tokens_per_s:.1f} … {row.most_tokens_per_s:.1f})"
    steady = f"{row.step_ms:.3f} ms a step, {row.accept_length:.2f} tokens a step, {row.steady_tokens_per_s:.1f} tok/s"
    return f"{name}, batch {row.batch}: whole {whole}; steady {steady}"


class Worker:
    """A started arm. What it says comes into `said`; its output goes to a file in `logs`."""

    def __init__(self, arm: Arm, command: Sequence[str], logs: Path, said: queue.Queue[Said]) -> None:
        self.arm, self.log = arm, logs / f"{arm.name.replace(':', '_')}.log"
        read_end, write_end = os.pipe()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "--events", str(write_end)],
                stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, pass_fds=(write_end,), start_new_session=True,
            )  # fmt: skip
        os.close(write_end)
        threading.Thread(target=self.read, args=(read_end, said), daemon=True).start()

    def read(self, read_end: int, said: queue.Queue[Said]) -> None:
        with os.fdopen(read_end, encoding="utf-8") as events:
            for line in events:
                said.put((self, json.loads(line)))
        said.put((self, None))

    def measure(self) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(b"go\n")
            self.process.stdin.flush()

    def end(self) -> None:
        """With all processes of its group: an engine may have some of its own."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def last_words(self) -> str:
        """The last line that names an error, or the last one."""
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if re.search(r"(Error|Exception|error):? ", line)]
        return next(reversed(errors or lines), "it said nothing")[:SAID]


@dataclass(frozen=True, slots=True)
class Waves:
    """`command`: how an arm's worker is started. `deadline`: of time.monotonic."""

    command: Callable[[Arm], Sequence[str]]
    logs: Path
    deadline: float
    least_seconds: float = LEAST_SECONDS

    def run(self, arms: Sequence[Arm], found: Found) -> None:
        left = self.deadline - time.monotonic()
        if left < self.least_seconds:
            for arm in arms:
                found.skip(arm, f"was not started: {max(left, 0):.0f} s were left")
            return
        said: queue.Queue[Said] = queue.Queue()
        workers: list[Worker] = []
        try:
            workers += (Worker(arm, self.command(arm), self.logs, said) for arm in arms)
            self.measure(workers, said, found)
        finally:
            for worker in workers:
                worker.end()

    def measure(self, workers: list[Worker], said: queue.Queue[Said], found: Found) -> None:
        starting, ready, measured = list(workers), list[Worker](), list[Worker]()  # the last one has one at most
        while starting or ready or measured:
            if not starting and not measured:
                measured.append(ready.pop(0))
                measured[0].measure()
            try:
                worker, event = said.get(timeout=max(0.1, self.deadline - time.monotonic()))
            except queue.Empty:
                for late in (*measured, *ready, *starting):
                    found.skip(late.arm, "was not done when the time was over")
                return
            if event is None or "done" in event:
                if worker in (*starting, *ready, *measured) and event is None:
                    found.skip(worker.arm, f"ended by itself: {worker.last_words()}")
                for state in (starting, ready, measured):
                    if worker in state:
                        state.remove(worker)
                worker.end()
            elif "ready" in event:
                starting.remove(worker)
                ready.append(worker)
                found.starts.append(Start(**event["ready"]))
                print(f"{worker.arm.name} is ready after {found.starts[-1].seconds:.1f} s: {found.starts[-1].settings}", flush=True)
            else:
                found.rows.append(Row(**event["row"]))
                print(described(found.rows[-1]), flush=True)
                found.changed()


def plan(arms: Sequence[Arm], memory_of: Callable[[Arm], float], room: float) -> list[list[Arm]]:
    """Waves in the arms' order, each as large as fits into `room` bytes. An arm that does not fit has a wave of its own."""
    waves: list[list[Arm]] = []
    used = 0.0
    for arm in arms:
        used += memory_of(arm)
        if not waves or used > room:
            waves.append([])
            used = memory_of(arm)
        waves[-1].append(arm)
    return waves
