"""Results as lines of text: predictions beside measurements, and the kernels that lose most."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

WORST, MISSED = 10, 0.20


def column_lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """The first row is the header; the first column is text, the others are numbers."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join([row[0].ljust(widths[0]), *(row[i].rjust(widths[i]) for i in range(1, len(row)))]).rstrip() for row in rows]


def number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def name_of(cell: dict[str, Any]) -> str:
    if cell["prompt"]:
        return f"{cell['model']} {cell['prompt']} rows of prompts"
    return f"{cell['model']} k={cell['drafts']} batch {cell['requests']} context {cell['context']}"


def error_of(cell: dict[str, Any]) -> float | None:
    """Prediction over measurement, less one. None: one of them is missing, or the measurement is of the host's clock."""
    if "prediction" not in cell or cell.get("device_ms") is None or cell.get("clock") == "host":
        return None
    return float(cell["prediction"]["device_ms"] / cell["device_ms"] - 1)


def predictions(cells: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each cell: what was predicted, of what, and what was measured."""
    rows = [["cell", "launches", "MB", "bodies ms", "gaps ms", "predicted ms", "floor ms", "measured ms", "kernels", "error"]]
    for cell in cells:
        prediction, error = cell.get("prediction", {}), error_of(cell)
        rows.append([
            name_of(cell), number(prediction.get("launches", cell.get("launches")), 0), number(prediction.get("bytes", 0) / 1e6, 0),
            *(number(prediction.get(name)) for name in ("body_ms", "gap_ms", "device_ms")), number(cell.get("floor_ms")),
            number(cell.get("device_ms")), number(cell.get("kernel_launches"), 0), "-" if error is None else f"{error:+.0%}",
        ])  # fmt: skip
    return column_lines(rows)


def measurements(cells: Sequence[dict[str, Any]]) -> list[str]:
    """A line for each cell."""
    rows = [["cell", "device ms", "busy ms", "gaps ms", "gap us", "kernels", "host replay ms", "floor ms", "x floor"]]
    for cell in cells:
        floor = cell["floor_ms"]
        rows.append([
            name_of(cell), number(cell["device_ms"], 3), number(cell["busy_ms"], 3), number(cell["gap_ms"], 3),
            number(cell["gap_us_median"]), number(cell["kernel_launches"], 0), number(cell["host_replay_ms"], 3), number(floor, 3),
            number(None if not floor else cell["device_ms"] / floor, 1),
        ])  # fmt: skip
    return column_lines(rows)


def above_floor(row: dict[str, Any], read_gb_s: float | None) -> float:
    """Microseconds that a kernel takes above its bytes at the speed of a read."""
    if row["bytes"] is None or read_gb_s is None:
        return float(row["us_sum"])
    return float(row["us_sum"] - row["bytes"] / read_gb_s / 1e3)


def worst_kernels(cells: Iterable[dict[str, Any]], read_gb_s: float | None) -> list[str]:
    """Of all cells, one line for each."""
    entries = [(above_floor(row, read_gb_s), row, cell) for cell in cells for row in cell["kernels"]]
    rows = [["kernel", "calls", "us each", "us", "above floor", "of read", "gap before us"]]
    for above, row, cell in sorted(entries, key=lambda entry: -entry[0])[:WORST]:
        share = "-" if row["read_share"] is None else f"{row['read_share']:.0%}"
        rows.append([
            f"{row['name'][:44]} {row['shape']} ({name_of(cell)})", number(row["calls"], 0), number(row["us_median"]),
            number(row["us_sum"], 1), number(above, 1), share, number(row["gap_before_us"]),
        ])  # fmt: skip
    return column_lines(rows)


def missed_predictions(cells: Iterable[dict[str, Any]]) -> list[str]:
    """A line for each prediction that is off by more than MISSED."""
    misses = [(cell, error) for cell in cells if (error := error_of(cell)) is not None and abs(error) > MISSED]
    return [
        f"prediction missed: {name_of(cell)}: {cell['prediction']['device_ms']:.2f} ms predicted, "
        f"{cell['device_ms']:.2f} measured ({error:+.0%})"
        for cell, error in misses
    ]


def hosts(records: Sequence[dict[str, Any]]) -> list[str]:
    """Milliseconds of the engine's steps, a line for each."""
    names = ["step", "plan", "launch", "wait", "book", "decode_graph", "mixed_graph", "prompt_graph"]
    rows = [["engine's steps, ms", *(name.replace("_", " ") for name in names), "with prompts"]]
    for record in records:
        label = f"{record['model']} k={record['drafts']} batch {record['requests']}"
        share = f"{record['steps_with_prompts']} of {record['steps']}"
        rows.append([label, *(number(record["median_ms"].get(name), 3) for name in names), share])
    return column_lines(rows)


def gains(records: Iterable[dict[str, Any]]) -> list[str]:
    """Where another tiling than the kernel's default saves most, a line for each."""
    entries = sorted((record for record in records if record["candidates"]), key=lambda record: record["best_us"] - record["default_us"])
    rows = [["tuned", "default us", "best us", "library us", "tiling"]]
    for record in entries[:WORST]:
        times = [us for us in record["library_us"].values() if isinstance(us, float)]
        tile = " ".join(f"{name}{value}" for name, value in record["best"].items())
        label = f"{record['op']} {record['label']}, {record['rows']} rows"
        rows.append([label, number(record["default_us"]), number(record["best_us"]), number(min(times, default=None)), tile])
    return column_lines(rows) if entries else []


def failed_checks(records: Iterable[dict[str, Any]]) -> list[str]:
    """A line for each check that did not pass."""
    return [
        f"check failed: {record['op']} {record['shape'] or record['label']} {record['tiling']}: "
        f"error {record['error']}, at most {record['limit']}"
        for record in records
        if not record["good"]
    ]


def summary(result: dict[str, Any]) -> list[str]:
    """The last lines of a run."""
    read = result.get("ceilings", {}).get("read_gb_s")
    cells = result.get("steps", [])
    lines = [f"skipped: {sentence}" for sentence in result.get("skipped", [])]
    lines += hosts(result["host"]) if result.get("host") else []
    lines += [*gains(result.get("tune", [])), *failed_checks(result.get("check", []))]
    if cells:
        clock = " (host's clock, interpreted: they say nothing of a GPU)" if any(cell["clock"] == "host" for cell in cells) else ""
        lines += [f"steps{clock}", *measurements(cells), f"{WORST} kernels with the most microseconds above their floor"]
        lines += [*worst_kernels(cells, read), *missed_predictions(cells)]
    return lines
