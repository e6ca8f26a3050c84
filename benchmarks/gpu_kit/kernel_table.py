"""The kernels of a captured step as a profiler saw them, each with the launch that it belongs to.

Kernels and launches have the same order. Triton kernels have the launches' names: these are the anchors. Between two anchors the
products of the library belong to the products among the launches, in their order, and a kernel that adds up a product's parts to the
product before it.
"""

from __future__ import annotations

import json
import os
import re
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import dropwhile, pairwise
from pathlib import Path
from typing import Any

import torch

from gpu_kit.launches import PRODUCT, TORCH, TRITON, Launch

LIBRARY = re.compile(r"gemm|gemv|nvjet|cutlass|cublas|xmma|splitk|dot_kernel", re.IGNORECASE)
ADDS_PARTS = re.compile(r"splitk.*reduce|reduce.*splitk|splitkreduce", re.IGNORECASE)
COPY = "DtoD"  # in the name of a copy from the device to itself
NAME = 72  # characters


@dataclass(frozen=True, slots=True)
class Event:
    """A kernel that has run; times in microseconds."""

    name: str
    start: float
    end: float
    grid: tuple[int, ...] = ()
    registers: int | None = None  # of a thread
    shared_bytes: int | None = None  # of a block

    @property
    def us(self) -> float:
        return self.end - self.start


def profile_events(run: Callable[[], object], times: int) -> list[Event]:
    """Kernels, copies and fills of `run` on the GPU, in their order, called so many times."""
    from torch.profiler import ProfilerActivity, profile

    # Some versions of CUPTI, taken down and set up again beside captured graphs, crash, and setting it up takes time.
    os.environ.setdefault("TEARDOWN_CUPTI", "0")
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(times):
            run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        return events_of(json.loads(file.read_text(errors="replace")))


def replays_of(events: list[Event], times: int) -> list[list[Event]]:
    """The events of each replay, without the copies that restored the seats before it. Raises RuntimeError where they do not divide."""
    number, remainder = divmod(len(events), times)
    if remainder or not number:
        raise RuntimeError(f"the profiler saw {len(events)} kernels in {times} replays of one graph")
    replays = [events[i * number : (i + 1) * number] for i in range(times)]
    replays = [list(dropwhile(lambda event: COPY in event.name, replay)) for replay in replays]
    if any([event.name for event in replay] != [event.name for event in replays[0]] for replay in replays[1:]):
        raise RuntimeError(f"the profiler saw different kernels in {times} replays of one graph")
    return replays


def events_of(trace: dict[str, Any]) -> list[Event]:
    """Of a trace in Chrome's format."""
    events = []
    for entry in trace["traceEvents"]:
        if entry.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset") and "dur" in entry:
            facts = entry.get("args", {})
            grid, registers, shared = (facts.get(key) for key in ("grid", "registers per thread", "shared memory"))
            times = entry["ts"], entry["ts"] + entry["dur"]
            events.append(Event(entry["name"], *times, tuple(grid or ()), registers, shared))
    return sorted(events, key=lambda event: event.start)


def triton_name(event: Event, names: frozenset[str]) -> str | None:
    """None: it is a library's."""
    return next((name for name in names if event.name == name or event.name.startswith(f"{name}_")), None)


def align_launches(events: list[Event], launches: list[Launch]) -> list[Launch | None]:
    """The launch of each event."""
    names = frozenset(launch.name for launch in launches if launch.kind == TRITON)
    anchors = [(index, name) for index, event in enumerate(events) if (name := triton_name(event, names)) is not None]
    triton_indices = [index for index, launch in enumerate(launches) if launch.kind == TRITON]
    matches: list[Launch | None] = [None] * len(events)
    matcher = SequenceMatcher(None, [name for _, name in anchors], [launches[index].name for index in triton_indices], autojunk=False)
    pairs = [(-1, -1)]
    for first, second, size in matcher.get_matching_blocks():
        pairs += [(anchors[first + i][0], triton_indices[second + i]) for i in range(size)]
    pairs.append((len(events), len(launches)))
    for (event, launch), (event_end, launch_end) in pairwise(pairs):
        if event >= 0:
            matches[event] = launches[launch]
        match_between(events, launches, range(event + 1, event_end), range(launch + 1, launch_end), matches)
    return matches


