"""Captured steps of whole models: how long the device takes for each, and its kernels."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from common.shapes import StepBytes

from gpu_kit.environment import clocks
from gpu_kit.kernel_table import Event, gaps_of, profile_events, replays_of, table
from gpu_kit.launches import Launch, LaunchRecorder, recording
from gpu_kit.models import Cell, DeviceConfig, engine_of, key_of, random_model, replay, seat, state_of, traffic_of
from gpu_kit.predict import Ceilings, prediction_of
from gpu_kit.timing import Alarm, event_us, host_us
from mtpserve.layers.decoder import DecoderModel
from mtpserve.runtime.graphs.capture import Body, CudaGraphCapturer, GraphCapturer
from mtpserve.runtime.graphs.graph_key import GraphOutput

WARM_UPS, REPLAYS, PROFILED = 5, 30, 3
PROFILES = 2  # attempts


class StepRecorder:
    """runtime.graphs.capture.GraphCapturer: before a body is captured it runs twice, once to compile its kernels and once to write down its
    launches."""

    def __init__(self, device: torch.device, alarm: Alarm) -> None:
        self.inner, self.alarm = inner_recorder(device), alarm
        self.launches: LaunchRecorder | None = None
        self.body: Body | None = None

    def capture(self, body: Body) -> tuple[GraphOutput, Callable[[], object]]:
        self.body = body
        body()
        self.write_down(body)
        with self.alarm.critical_section():
            return self.inner.capture(body)

    def write_down(self, body: Body) -> None:
        if self.launches is not None:
            with recording(self.launches, execute=True):
                body()


class EagerRecorder(StepRecorder):
    """On a CPU, where nothing is compiled and calls take long: the first run is the recording's own."""

    def capture(self, body: Body) -> tuple[GraphOutput, Callable[[], object]]:
        self.body = body
        step_graph = self.inner.capture(body)
        self.write_down(body)
        return step_graph


def recorder_of(device: torch.device, alarm: Alarm) -> StepRecorder:
    return StepRecorder(device, alarm) if device.type == "cuda" else EagerRecorder(device, alarm)


def inner_recorder(device: torch.device) -> GraphCapturer:
    if device.type == "cuda":
        return CudaGraphCapturer()
    from tests.runtime.recorders import Again  # calls the body again

    return Again()


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def model_of(device_config: DeviceConfig, name: str, positions: int) -> DecoderModel:
    return random_model(device_config.model_config(name), device_config.dtype, positions, device_config.device)


def events_of_replays(
    device_config: DeviceConfig, restored_replay: Callable[[], object], recorder: LaunchRecorder, alarm: Alarm
) -> list[list[Event]]:
    """The kernels of each replay. On a CPU there is one, which the recorder has timed."""
    if device_config.device.type != "cuda":
        pairs = zip(recorder.launches, recorder.times, strict=True)
        return [[Event(launch.name, *times, launch.grid) for launch, times in pairs]]
    for attempt in range(PROFILES):
        with alarm.critical_section():
            events = profile_events(restored_replay, PROFILED)
        try:
            return replays_of(events, PROFILED)
        except RuntimeError:  # a profiler that has just started may miss a kernel
            if attempt == PROFILES - 1:
                raise
    return []


def of_kernels(replays: list[list[Event]], launches: list[Launch], read_gb_s: float | None) -> dict[str, Any]:
    """What a profiler's view adds to a cell; nothing where it saw nothing."""
    if not replays:
        return {"kernel_launches": 0, "busy_ms": None, "gap_ms": None, "gap_us_median": None, "kernels": []}
    between = [gap for events in replays for gap in gaps_of(events) if gap is not None]
    return {
        "kernel_launches": len(replays[0]),
        "busy_ms": statistics.median(sum(event.us for event in events) for events in replays) / 1e3,
        "gap_ms": sum(between) / len(replays) / 1e3,
        "gap_us_median": statistics.median(between) if between else None,
        "kernels": table(replays, launches, read_gb_s),
    }


