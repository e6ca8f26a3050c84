"""Which tiling of a kernel is the fastest, by shape and number of rows: each candidate in a graph of calls over inputs that rotate.

The wrappers of the kernels look up their tilings (mtpserve_kernels/tuned); a candidate is what they find there while it is measured. So
they say themselves under which op and shape they would look it up. What launches the same kernels as another candidate is not measured.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from mtpserve_kernels import tuned

from gpu_kit.calls import CALLS, Call
from gpu_kit.candidates import TILES, Tile, tiles_of
from gpu_kit.launches import launch_hook
from gpu_kit.models import DeviceConfig
from gpu_kit.steps import first_line, free
from gpu_kit.timing import SAMPLES, Alarm, call_us
from gpu_kit.untuned_workloads import untuned_workloads
from gpu_kit.workloads import PRODUCTS, Workload, prompt_workloads, workloads_of

PROMPT_CALLS, TOY_CALLS = 3, 1
FINALISTS = 6  # tilings that are measured with every number of rows, after all were with two


@dataclass(frozen=True, slots=True)
class Lookup:
    """What a wrapper looked up."""

    shape: str
    rows: int


@contextmanager
def lookups(op: str) -> Iterator[list[Lookup]]:
    """Those of this op while it is entered."""
    table_lookups, original = list[Lookup](), tuned.tiling

    def listen(lookup_op: str, shape: str, rows: int, *args: Any, **kwargs: Any) -> Any:
        if lookup_op == op:
            table_lookups.append(Lookup(shape, rows))
        return original(lookup_op, shape, rows, *args, **kwargs)

    tuned.tiling = listen  # type: ignore[assignment]
    try:
        yield table_lookups
    finally:
        tuned.tiling = original


def launches_with(call: Call, op: str, tile: Tile | None) -> str:
    """The kernels of one call with their grids and constants, as a text. Raises what the wrapper raises for such a tiling."""
    signature: list[str] = []

    def write(original: Any, kernel: Any, args: tuple[Any, ...], grid: Any, kwargs: dict[str, Any]) -> None:
        plain = {name: value for name, value in kwargs.items() if isinstance(value, bool | int | float)}
        signature.append(f"{kernel.__name__}{tuple(grid)}{plain}")

    with tile_override(op, tile), launch_hook(write):
        launch_of(call)(0)
    return " ".join(signature)


def launch_of(call: Call) -> Callable[[int], Any]:
    """Of a call whose output is put together from several."""
    return call.library.get("launch", call.run)


def tile_override(op: str, tile: Tile | None) -> AbstractContextManager[None]:
    """None: the wrapper's default, of its rule or of the table that is there."""
    return nullcontext() if tile is None else tuned.override(op, tile)


def distinct_tiles_of(call: Call, op: str, tiles: list[Tile]) -> list[Tile]:
    """Those that launch something else than the ones before them. Raises LookupError where none can be launched."""
    signatures, tiles_left, reason = set[str](), list[Tile](), ""
    for tile in tiles:
        try:
            signature = launches_with(call, op, tile)
        except Exception as error:  # this wrapper has other names, or limits, for its tiles
            reason = f"{type(error).__name__}: {first_line(error)}"
            continue
        if signature not in signatures:
            signatures.add(signature)
            tiles_left.append(tile)
    if not tiles_left:
        raise LookupError(f"{op}: no candidate can be launched: {reason}")
    return tiles_left


def tile_us(device_config: DeviceConfig, call: Call, op: str, tile: Tile | None, alarm: Alarm) -> float:
    with tile_override(op, tile):
        return run_us(device_config, launch_of(call), alarm, call.calls)


def run_us(device_config: DeviceConfig, run: Callable[[int], Any], alarm: Alarm, calls: int = CALLS) -> float:
    calls, samples = (TOY_CALLS, 1) if device_config.toy else (calls, SAMPLES)
    return call_us(run, calls, device_config.device, samples=samples, alarm=alarm)


def workload_record(device_config: DeviceConfig, workload: Workload, tiles: list[Tile] | None, alarm: Alarm) -> dict[str, Any]:
    """A record of one workload; `tiles` None: all that differ. Without candidates where its op has no table; raises LookupError where none
    of them runs, or where the kernel does not look up a tiling."""
    call, op = workload.call(device_config), workload.op
    with lookups(op) as table_lookups:
        launch_of(call)(0)
    default_us = tile_us(device_config, call, op, None, alarm)
    library = {name: library_time(device_config, run, alarm, call.calls) for name, run in call.library.items() if name != "launch"}
    record = workload_us_record(device_config, workload, default_us, call.num_bytes) | {"library_us": library}
    if op not in TILES:
        return record
    if not table_lookups:
        raise LookupError(f"{op}: the kernel does not look up a tiling")
    tiles = distinct_tiles_of(call, op, tiles_of(workload, device_config.toy)) if tiles is None else tiles
    candidates = candidate_records(device_config, workload, call, tiles, alarm)
    best, lookup = candidates[0], table_lookups[0]
    return record | {
        "shape": lookup.shape, "table_rows": lookup.rows, "candidates": candidates, "best": best["tiling"], "best_us": best["us"],
        "best_gb_s": best["gb_s"],
    }  # fmt: skip