def match_between(events: list[Event], launches: list[Launch], indices: range, launch_indices: range, matches: list[Launch | None]) -> None:
    """Of the events at `indices` and the launches at `launch_indices`, among which none is a Triton kernel."""
    products = iter([launches[i] for i in launch_indices if launches[i].kind == PRODUCT])
    torch_launches = [launches[i] for i in launch_indices if launches[i].kind == TORCH]
    plain, last = [], None
    for index in indices:
        if ADDS_PARTS.search(events[index].name):
            matches[index] = last
        elif LIBRARY.search(events[index].name) or events[index].name in ("mm", "addmm", "bmm", "baddbmm"):
            matches[index] = last = next(products, None)
        else:
            plain.append(index)
    if len(plain) == len(torch_launches):
        for index, launch in zip(plain, torch_launches, strict=True):
            matches[index] = launch


def kind_of(event: Event, launch: Launch | None) -> str:
    if launch is not None:
        return launch.kind
    return PRODUCT if LIBRARY.search(event.name) else TORCH


def label_of(event: Event, launch: Launch | None) -> str:
    """What tells kernels of one name apart."""
    if launch is not None and launch.kind == PRODUCT:
        batch, outputs, inputs, rows = launch.product
        return f"{f'{batch} x ' if batch > 1 else ''}{rows} x {outputs} x {inputs}"
    return "x".join(map(str, event.grid))


def gaps_of(events: list[Event]) -> list[float | None]:
    """Microseconds in which nothing ran before each event; None before the first one."""
    gaps: list[float | None] = []
    last: float | None = None
    for event in events:
        gaps.append(None if last is None else max(0.0, event.start - last))
        last = event.end if last is None else max(last, event.end)
    return gaps


def table(replays: list[list[Event]], launches: list[Launch], read_gb_s: float | None) -> list[dict[str, Any]]:
    """A row for each kernel and shape, the one that takes longest first. `replays`: the events of each."""
    indices = align_launches(replays[0], launches)
    durations, gaps = defaultdict[int, list[float]](list), defaultdict[int, list[float]](list)
    for events in replays:
        for index, (event, gap) in enumerate(zip(events, gaps_of(events), strict=True)):
            durations[index].append(event.us)
            gaps[index] += [] if gap is None else [gap]
    groups = defaultdict[tuple[str, str, str], list[int]](list)
    for index, (event, launch) in enumerate(zip(replays[0], indices, strict=True)):
        adds = launch is not None and launch.kind == PRODUCT and ADDS_PARTS.search(event.name) is not None
        groups[event.name[:NAME], kind_of(event, launch), "" if adds else label_of(event, launch)].append(index)
    rows = []
    for (name, kind, label), members in groups.items():
        times: list[float] = [statistics.median(durations[index]) for index in members]
        before = [value for index in members for value in gaps[index]]
        group_launches = [launch for index in members if (launch := indices[index]) is not None]
        num_bytes, event = sum(launch.num_bytes for launch in group_launches), replays[0][members[0]]
        complete = kind == TRITON or (len(group_launches) == len(members) and label != "")
        total = float(sum(times))
        speed = num_bytes / total / 1e3 if complete and total > 0 else None
        rows.append({
            "name": name, "class": kind, "shape": label, "calls": len(members), "us_sum": total, "us_median": statistics.median(times),
            "us_max": max(times), "gap_before_us": statistics.median(before) if before else None, "grid": list(event.grid),
            "registers": event.registers, "shared_bytes": event.shared_bytes, "bytes": num_bytes if complete else None, "gb_s": speed,
            "read_share": None if speed is None or read_gb_s is None else speed / read_gb_s,
        })  # fmt: skip
    return sorted(rows, key=lambda row: -row["us_sum"])
