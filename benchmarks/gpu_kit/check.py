"""Whether what was chosen is right: against float64, with outputs full of NaN before, and captured steps against eager ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from gpu_kit.models import Cell, DeviceConfig, engine_of, replay, seat, state_of
from gpu_kit.steps import first_line, free, model_of, recorder_of
from gpu_kit.timing import Alarm
from gpu_kit.tune import tile_override
from gpu_kit.tuned_table import table_tiles
from gpu_kit.workloads import Workload

LIMITS = {torch.bfloat16: 1e-2, torch.float32: 1e-3}  # of ‖out − exact‖ / ‖exact‖


@contextmanager
def poison_memory() -> Iterator[None]:
    """Memory that is allocated for results is full of NaN, or of absurd integers."""
    empty, empty_like = torch.empty, torch.empty_like

    def filled(tensor: Tensor) -> Tensor:
        return tensor.fill_(torch.nan if tensor.is_floating_point() else -(1 << 30) if tensor.itemsize >= 4 else 0)

    try:
        torch.empty = lambda *sizes, **options: filled(empty(*sizes, **options))
        torch.empty_like = lambda *like, **options: filled(empty_like(*like, **options))
        yield
    finally:
        torch.empty, torch.empty_like = empty, empty_like


def error_of(out: Tensor, exact: Tensor) -> float:
    return float((out.double() - exact).norm() / exact.norm().clamp(min=1e-30))


@torch.inference_mode()
def tile_check(device_config: DeviceConfig, record: dict[str, Any], tile: dict[str, int]) -> dict[str, Any]:
    """On fresh random data."""
    workload = Workload(record["op"], record["kind"], record["label"], record["rows"], tuple(record["sizes"]))
    call, limit = workload.call(device_config), LIMITS[device_config.dtype]
    with tile_override(workload.op, tile), poison_memory():
        out = call.run(0)
    error = error_of(out, call.exact(0))
    return {
        "op": workload.op, "label": workload.label, "shape": record["shape"], "rows": workload.rows, "tiling": dict(tile),
        "error": error if error == error else None, "limit": limit, "good": error <= limit,
    }  # fmt: skip


@torch.inference_mode()
def captured_against_eager(device_config: DeviceConfig, cell: Cell, alarm: Alarm) -> dict[str, Any]:
    """The tokens of a captured step and those of the same step launched kernel by kernel, from the same state."""
    recorder = recorder_of(device_config.device, alarm)
    model = model_of(device_config, cell.model, cell.context + 1024)
    engine = engine_of(model, cell, device_config.device, recorder)
    seat(engine, cell)
    restore = state_of(engine)
    step_graph = replay(engine, cell)
    assert recorder.body is not None
    restore()
    step_graph.replay()
    graph_table = step_graph.output.table.clone()
    restore()
    eager_table = recorder.body()[0].clone()
    differing = int((graph_table != eager_table).sum())
    return {
        "op": "captured step", "label": str(cell), "shape": "", "rows": cell.requests, "tiling": {}, "error": float(differing),
        "limit": 0.0, "good": differing == 0,
    }  # fmt: skip


def check(device_config: DeviceConfig, models: list[str], records: list[dict[str, Any]], alarm: Alarm) -> Iterator[dict[str, Any]]:
    """A record for each tiling that a table would have and for a step of the first model, or {"skipped": why}."""
    for drafts in (0, 3):
        cell = Cell(models[0], drafts, 1 if device_config.toy else 8, 24 if device_config.toy else 256)
        try:
            yield captured_against_eager(device_config, cell, alarm)
        except Exception as error:
            yield {"skipped": f"check of {cell}: {type(error).__name__}: {first_line(error)}"}
        free(device_config)
    for record, tile in table_tiles(records):
        try:
            yield tile_check(device_config, record, tile)
        except Exception as error:
            yield {"skipped": f"check of {record['op']} {record['shape']} {tile}: {type(error).__name__}: {first_line(error)}"}
            free(device_config)
