"""Which tiling of a kernel is the fastest, by shape and number of rows: each candidate in a graph of calls over inputs that rotate.

The wrappers of the kernels look up their tilings (mtpserve_kernels/tuned); a candidate is what they find there while it is measured. So
they say themselves under which op and shape they would look it up. Where candidates make no difference to what is launched, the wrapper
does not look, and nothing is tuned.
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

from gpu_kit.candidates import Tile, tiles_of
from gpu_kit.launches import launches_are
from gpu_kit.models import Place
from gpu_kit.other_works import other_works
from gpu_kit.steps import first_line, free
from gpu_kit.timing import SAMPLES, Alarm, call_us
from gpu_kit.works import Call, Work, prompts_of, works_of

CALLS, TOY_CALLS = 20, 1
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

    with tile_override(op, tile), launches_are(write):
        launch_of(call)(0)
    return " ".join(signature)


def launch_of(call: Call) -> Callable[[int], Any]:
    """Of a call whose output is put together from several."""
    return call.library.get("launch", call.run)


def tile_override(op: str, tile: Tile | None) -> AbstractContextManager[None]:
    """None: the wrapper's own."""
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


def tile_us(place: Place, call: Call, op: str, tile: Tile | None, alarm: Alarm) -> float:
    with tile_override(op, tile):
        return run_us(place, launch_of(call), alarm)


def run_us(place: Place, run: Callable[[int], Any], alarm: Alarm) -> float:
    return call_us(run, TOY_CALLS if place.toy else CALLS, place.device, samples=1 if place.toy else SAMPLES, alarm=alarm)


def work_record(place: Place, work: Work, tiles: list[Tile] | None, alarm: Alarm) -> dict[str, Any]:
    """A record of one work; `tiles` None: all that differ. Without candidates where the kernel looks up no tiling; raises LookupError where
    none of them runs."""
    call = work.call(place)
    with lookups(work.op) as table_lookups:
        launch_of(call)(0)
    own_us = tile_us(place, call, work.op, None, alarm)
    library = {name: library_time(place, run, alarm) for name, run in call.library.items() if name != "launch"}
    plain = record_of(place, work.op, work.label, work.kind, work.rows, work.sizes, own_us, call.num_bytes) | {"library_us": library}
    if not table_lookups:
        return plain
    tiles = distinct_tiles_of(call, work.op, tiles_of(work, place.toy)) if tiles is None else tiles
    candidates, reason = list[dict[str, Any]](), ""
    for tile in tiles:
        try:
            us = tile_us(place, call, work.op, tile, alarm)
        except Exception as error:  # it does not fit the chip, or the compiler fails
            reason = f"{type(error).__name__}: {first_line(error)}"
            continue
        candidates.append({"tiling": dict(tile), "us": us, "gb_s": call.num_bytes / us / 1e3})
    if not candidates:
        raise LookupError(f"{work.op} of {work.label}, {work.rows} rows: no candidate runs: {reason}")
    candidates.sort(key=lambda candidate: candidate["us"])
    best = candidates[0]
    return plain | {
        "shape": table_lookups[0].shape, "table_rows": table_lookups[0].rows, "candidates": candidates, "best": best["tiling"],
        "best_us": best["us"], "best_gb_s": best["gb_s"],
    }  # fmt: skip


def library_time(place: Place, run: Callable[[int], Any], alarm: Alarm) -> float | str:
    try:
        return run_us(place, run, alarm)
    except Exception as error:
        return f"skipped: {type(error).__name__}: {first_line(error)}"


def families(works: list[Work]) -> list[list[Work]]:
    """Works whose tilings share a shape of the table, or may: of one op and kind, and of sizes that are equal but for a span's."""
    groups = defaultdict[tuple[Any, ...], list[Work]](list)
    for work in works:
        sizes = work.sizes[2:] if work.kind == "span" else work.sizes
        groups[work.op, work.kind, sizes].append(work)
    return list(groups.values())


def finalists(records: list[dict[str, Any]]) -> list[Tile]:
    """Those with the smallest product of times relative to the fastest, among what all these works had; else each work's best."""
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
def tune(place: Place, models: list[str], alarm: Alarm) -> Iterator[dict[str, Any]]:
    """A record for each work, or {"skipped": why}. All candidates are measured with two numbers of rows of a shape, the best with all."""
    for family in families(works_of(models, place.toy)):
        yield from family_tuned(place, family, alarm)
        free(place)
    yield from prompts(place, models, alarm)
    yield from fixed_kernels(place, alarm)


def family_tuned(place: Place, family: list[Work], alarm: Alarm) -> Iterator[dict[str, Any]]:
    first = [family[0], family[-1]] if len(family) > 1 else family
    records = list[dict[str, Any]]()
    for work in [*first, *(work for work in family if work not in first)]:
        tiles = None if work in first else finalists(records)
        try:
            record = work_record(place, work, tiles, alarm)
        except LookupError as error:
            yield {"skipped": str(error)}
            return
        except Exception as error:
            yield {"skipped": f"{work.op} of {work.label}, {work.rows} rows: {type(error).__name__}: {first_line(error)}"}
            free(place)
            continue
        yield record
        if not record["candidates"]:
            yield {"skipped": f"{work.op}: the kernel does not look up a tiling"}
        elif work in first:
            records.append(record)


def record_of(
    place: Place, op: str, label: str, kind: str, rows: int, sizes: tuple[int, ...], us: float, num_bytes: float
) -> dict[str, Any]:
    """Of a kernel with nothing to choose."""
    return {
        "op": op, "label": label, "kind": kind, "sizes": list(sizes), "shape": "", "rows": rows, "table_rows": 0,
        "clock": "device" if place.device.type == "cuda" else "host", "own_us": us, "candidates": [], "best": {}, "best_us": us,
        "best_gb_s": num_bytes / us / 1e3, "library_us": {},
    }  # fmt: skip


def prompts(place: Place, models: list[str], alarm: Alarm) -> Iterator[dict[str, Any]]:
    """Attention of whole prompts beside what torch has for it."""
    for work in prompts_of(models, place.toy):
        try:
            call = work.call(place)
            us = tile_us(place, call, work.op, None, alarm)
            library = {name: library_time(place, run, alarm) for name, run in call.library.items()}
        except Exception as error:
            yield {"skipped": f"{work.op} of {work.label}: {type(error).__name__}: {first_line(error)}"}
        else:
            record = record_of(place, work.op, work.label, "prompt", work.rows, work.sizes, us, call.num_bytes)
            yield record | {"library_us": library}
        free(place)


def fixed_kernels(place: Place, alarm: Alarm) -> Iterator[dict[str, Any]]:
    for work in other_works(place.toy):
        try:
            run, num_bytes = work.call(place)
            us = run_us(place, run, alarm)
        except Exception as error:
            yield {"skipped": f"{work.op}, {work.rows} rows: {type(error).__name__}: {first_line(error)}"}
        else:
            yield record_of(place, work.op, f"{work.op} {work.sizes}", "other", work.rows, work.sizes, us, num_bytes)
        free(place)
