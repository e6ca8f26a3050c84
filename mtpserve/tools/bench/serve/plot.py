"""One picture, by matplotlib. Of a sweep: latency and what each user gets against throughput, and acceptance
by position. Of one run: the distributions of latencies, and acceptance by position."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtpserve.core.errors import ConfigError
from mtpserve.tools.bench.serve.client import INSTALL
from mtpserve.tools.bench.serve.show import number, two_digits
from mtpserve.tools.bench.serve.sweep import Point, knee

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLUE, ORANGE, GREEN, GREY, RED = "#2a6fbb", "#d9822b", "#3c8c5a", "#8a8f98", "#c0392b"


def check_plot(file: str) -> None:
    """Raises ConfigError before the run, if matplotlib is missing or does not know the kind of file."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(f"--plot needs matplotlib, and {INSTALL}") from error
    file_types = Figure().canvas.get_supported_filetypes()
    kind = Path(file).suffix[1:].lower()
    if kind not in file_types:
        raise ConfigError(
            f"--plot must be a file whose name ends in one of "
            f"{', '.join(f'.{suffix}' for suffix in sorted(file_types))}, got {file!r}"
        )


def plot(file: str, points: Sequence[Point], what: str, title: str) -> None:
    """Raises ConfigError where the file cannot be written."""
    from matplotlib.figure import Figure

    points = [point for point in points if point.summary.e2e is not None]
    if not points:
        return
    figure = Figure(figsize=(15, 4.8), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    best = knee(points)
    if len(points) > 1:
        curve(left, points, best, what)
        interactivity(middle, points, best, what)
    else:
        of_one(left, middle, points[0])
    acceptance(right, points, best, what)
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    for axes in (left, middle, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#e6e8eb", linewidth=0.8)
        axes.set_axisbelow(True)
    try:
        figure.savefig(file, dpi=130)
    except OSError as error:
        raise ConfigError(f"--plot {file}: {error.strerror}") from error


def label(point: Point) -> str:
    return number(point.load) if math.isfinite(point.load) else "∞"


def mark(
    axes: Axes, points: Sequence[Point], x: Sequence[float], y: Sequence[float], best: int | None
) -> None:
    for i, point in enumerate(points):
        axes.annotate(
            label(point),
            (x[i], y[i]),
            textcoords="offset points",
            xytext=(5, 6),
            fontsize=8,
            color=RED if i == best else GREY,
        )
    if best is not None:
        axes.plot(
            x[best],
            y[best],
            marker="o",
            markersize=13,
            markerfacecolor="none",
            markeredgecolor=RED,
            linestyle="none",
            label="knee",
        )


def from_zero(axes: Axes, x: Sequence[float], y: Sequence[float]) -> None:
    axes.set_xlim(0, 1.1 * max(x))
    axes.set_ylim(0, 1.12 * max(y))


def of_one(left: Axes, middle: Axes, point: Point) -> None:
    """Shares of the requests that took no longer."""
    good = [request for request in point.requests if request.failure is None]
    distribution(left, "to the first token", [request.ttft for request in good], ORANGE)
    distribution(left, "to the end", [request.e2e for request in good], BLUE)
    distribution(
        middle,
        "per token after the first",
        [None if request.tpot is None else 1000 * request.tpot for request in good],
        GREEN,
    )
    left.set(
        xlabel="s",
        ylabel="requests, %",
        title=f"Latency at {number(point.summary.output_throughput)} output tokens per second",
    )
    middle.set(xlabel="ms", ylabel="requests, %", title="Time per output token")
    for axes in (left, middle):
        axes.set_xlim(left=0)
        axes.set_ylim(0, 103)
        if axes.lines:
            axes.legend(frameon=False, fontsize=8, loc="lower right")


def distribution(axes: Axes, name: str, values: Sequence[float | None], color: str) -> None:
    ordered = sorted(value for value in values if value is not None)
    if ordered:
        axes.step(
            [0.0, *ordered],
            [100 * i / len(ordered) for i in range(len(ordered) + 1)],
            where="post",
            color=color,
            label=name,
        )


def curve(axes: Axes, points: Sequence[Point], best: int | None, what: str) -> None:
    x = [point.summary.output_throughput for point in points]
    spreads = [spread for point in points if (spread := point.summary.e2e) is not None]
    median, high = (
        [latency.median for latency in spreads],
        [dict(latency.percentiles).get(99, latency.max) for latency in spreads],
    )
    axes.plot(x, high, color=ORANGE, marker="o", markersize=4, linewidth=1.2, label="p99")
    axes.plot(x, median, color=BLUE, marker="o", markersize=5, label="median")
    mark(axes, points, x, median, best)
    from_zero(axes, x, high)
    axes.set(
        xlabel="output tokens per second",
        ylabel="end-to-end latency, s",
        title=f"Latency by throughput ({what})",
    )
    axes.legend(frameon=False, fontsize=8)


def interactivity(axes: Axes, points: Sequence[Point], best: int | None, what: str) -> None:
    """What one user gets against what all get: up and to the right is better."""
    user_points = [(i, point) for i, point in enumerate(points) if point.summary.per_user is not None]
    if not user_points:
        axes.set_axis_off()
        axes.text(0.5, 0.5, "tokens were not streamed", ha="center", color=GREY)
        return
    x = [point.summary.per_user.median for _, point in user_points if point.summary.per_user is not None]
    y = [point.summary.output_throughput for _, point in user_points]
    axes.plot(x, y, color=GREEN, marker="o", markersize=5)
    mark(
        axes,
        [point for _, point in user_points],
        x,
        y,
        next((at for at, (i, _) in enumerate(user_points) if i == best), None),
    )
    from_zero(axes, x, y)
    axes.set(
        xlabel="output tokens per second of one user",
        ylabel="output tokens per second of all",
        title=f"All users by one user ({what})",
    )


def acceptance(axes: Axes, points: Sequence[Point], best: int | None, what: str) -> None:
    """Bars of the knee's run, or the last one's; dots of the others where there are any."""
    rates: list[tuple[Point, Any]] = [
        (point, point.server.rates_at)
        for point in points
        if point.server is not None and point.server.rates_at
    ]
    if not rates:
        axes.set_axis_off()
        axes.text(0.5, 0.5, "no acceptance by position\nin the server's counters", ha="center", color=GREY)
        return
    point_rates = next((pair for pair in rates if best is not None and pair[0] is points[best]), rates[-1])
    places = range(1, len(point_rates[1]) + 1)
    axes.bar(list(places), [100 * rate for rate in point_rates[1]], color=BLUE, width=0.6, alpha=0.85)
    for index, rate in zip(places, point_rates[1], strict=True):
        axes.annotate(
            f"{rate:.0%}",
            (index, 100 * rate),
            textcoords="offset points",
            xytext=(0, 4),
            ha="center",
            fontsize=9,
        )
    length = point_rates[0].server.length if point_rates[0].server is not None else None
    at = f" at {label(point_rates[0])} {what}" if len(points) > 1 else ""
    axes.set(xlabel="position in the proposal", ylabel="accepted, %", ylim=(0, 108), xticks=list(places),
             title=f"Acceptance{at}: length {two_digits(length)}")  # fmt: skip
