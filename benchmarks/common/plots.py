"""Plots of results' tables, as SVG for a page. Which table is drawn how is said by the table's path and columns, in RULES; others are
not drawn. matplotlib is optional: without it there are no plots."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import takewhile
from typing import Any

from common.leaves import Table, text_of

MOST_BARS, MOST_TICKS = 24, 12


@dataclass(frozen=True, slots=True)
class Plot:
    """Lines of `y` over `x`, one for each combination of the columns `by`; or, without `x`, bars of the columns `y` for each row."""

    path: str  # a regular expression for the whole of the table's path
    y: tuple[str, ...]
    x: str | None = None
    by: tuple[str, ...] = ()
    logarithmic: bool = False
    name: Callable[[str], str] = str  # of the first column's text, what a line's name begins with


def kind(shape: str) -> str:
    """ "T = 0.0, tree 3 deep, topk 2, 6 nodes" → "T = 0.0, tree"."""
    return re.sub(r"(chain|tree) .*", r"\1", shape)


RULES = (
    Plot("medians", ("tokens_per_s",), "concurrency", ("server", "mode"), logarithmic=True),
    Plot("by_drafts", ("accept_length",), ""),
    Plot("by_drafts", ("tokens_per_s",), ""),
    Plot("by_shape", ("accept_length",), "nodes", ("",), name=kind),
    Plot("steps", ("reward",), "step"),
    Plot("arms", ("first_accepted",), "step", ("arm",)),
    Plot("arms", ("against_plain",), "step", ("arm",)),
    Plot("rows", ("gb_per_s",), "rows", ("weights", "outputs", "inputs"), logarithmic=True),
    Plot("rows", ("ttft_ms", "ttft_p90_ms")),
    Plot("cases", ("us", "torch_us"), logarithmic=True),
    Plot("by_case", ("ms",)),
    Plot("by_kind", ("tokens_per_second",)),
    Plot(r"by_case\..*|against\..*", ("us_per_token",)),
)


def drawn(tables: list[Table]) -> list[str]:
    """One SVG for each plot that a rule asks for."""
    if find_spec("matplotlib") is None:
        return []
    found = ((rule, table) for table in tables for rule in RULES if fits(rule, table))
    return [svg(rule, table) for rule, table in found]


def fits(rule: Plot, table: Table) -> bool:
    wanted = {*rule.y, *rule.by, *([] if rule.x is None else [rule.x])}
    return (
        re.fullmatch(rule.path, table.path) is not None
        and wanted <= set(table.columns)
        and (rule.x is not None or len(table.rows) <= MOST_BARS)
    )


def svg(rule: Plot, table: Table) -> str:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context({"svg.hashsalt": table.path, "svg.fonttype": "none", "font.size": 9}):
        bars = rule.x is None
        figure = Figure(figsize=(7, 0.22 * len(table.rows) * len(rule.y) + 1.2 if bars else 3.2), layout="constrained")
        axes = figure.subplots()
        (bars_of if bars else lines_of)(axes, rule, table)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None}, transparent=True)
    text = out.getvalue()
    return text[text.index("<svg") :]


def lines_of(axes: Any, rule: Plot, table: Table) -> None:
    column, lines = rule.y[0], dict[str, list[tuple[float, float]]]()
    for row in table.rows:
        cell = dict(zip(table.columns, row, strict=True))
        x, y = number(cell[rule.x or ""]), number(cell[column])
        name = ", ".join(rule.name(str(cell[each])) if not each else str(cell[each]) for each in rule.by)
        if x is not None and y is not None:
            lines.setdefault(name, []).append((x, y))
    for name, points in lines.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", markersize=3, linewidth=1.2, label=name or None)
    if rule.logarithmic:
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    ticks = sorted({x for points in lines.values() for x, _ in points})
    if len(ticks) <= MOST_TICKS:
        axes.set_xticks(ticks, [text_of(x) for x in ticks])
    axes.set(xlabel=(rule.x or table.path.removeprefix("by_")).replace("_", " "), ylabel=column.replace("_", " "))
    axes.grid(alpha=0.3)
    if any(lines):
        axes.legend(fontsize=7, frameon=False, ncols=1 + len(lines) // 8)


def bars_of(axes: Any, rule: Plot, table: Table) -> None:
    names = [", ".join(takewhile(lambda cell: isinstance(cell, str), row)) for row in table.rows]  # type: ignore[arg-type]
    height = 0.8 / len(rule.y)
    for i, column in enumerate(rule.y):
        values = [number(cell) or 0.0 for cell in table.column(column)]
        bars = axes.barh([place + i * height for place in range(len(names))], values, height, label=column.replace("_", " "))
        axes.bar_label(bars, [text_of(value) for value in values], fontsize=7, padding=2)
    axes.set_yticks([place + 0.4 - height / 2 for place in range(len(names))], names)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    if rule.logarithmic:
        axes.set_xscale("log")
    axes.set_xlabel(rule.y[0].replace("_", " ") if len(rule.y) == 1 else "")
    if len(rule.y) > 1:
        axes.legend(fontsize=7, frameon=False)


def number(cell: Any) -> float | None:
    """None for what is no number."""
    try:
        return None if cell is None or isinstance(cell, bool) else float(cell)
    except ValueError:
        return None
