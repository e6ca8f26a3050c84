"""What the waiting queue and the clock keep of one request."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class QueueState:
    key: tuple[int, int] = (0, 0)  # (priority, arrival number): the scheduler serves lower ones first
    num_overtaken: int = 0  # later requests that ran before it
    has_run: bool = False  # it has run, and may have been preempted since
    arrival_time: float = 0.0  # seconds of perf_counter
    adapter_slot: int = -1  # while it runs: that of its adapter; -1: it has none
    start_time: float | None = None  # when it first ran; None: not yet