@torch.inference_mode()
def cell_records(
    device_config: DeviceConfig, model: DecoderModel, cell: Cell, ceilings: Ceilings, alarm: Alarm
) -> Iterator[dict[str, Any]]:
    """The record of one cell, and a sentence where its kernels could not be seen. Raises what the engine raises where it does not fit."""
    read_gb_s = ceilings.measured_read_gb_s
    recorder, on_gpu = recorder_of(device_config.device, alarm), device_config.device.type == "cuda"
    engine = engine_of(model, cell, device_config.device, recorder)
    seat(engine, cell)
    key = key_of(engine, cell)
    rows = key.rows or key.requests * key.width
    recorder.launches = LaunchRecorder(traffic_of(engine, model, cell, rows))
    restore = state_of(engine)
    clock_start = time.perf_counter()
    step_graph = replay(engine, cell)
    synchronise(device_config.device)
    capture_s = time.perf_counter() - clock_start
    clock, times, hosts = event_us if on_gpu else host_us, list[float](), list[float]()
    for _ in range(WARM_UPS + REPLAYS if on_gpu else 1):
        restore()
        synchronise(device_config.device)
        times.append(clock(lambda: hosts.append(host_us(step_graph.replay))))
    # Right after the replays, before the device rests. The tool takes a tenth of a second: of plain steps alone.
    speed = clocks() if on_gpu and not cell.drafts else None

    def restored_replay() -> None:
        restore()
        step_graph.replay()

    replays = list[list[Event]]()
    try:
        replays = events_of_replays(device_config, restored_replay, recorder.launches, alarm)
    except Exception as error:
        yield {"skipped": f"kernels of {cell}: {type(error).__name__}: {first_line(error)}"}
    times, launches = times[WARM_UPS:] or times, recorder.launches.launches
    context = recorder.launches.traffic.context
    least = None if cell.prompt else StepBytes(device_config.model_config(cell.model)).step(cell.requests, context, cell.drafts)
    yield {
        "model": cell.model, "drafts": cell.drafts, "requests": cell.requests, "context": context, "prompt": cell.prompt,
        "clock": "device" if on_gpu else "host", "rows": rows, "launches": len(launches), "device_ms": statistics.median(times) / 1e3,
        "device_ms_least": min(times) / 1e3, "host_replay_ms": statistics.median(hosts) / 1e3, "capture_s": capture_s,
        "bytes": sum(launch.num_bytes for launch in launches), "least_bytes": least,
        "floor_ms": None if least is None or read_gb_s is None else least / read_gb_s / 1e6, "clocks": speed,
        "prediction": prediction_of(launches, context, ceilings).record, **of_kernels(replays, launches, read_gb_s),
    }  # fmt: skip


def free(device_config: DeviceConfig) -> None:
    gc.collect()
    if device_config.device.type == "cuda":
        torch.cuda.empty_cache()


def steps(device_config: DeviceConfig, cells: list[Cell], ceilings: Ceilings, alarm: Alarm) -> Iterator[dict[str, Any]]:
    """A record for each cell, with its prediction, or {"skipped": why}. A model is built once for all of its cells."""
    for name in dict.fromkeys(cell.model for cell in cells):
        model_cells = [cell for cell in cells if cell.model == name]
        try:
            model = model_of(device_config, name, max(cell.context for cell in model_cells) + 1024)
        except Exception as error:
            yield {"skipped": f"{name}: {type(error).__name__}: {first_line(error)}"}
            free(device_config)
            continue
        for cell in model_cells:
            try:
                yield from cell_records(device_config, model, cell, ceilings, alarm)
            except Exception as error:
                yield {"skipped": f"{cell}: {type(error).__name__}: {first_line(error)}"}
            free(device_config)
        del model
        free(device_config)


def first_line(error: BaseException) -> str:
    """Of its message, and of its cause's."""
    text = f"{error} {error.__cause__ or ''}".strip()
    return text.splitlines()[0][:200] if text else "no message"
