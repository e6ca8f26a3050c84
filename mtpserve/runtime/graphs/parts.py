"""The time of a step's parts, by the marks that runtime/step sets. A captured step has none: it is a single
launch."""

from __future__ import annotations

from collections import defaultdict
from time import perf_counter
from typing import Any

import torch


class PartClock:
    """Step.mark. On a GPU the times are the stream's own, idle times included; otherwise the host's, which
    computes."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.last = device, perf_counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.events: list[tuple[str, Any]] = []

    def __call__(self, stage: str) -> None:
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.events.append((stage, event))
            return
        now = perf_counter()
        self.seconds[stage] += now - self.last
        self.last = now

    def reset(self) -> None:
        self.seconds.clear()
        self.events.clear()
        self("start")

    def read(self) -> dict[str, float]:
        """Seconds of each part since the last reset."""
        if self.events:
            self.events[-1][1].synchronize()
        for (_, before), (stage, event) in zip(self.events, self.events[1:], strict=False):
            self.seconds[stage] += before.elapsed_time(event) / 1000
        return {stage: seconds for stage, seconds in self.seconds.items() if stage != "start"}
