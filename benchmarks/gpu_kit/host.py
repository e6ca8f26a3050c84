"""The host's share of the engine's steps beside the device's, while requests end and others arrive.

`plan`, `launch`, `wait` and `book` are the parts of Engine.step: what is run, its launches, the wait for a step's results, and what comes
of them. Steps overlap, so that a step is bound by the host where there is hardly a wait. `decode` and `prompt` are the graphs' times.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import Any

import torch

from gpu_kit.models import Cell, DeviceConfig, engine_of, runner_of
from gpu_kit.steps import first_line, free, model_of, recorder_of
from gpu_kit.timing import Alarm
from mtpserve.core.request import Request
from mtpserve.core.sampling import SamplingParams
from mtpserve.engine.engine import Engine
from mtpserve.runtime.graphs.capture import Body
from mtpserve.runtime.graphs.graph_key import GraphOutput
from mtpserve.runtime.graphs.graphs import StepGraphs
from mtpserve.runtime.runner import Runner
from mtpserve.runtime.transfer import Download

MODELS = ("475m", "7b")
REQUESTS, TOY_REQUESTS = (1, 128), (1,)
PROMPT, TOKENS = 128, 128  # of each request, as in never_slower.py
STEPS, WARM_UPS = 60, 24
PARTS = ("plan", "launch", "wait", "book")


@dataclass(slots=True)
class StepTimes:
    """Of one step, in milliseconds."""

    total: float = 0.0
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    eager_passes: int = 0  # passes without a graph
    graphs: list[tuple[str, Any]] = field(default_factory=list)  # the kind, and what tells its milliseconds once the device is done


class TimedGraphs:
    """mtpserve.runtime.graphs.capture.GraphCapturer: what it gives out is timed by the device's events."""

    def __init__(self, device_config: DeviceConfig, alarm: Alarm, step: Callable[[], StepTimes]) -> None:
        self.inner, self.step, self.on_gpu = recorder_of(device_config.device, alarm), step, device_config.device.type == "cuda"
        self.kind = "decode"

    def capture(self, body: Body) -> tuple[GraphOutput, Callable[[], object]]:
        output, again = self.inner.capture(body)

        def wrapper() -> None:
            if not self.on_gpu:
                clock_start = time.perf_counter()
                again()
                clock_end = time.perf_counter()
                self.step().graphs.append((self.kind, lambda: (clock_end - clock_start) * 1e3))
                return
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            again()
            end.record()
            self.step().graphs.append((self.kind, lambda: start.elapsed_time(end)))

        return output, wrapper


class EngineClock:
    """An engine whose parts are timed."""

    def __init__(self, device_config: DeviceConfig, model: Any, cell: Cell, alarm: Alarm) -> None:
        self.times = StepTimes()
        self.recorder = TimedGraphs(device_config, alarm, lambda: self.times)
        self.engine: Engine = engine_of(model, cell, device_config.device, self.recorder, room=PROMPT + TOKENS + 64)
        runner, graphs = runner_of(self.engine)
        self.time(self.engine._scheduler, "plan", "plan")
        self.time(self.engine, "_commit", "book")
        self.time(runner, "launch", "launch")
        self.tell_prompts(graphs)
        self.count_launched(runner)

    def time(self, owner: Any, name: str, part: str) -> None:
        method = getattr(owner, name)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            clock_start = time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self.times.parts[part] += (time.perf_counter() - clock_start) * 1e3

        setattr(owner, name, wrapper)

    def tell_prompts(self, graphs: StepGraphs) -> None:
        """The recorder does not know whose graph it replays."""
        replay = graphs.replay

        def replay_of_kind(*args: Any, **kwargs: Any) -> Any:
            prompts = kwargs.get("prompts", args[9] if len(args) > 9 else None)
            decoding = prompts is None or len(args[0]) > len(prompts.lengths)
            self.recorder.kind = "decode" if prompts is None else "mixed" if decoding else "prompt"
            return replay(*args, **kwargs)

        graphs.replay = replay_of_kind  # type: ignore[method-assign]

    def count_launched(self, runner: Runner) -> None:
        run = runner.run

        def count_run(*args: Any, **kwargs: Any) -> Any:
            self.times.eager_passes += 1
            return run(*args, **kwargs)

        runner.run = count_run  # type: ignore[method-assign]

    def step(self) -> tuple[StepTimes, list[Any]]:
        self.times = times = StepTimes()
        wait = Download.wait

        def wrapper(download: Download) -> Any:
            clock_start = time.perf_counter()
            try:
                return wait(download)
            finally:
                times.parts["wait"] += (time.perf_counter() - clock_start) * 1e3

        Download.wait = wrapper  # type: ignore[assignment, method-assign]
        try:
            clock_start = time.perf_counter()
            events = self.engine.step()
            times.total = (time.perf_counter() - clock_start) * 1e3
        finally:
            Download.wait = wait  # type: ignore[method-assign]
        times.parts["book"] -= times.parts["wait"]  # it waits as it books
        return times, events


