"""The table of tilings that the kernels read (mtpserve_kernels/tuned), made of what `tune` measured and `check` found right."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable
from math import inf
from pathlib import Path
from typing import Any

from mtpserve_kernels import tuned

Record = dict[str, Any]
INVARIANT_OPS = ("route",)  # whose wrappers look up the column `invariant` alone
LIBRARY_OPS = ("skinny_linear", "skinny_gated")  # that layers use where a table has them, and a library's elsewhere
LIBRARY_SHARE = 0.97  # of the library's time that a tiling of these may take


def by_op_and_shape(records: Iterable[Record]) -> dict[tuple[str, str], list[Record]]:
    """By op and shape; what has no candidates is left out."""
    groups = defaultdict[tuple[str, str], list[Record]](list)
    for record in records:
        if record["candidates"]:
            groups[record["op"], record["shape"]].append(record)
    return dict(groups)


def cheapest(records: list[Record]) -> dict[str, int] | None:
    """Of the tilings that all of them have, the one with the smallest sum of times relative to each record's fastest one."""
    costs, tiles = defaultdict[str, list[float]](list), {}
    for record in records:
        for candidate in record["candidates"]:
            key = text_of(candidate)
            tiles[key] = candidate["tiling"]
            costs[key].append(candidate["us"] / record["best_us"])
    common = [key for key in costs if len(costs[key]) == len(records)]
    return tiles[min(common, key=lambda key: sum(costs[key]))] if common else None


def choices(records: list[Record]) -> dict[str, Any]:
    """`fastest` for each bucket of rows, and `invariant`, of the records of one op and shape."""
    buckets = defaultdict[int, list[Record]](list)
    for record in records:
        if number := tuned.bucket(record["table_rows"]):
            buckets[number].append(record)
    fastest = {str(number): tile for number in sorted(buckets) if (tile := cheapest(buckets[number])) is not None}
    invariant = None if records[0]["op"] in LIBRARY_OPS else cheapest(records)  # nobody would look it up
    return {"fastest": fastest} | ({} if invariant is None else {"invariant": invariant})


def table_tiles(records: Iterable[Record]) -> list[tuple[Record, dict[str, int]]]:
    """Each tiling that a table would have, with the record of one workload that it is for."""
    pairs = []
    for group in by_op_and_shape(records).values():
        entry = choices(group)
        tiles = [*entry["fastest"].values(), *([entry["invariant"]] if "invariant" in entry else [])]
        for key in dict.fromkeys(json.dumps(tile, sort_keys=True) for tile in tiles):
            record = next(record for record in group if key in map(text_of, record["candidates"]))
            pairs.append((record, json.loads(key)))
    return pairs


def text_of(candidate: Record) -> str:
    return json.dumps(candidate["tiling"], sort_keys=True)


def verified_records(records: Iterable[Record], checks: Iterable[Record]) -> list[Record]:
    """The records with those candidates alone that were found right for their op and shape."""
    passed = {(check["op"], check["shape"], text_of(check)) for check in checks if check["good"]}
    result = []
    for record in records:
        key = record["op"], record["shape"]
        candidates = [candidate for candidate in record["candidates"] if (*key, text_of(candidate)) in passed]
        if candidates:
            result.append(record | {"candidates": candidates, "best_us": min(candidate["us"] for candidate in candidates)})
    return result


def is_faster(records: list[Record], tile: dict[str, int]) -> bool:
    """Whether the sum of this tiling's times, relative to what they replace, is less than the number of records."""
    key, ratios = json.dumps(tile, sort_keys=True), list[float]()
    for record in records:
        ratios += [share_of_time(record, candidate["us"]) for candidate in record["candidates"] if text_of(candidate) == key]
    return sum(ratios) < len(ratios)


def share_of_time(record: Record, us: float) -> float:
    """Of what a tiling replaces: the wrapper's default, or the library less some per cent. Where the library failed nothing is replaced."""
    if record["op"] not in LIBRARY_OPS:
        return float(us / record["default_us"])
    library_us = [time for time in record["library_us"].values() if not isinstance(time, str)]
    return us / (LIBRARY_SHARE * min(library_us)) if library_us else inf


def table_of(records: Iterable[Record], checks: Iterable[Record], chip: str, source: str, table: dict[str, Any]) -> dict[str, Any]:
    """`table`, with what was measured in its place: only tilings that were checked, are right, and faster than what was there."""
    ops = defaultdict[str, dict[str, Any]](dict, {op: dict(shapes) for op, shapes in table.get("ops", {}).items()})
    for (op, shape), group in sorted(by_op_and_shape(verified_records(records, checks)).items()):
        entry, measured = dict(ops[op].get(shape, {})), choices(group)
        for bucket, tile in measured["fastest"].items():
            if op not in INVARIANT_OPS and is_faster(
                [record for record in group if str(tuned.bucket(record["table_rows"])) == bucket], tile
            ):
                entry["fastest"] = entry.get("fastest", {}) | {bucket: tile}
            elif op in LIBRARY_OPS:  # the library has become faster
                entry["fastest"] = {rows: other for rows, other in entry.get("fastest", {}).items() if rows != bucket}
        if "invariant" in measured and is_faster(group, measured["invariant"]):
            entry["invariant"] = measured["invariant"]
        ops[op][shape] = {column: tiles for column, tiles in entry.items() if tiles}
    if "source" in table:
        source = f"{source}; what it did not find faster: {table['source'].split('; what it did not find faster: ')[-1]}"
    ops_with_tiles = {op: {shape: entry for shape, entry in shapes.items() if entry} for op, shapes in ops.items()}
    return {"chip": chip, "source": source, "ops": {op: shapes for op, shapes in ops_with_tiles.items() if shapes}}


def read(path: Path) -> dict[str, Any]:
    """Empty where there is no file."""
    return dict(json.loads(path.read_text())) if path.is_file() else {}


def write(path: Path, table: dict[str, Any]) -> None:
    path.write_text(json.dumps(table, indent=1) + "\n")
