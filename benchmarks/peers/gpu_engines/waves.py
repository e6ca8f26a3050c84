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

from peers.gpu_engines.record import Arm, Row, SkippedArm, Start

WORKER = Path(__file__).parent / "worker.py"
MIN_SECONDS = 60  # a wave with less time is not started
MAX_REASON = 300  # characters of an engine's last words
Event = dict[str, Any] | None  # of worker.py; None: there will be no more


@dataclass(frozen=True, slots=True)
class Measurements:
    """What came of the arms so far. `save` is called after each row and each reason."""

    save: Callable[[], None]
    rows: list[Row] = field(default_factory=list)
    starts: list[Start] = field(default_factory=list)
    skipped: list[SkippedArm] = field(default_factory=list)

    def add_row(self, row: Row) -> None:
        self.rows.append(row)
        print(described(row), flush=True)
        self.save()

    def add_start(self, start: Start) -> None:
        self.starts.append(start)
        name = Arm(start.engine, start.model, start.drafts).name
        print(f"{name} is ready after {start.seconds:.1f} s: {start.settings}", flush=True)

    def skip(self, arm: Arm, reason: str) -> None:
        self.skipped.append(SkippedArm(arm.engine, arm.model, arm.drafts, f"{arm.name} {reason}"))
        print(f"not measured: {arm.name} {reason}", flush=True)
        self.save()


def described(row: Row) -> str:
    name = Arm(row.engine, row.model, row.drafts).name
    throughput = f"{row.tokens_per_s:.1f} tok/s ({row.least_tokens_per_s:.1f} … {row.most_tokens_per_s:.1f})"
    steady = f"{row.step_ms:.3f} ms a step, {row.accept_length:.2f} tokens a step, {row.steady_tokens_per_s:.1f} tok/s"
    return f"{name}, batch {row.batch}: throughput {throughput}; steady {steady}"


class Worker:
    """The process of an arm. Its events go to `events`, its output to a file in `logs`."""

    def __init__(self, arm: Arm, command: Sequence[str], logs: Path, events: queue.Queue[tuple[Worker, Event]]) -> None:
        self.arm, self.log = arm, logs / f"{arm.name.replace(':', '_')}.log"
        read_end, write_end = os.pipe()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "--events", str(write_end)],
                stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, pass_fds=(write_end,), start_new_session=True,
            )  # fmt: skip
        os.close(write_end)
        threading.Thread(target=self.read, args=(read_end, events), daemon=True).start()

    def read(self, read_end: int, events: queue.Queue[tuple[Worker, Event]]) -> None:
        with os.fdopen(read_end, encoding="utf-8") as lines:
            for line in lines:
                events.put((self, json.loads(line)))
        events.put((self, None))

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
        return next(reversed(errors or lines), "it said nothing")[:MAX_REASON]


class Wave:
    """Its workers are starting, then ready, then one of them is measured; those that have ended are in none of these."""

    def __init__(self, workers: list[Worker], events: queue.Queue[tuple[Worker, Event]], measurements: Measurements) -> None:
        self.starting_workers, self.ready_workers, self.active_workers = list(workers), list[Worker](), list[Worker]()
        self.events, self.measurements = events, measurements

    @property
    def live_workers(self) -> list[Worker]:
        return [*self.active_workers, *self.ready_workers, *self.starting_workers]

    def measure(self, deadline: float) -> None:
        """`deadline`: of time.monotonic."""
        while self.live_workers:
            if not self.starting_workers and not self.active_workers:
                self.active_workers.append(self.ready_workers.pop(0))
                self.active_workers[0].measure()
            try:
                worker, event = self.events.get(timeout=max(0.1, deadline - time.monotonic()))
            except queue.Empty:
                for worker in self.live_workers:
                    self.measurements.skip(worker.arm, "was not done when the time was over")
                return
            self.take(worker, event)

    def take(self, worker: Worker, event: Event) -> None:
        if event is None or "done" in event:
            if event is None and worker in self.live_workers:
                self.measurements.skip(worker.arm, f"ended by itself: {worker.last_words()}")
            for workers in (self.starting_workers, self.ready_workers, self.active_workers):
                if worker in workers:
                    workers.remove(worker)
            worker.end()
        elif "ready" in event:
            self.starting_workers.remove(worker)
            self.ready_workers.append(worker)
            self.measurements.add_start(Start(**event["ready"]))
        else:
            self.measurements.add_row(Row(**event["row"]))


@dataclass(frozen=True, slots=True)
class Waves:
    """`command`: of an arm's worker. `deadline`: of time.monotonic."""

    command: Callable[[Arm], Sequence[str]]
    logs: Path
    deadline: float
    min_seconds: float = MIN_SECONDS

    def run(self, arms: Sequence[Arm], measurements: Measurements) -> None:
        seconds = self.deadline - time.monotonic()
        if seconds < self.min_seconds:
            for arm in arms:
                measurements.skip(arm, f"was not started: {max(seconds, 0):.0f} s were left")
            return
        events: queue.Queue[tuple[Worker, Event]] = queue.Queue()
        workers: list[Worker] = []
        try:
            workers += (Worker(arm, self.command(arm), self.logs, events) for arm in arms)
            Wave(workers, events, measurements).measure(self.deadline)
        finally:
            for worker in workers:
                worker.end()


def plan(arms: Sequence[Arm], memory_of: Callable[[Arm], float], room: float) -> list[list[Arm]]:
    """Waves in the arms' order, each as large as fits into `room` bytes. An arm that does not fit has a wave of its own."""
    waves: list[list[Arm]] = []
    wave_bytes = 0.0
    for arm in arms:
        wave_bytes += memory_of(arm)
        if not waves or wave_bytes > room:
            waves.append([])
            wave_bytes = memory_of(arm)
        waves[-1].append(arm)
    return waves