def candidate_records(device_config: DeviceConfig, workload: Workload, call: Call, tiles: list[Tile], alarm: Alarm) -> list[dict[str, Any]]:
    """The fastest first; without those that do not run. Raises LookupError where none does."""
    candidates, reason = list[dict[str, Any]](), ""
    for tile in tiles:
        try:
            us = tile_us(device_config, call, workload.op, tile, alarm)
        except Exception as error:  # triton's OutOfResources: it does not fit the chip; or the compiler fails
            reason = f"{type(error).__name__}: {first_line(error)}"
            continue
        candidates.append({"tiling": dict(tile), "us": us, "gb_s": call.num_bytes / us / 1e3})
    if not candidates:
        raise LookupError(f"{workload.op} of {workload.label}, {workload.rows} rows: no candidate runs: {reason}")
    return sorted(candidates, key=lambda candidate: float(candidate["us"]))


def library_time(device_config: DeviceConfig, run: Callable[[int], Any], alarm: Alarm, calls: int = CALLS) -> float | str:
    try:
        return run_us(device_config, run, alarm, calls)
    except Exception as error:
        return f"skipped: {type(error).__name__}: {first_line(error)}"


def families(workloads: list[Workload]) -> list[list[Workload]]:
    """Workloads whose tilings share a shape of the table: of one op and kind, and of sizes that are equal but for a span's context."""
    groups = defaultdict[tuple[Any, ...], list[Workload]](list)
    for workload in workloads:
        sizes = (workload.sizes[0], *workload.sizes[2:]) if workload.kind == "span" else workload.sizes
        groups[workload.op, workload.kind, sizes].append(workload)
    return list(groups.values())


def finalists(records: list[dict[str, Any]]) -> list[Tile]:
    """Those with the smallest product of times relative to the fastest, among what all these workloads had; else each workload's best."""
    scores = defaultdict[str, list[float]](list)
    tiles: dict[str, Tile] = {}
    for record in records:
        for candidate in record["candidates"]:
            key = str(candidate["tiling"])
            tiles[key] = candidate["tiling"]
            scores[key].append(math.log(candidate["us"] / record["best_us"]))
    common = sorted((key for key in scores if len(scores[key]) == len(records)), key=lambda key: sum(scores[key]))
    best = [str(record["best"]) for record in records]
    return [tiles[key] for key in dict.fromkeys([*common[:FINALISTS], *best])]


@torch.inference_mode()
def tune(device_config: DeviceConfig, models: list[str], alarm: Alarm) -> Iterator[dict[str, Any]]:
    """A record for each workload, or {"skipped": why}."""
    for family in families(workloads_of(models, device_config.toy)):
        yield from family_records(device_config, family, alarm)
        free(device_config)
    yield from prompt_records(device_config, models, alarm)
    yield from untuned_records(device_config, alarm)


def family_records(device_config: DeviceConfig, family: list[Workload], alarm: Alarm) -> Iterator[dict[str, Any]]:
    """All candidates are measured with two numbers of rows of a shape, the best with all; of attention all with all contexts, and of
    products of few rows, whose candidates differ with the rows, each with its own."""
    each_has_all = family[0].kind in ("span", *PRODUCTS)
    first = family if each_has_all or len(family) < 2 else [family[0], family[-1]]
    records = list[dict[str, Any]]()
    for workload in [*first, *(workload for workload in family if workload not in first)]:
        tiles = None if workload in first or not records else finalists(records)
        try:
            record = workload_record(device_config, workload, tiles, alarm)
        except LookupError as error:
            yield {"skipped": str(error)}
            return
        except Exception as error:
            yield {"skipped": f"{workload.op} of {workload.label}, {workload.rows} rows: {type(error).__name__}: {first_line(error)}"}
            free(device_config)
            continue
        yield record
        if record["candidates"] and workload in first:
            records.append(record)


def us_record(
    device_config: DeviceConfig, op: str, label: str, kind: str, rows: int, sizes: tuple[int, ...], us: float, num_bytes: float
) -> dict[str, Any]:
    """Of a kernel with nothing to choose."""
    return {
        "op": op, "label": label, "kind": kind, "sizes": list(sizes), "shape": "", "rows": rows, "table_rows": 0,
        "clock": "device" if device_config.device.type == "cuda" else "host", "default_us": us, "candidates": [], "best": {}, "best_us": us,
        "best_gb_s": num_bytes / us / 1e3, "library_us": {},
    }  # fmt: skip


def workload_us_record(device_config: DeviceConfig, workload: Workload, us: float, num_bytes: float, kind: str = "") -> dict[str, Any]:
    kind = kind or workload.kind
    return us_record(device_config, workload.op, workload.label, kind, workload.rows, workload.sizes, us, num_bytes)


def prompt_records(device_config: DeviceConfig, models: list[str], alarm: Alarm) -> Iterator[dict[str, Any]]:
    """Attention of whole prompts beside what torch has for it."""
    for workload in prompt_workloads(models, device_config.toy):
        try:
            call = workload.call(device_config)
            us = run_us(device_config, call.run, alarm, PROMPT_CALLS)
            library = {name: library_time(device_config, run, alarm, PROMPT_CALLS) for name, run in call.library.items()}
        except Exception as error:
            yield {"skipped": f"{workload.op} of {workload.label}: {type(error).__name__}: {first_line(error)}"}
        else:
            yield workload_us_record(device_config, workload, us, call.num_bytes, "prompt") | {"library_us": library}
        free(device_config)


def untuned_records(device_config: DeviceConfig, alarm: Alarm) -> Iterator[dict[str, Any]]:
    for workload in untuned_workloads(device_config.toy):
        op, rows, sizes = workload.op, workload.rows, workload.sizes
        try:
            run, num_bytes = workload.call(device_config)
            us = run_us(device_config, run, alarm)
        except Exception as error:
            yield {"skipped": f"{op}, {rows} rows: {type(error).__name__}: {first_line(error)}"}
        else:
            yield us_record(device_config, op, f"{op} {sizes}", "untuned", rows, sizes, us, num_bytes)
        free(device_config)