def medians(steps: list[StepTimes]) -> dict[str, float]:
    medians_ms = {"step": statistics.median(step.total for step in steps)}
    medians_ms |= {part: statistics.median(step.parts[part] for step in steps) for part in PARTS}
    kinds = defaultdict[str, list[float]](list)
    for step in steps:
        for kind, milliseconds in step.graphs:
            kinds[kind].append(float(milliseconds()))
    return medians_ms | {f"{kind}_graph": statistics.median(times) for kind, times in kinds.items()}


def load_record(device_config: DeviceConfig, model: Any, cell: Cell, alarm: Alarm) -> dict[str, Any]:
    """Requests of different lengths, so that they end one by one, each replaced as it ends."""
    clock, random, names = EngineClock(device_config, model, cell, alarm), Random(0), count()
    vocab, tokens = clock.engine.card.vocab, 3 if device_config.toy else TOKENS

    def add(length: int) -> None:
        prompt = [random.randrange(1, vocab) for _ in range(8 if device_config.toy else PROMPT)]
        params = SamplingParams(max_tokens=length, temperature=0.0, ignore_eos=True, seed=0)
        clock.engine.add(Request(f"{next(names)}", prompt, params))

    for i in range(cell.requests):
        add(max(2, tokens * (i + 1) // cell.requests))
    steps, graphs, arrivals = list[StepTimes](), clock.recorder, 0
    graph_cache = runner_of(clock.engine)[1].captured
    warm_ups, number = (0, 2) if device_config.toy else (WARM_UPS, STEPS)
    while len(steps) < number:
        before = len(graph_cache)
        times, events = clock.step()
        finish_events = [event for event in events if event.finish is not None]
        if errors := [event.error for event in events if event.error is not None]:
            raise RuntimeError(errors[0])
        for _ in finish_events:
            add(tokens)
        if warm_ups > 0 or len(graph_cache) > before:  # a step that captures another one says nothing
            warm_ups -= 1
            continue
        steps.append(times)
        arrivals += len(finish_events)
    if graphs.on_gpu:
        torch.cuda.synchronize()
    with_prompts = sum(any(kind != "decode" for kind, _ in step.graphs) for step in steps)
    return {
        "model": cell.model, "drafts": cell.drafts, "requests": cell.requests, "clock": "device" if graphs.on_gpu else "host",
        "steps": len(steps), "steps_with_prompts": with_prompts, "eager_passes": sum(step.eager_passes for step in steps),
        "arrivals": arrivals, "median_ms": medians(steps),
    }  # fmt: skip


def host(device_config: DeviceConfig, models: list[str], alarm: Alarm) -> Iterator[dict[str, Any]]:
    """A record for each depth and number of requests of those of MODELS, or else of the first model, or {"skipped": why}."""
    for name in [model for model in MODELS if model in models] or models[:1]:
        model = model_of(device_config, name, 2048)
        for requests in TOY_REQUESTS if device_config.toy else REQUESTS:
            for drafts in (0,) if device_config.toy else (0, 3):
                cell = Cell(name, drafts, requests, 0)
                try:
                    yield load_record(device_config, model, cell, alarm)
                except Exception as error:
                    yield {"skipped": f"host, {name} k={drafts} batch {requests}: {type(error).__name__}: {first_line(error)}"}
                free(device_config)
        del model
        free(device_config)
