"""A run and a sweep in the terminal: tables, what is to be noted, and the progress bar."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mtpserve.core.errors import quantity
from mtpserve.tools.bench.serve.measured import BY_CHUNK, BY_LENGTH, BY_TOKENIZER, Measured
from mtpserve.tools.bench.serve.run import RawRun
from mtpserve.tools.bench.serve.summary import BUSY, LATE, Spread, Summary
from mtpserve.tools.bench.serve.sweep import Point, knee, largest_power

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

WIDTH = 200  # columns of tables outside a terminal
NAMES = {
    "ttft": "TTFT, first token",
    "tpot": "TPOT, per token",
    "itl": "ITL, between tokens",
    "e2el": "E2EL, whole request",
}


def console_of(error: bool = False) -> Console:
    from rich.console import Console

    console = Console(highlight=False, markup=False, stderr=error)
    if not console.is_terminal:
        console.width = WIDTH
    return console


def table_of(console: Console, title: str, *columns: str) -> Table:
    """Columns whose names end in a blank hold numbers."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, box=box.SIMPLE_HEAD if console.is_terminal else None)
    for column in columns:
        table.add_column(column.strip(), justify="right" if column.endswith(" ") else "left", no_wrap=True)
    return table


def emit(console: Console, table: Table) -> None:
    """The title by itself: rich wraps it to the table's width."""
    title, table.title = table.title, None
    console.print(title, style="bold", soft_wrap=True)
    console.print(table)
    if not console.is_terminal:
        console.print()


def number(value: float | None) -> str:
    """Three significant digits or more."""
    if value is None or math.isnan(value):
        return "-"
    digits = 0 if abs(value) >= 1000 or value == int(value) else 1 if abs(value) >= 100 else 2
    return f"{value:,.{digits}f}"


def two_digits(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def milliseconds(values: Spread) -> list[str]:
    return [
        number(1000 * value)
        for value in (values.mean, values.median, *(value for _, value in values.percentiles), values.max)
    ]


def show(summary: Summary, run: RawRun, percentile_metrics: Sequence[str], notes: Sequence[str] = (),
    warned: Sequence[str] = (),
         console: Console | None = None) -> None:  # fmt: skip
    console = console or console_of()
    emit(console, rates(console, summary))
    if summary.e2e is not None:
        emit(console, latencies(console, summary, percentile_metrics))
    for table in (verifications(console, run), categories(console, summary), failures(console, summary)):
        if table is not None:
            emit(console, table)
    for line in (*notes, *remarks(summary, run)):
        console.print(f"note: {line}", soft_wrap=True)
    for line in (*warned, *warnings(summary, run)):
        console.print(f"warning: {line}", style="yellow", soft_wrap=True)


def rates(console: Console, summary: Summary) -> Table:
    table = table_of(
        console,
        f"{summary.completed:,} of {quantity(summary.requests, 'request')} in {summary.seconds:,.2f} s",
        "",
        " total ",
        "per second ",
    )
    rows: list[tuple[str, float | None, float | None]] = [
        ("requests", summary.completed, summary.request_throughput),
        ("input tokens", summary.input_tokens, summary.input_throughput),
        ("output tokens", summary.output_tokens, summary.output_throughput),
        ("all tokens", summary.input_tokens + summary.output_tokens, summary.total_throughput),
        ("output tokens, best second", None, summary.peak_output),
        ("output tokens per user", None, None if summary.per_user is None else summary.per_user.median),
    ]
    if summary.goodput is not None:
        rows.append(("good requests", round(summary.goodput * summary.seconds), summary.goodput))
    for name, total, rate in rows:
        table.add_row(
            name, number(total) if total is not None else "", number(rate) if rate is not None else ""
        )
    table.add_row("requests at once, peak", number(summary.peak_concurrency))
    table.add_row("requests at once, mean", number(summary.concurrency))
    if (price := summary.price) is not None:
        table.add_row("cost", f"{price.total:,.4f}")
        table.add_row("cost per million input tokens", f"{price.per_million_input:,.4f}")
        table.add_row("cost per million output tokens", f"{price.per_million_output:,.4f}")
    return table


def latencies(console: Console, summary: Summary, metrics: Sequence[str]) -> Table:
    assert summary.e2e is not None
    shares = [f"p{share:g} " for share, _ in summary.e2e.percentiles]
    table = table_of(console, "latency in ms", "", "mean ", "median ", *shares, "max ")
    spreads = {"ttft": summary.ttft, "tpot": summary.tpot, "itl": summary.itl, "e2el": summary.e2e}
    rows = [(NAMES[name], spreads[name]) for name in NAMES if name in metrics]
    if summary.from_planned is not None:
        rows += [("  from planned time", summary.from_planned), ("lateness of sending", summary.lateness)]
        rows += (
            [("wait for a slot", summary.slot_wait)]
            if summary.slot_wait is not None and summary.slot_wait.max > 1e-3
            else []
        )
    for name, values in rows:
        if values is not None:
            table.add_row(name, *milliseconds(values))
    return table


def verifications(console: Console, run: RawRun) -> Table | None:
    """Returns the table of the server's counters over this run alone."""
    server = run.server
    if server is None or not server.verifications:
        return None
    table = table_of(console, f"acceptance, from {server.server}'s counters over this run", "", " ")
    table.add_row("acceptance length", two_digits(server.length))
    if server.rate is not None:
        table.add_row("acceptance rate", f"{server.rate:.1%}")
    for index, rate in enumerate(server.rates_at, 1):
        table.add_row(f"  at position {index}", f"{rate:.1%}")
    table.add_row("verifications", number(server.verifications))
    return table


def categories(console: Console, summary: Summary) -> Table | None:
    if not summary.categories:
        return None
    table = table_of(
        console,
        "by category",
        "category",
        "requests ",
        "output tokens ",
        "tokens per step ",
        "acceptance rate ",
        "TPOT ms, mean ",
    )
    for category in summary.categories:
        rate = "-" if category.rate is None else f"{category.rate:.1%}"
        table.add_row(category.name, number(category.requests), number(category.output_tokens),
            two_digits(category.tokens_per_step), rate,
                     "-" if category.tpot is None else number(1000 * category.tpot.mean))  # fmt: skip
    return table


def failures(console: Console, summary: Summary) -> Table | None:
    if not summary.failures:
        return None
    table = table_of(
        console,
        f"{quantity(summary.requests - summary.completed, 'request')} failed",
        "reason",
        "requests ",
        "for example",
    )
    table.columns[2].no_wrap = False
    for reason, count, example in summary.failures:
        table.add_row(reason, number(count), example)
    return table


def remarks(summary: Summary, run: RawRun) -> Iterator[str]:
    if summary.cached_tokens is not None and summary.input_tokens:
        yield (
            f"{summary.cached_tokens:,} of the input tokens "
            f"({summary.cached_tokens / summary.input_tokens:.1%}) were in the prefix cache"
        )
    elif run.server is not None and run.server.cached is not None and run.server.prompt:
        yield (
            f"{run.server.cached:,.0f} of the input tokens "
            f"({run.server.cached / run.server.prompt:.1%}) were in the prefix cache"
        )
    if (prompts := summary.prompts) is not None and prompts.differ:
        yield (f"{prompts.differ:,} of {prompts.compared:,} prompts have another number of tokens than was "
f"meant, on average "
               f"{prompts.mean_difference:+.2f}, at most {prompts.largest:+,}")  # fmt: skip
    if summary.short:
        yield (
            f"{summary.short:,} answers were shorter than they might be: the model ended them (--ignore-eos)"
        )
    if summary.price is not None:
        price = summary.price
        yield (f"an output token costs {price.ratio:g} input tokens (--output-price-ratio); with input for "
f"nothing, a million output "
               f"tokens cost {price.per_million_output_alone:,.4f}")  # fmt: skip
    if summary.categories and not any(category.tokens_per_step for category in summary.categories):
        yield (
            "this server says nothing of single requests: for acceptance by category, run each with "
            "--spec-bench-category"
        )


def warnings(summary: Summary, run: RawRun) -> Iterator[str]:
    counted = dict(summary.counted_by)
    if BY_CHUNK in counted:
        yield (
            f"{counted[BY_CHUNK]:,} answers came without usage, and their chunks are counted as one "
            f"token each: give a --tokenizer"
        )
    if BY_LENGTH in counted:
        yield (f"in {counted[BY_LENGTH]:,} answers tokens are divided among the chunks by characters: ITL "
f"and TPOT are estimates "
               "(the server has no continuous_usage_stats; a --tokenizer is better)")  # fmt: skip
    if BY_TOKENIZER in counted:
        yield (f"in {counted[BY_TOKENIZER]:,} answers the tokens of each chunk are the tokenizer's count: "
f"the server has no "
               "continuous_usage_stats")  # fmt: skip
    if (
        summary.lateness is not None
        and (late := dict(summary.lateness.percentiles).get(99, summary.lateness.max)) > LATE
    ):
        yield (f"requests were sent late (p99 {1000 * late:,.1f} ms, at most "
f"{1000 * summary.lateness.max:,.1f} ms): this client or its "
               "machine is too slow for the rate, and latencies count from the sending")  # fmt: skip
    if summary.client_load > BUSY:
        yield (
            f"this client has used {summary.client_load:.0%} of a core: its own times are part of the figures"
        )
    if (
        run.server is not None
        and summary.completed == summary.requests
        and run.server.generated > 1.02 * summary.output_tokens + 16
    ):
        yield (f"the server has generated {run.server.generated:,.0f} tokens and this run got "
f"{summary.output_tokens:,}: there were other "
               "clients, and the counters have their requests too")  # fmt: skip


def median_of(values: Spread | None, scale: float) -> str | None:
    return None if values is None else number(scale * values.median)


def p99_of(values: Spread | None, scale: float) -> str | None:
    return None if values is None else number(scale * dict(values.percentiles).get(99, values.max))


def swept(point: Point) -> list[tuple[str, str | None]]:
    """The rows of a sweep's table for this load. None: not measured."""
    summary, length = point.summary, point.server.length if point.server is not None else None
    latencies = (
        ("TTFT, ms", summary.ttft, 1000),
        ("TPOT, ms", summary.tpot, 1000),
        ("E2EL, s", summary.e2e, 1),
    )
    return [
        ("requests", f"{summary.completed:,}/{summary.requests:,}"),
        ("requests per second", number(summary.request_throughput)),
        ("good requests per second", None if summary.goodput is None else number(summary.goodput)),
        ("output tokens per second", number(summary.output_throughput)),
        ("  per user, median", median_of(summary.per_user, 1)),
        *(row for name, values, scale in latencies
          for row in ((f"{name}, median", median_of(values, scale)), ("  p99", p99_of(values, scale)))),
        ("acceptance length", None if length is None else two_digits(length)),
        ("cost per million output",
            None if summary.price is None else f"{summary.price.per_million_output:,.4f}"),
    ]  # fmt: skip


def show_sweep(points: Sequence[Point], what: str, console: Console | None = None) -> None:
    """A column for each load."""
    console = console or console_of()
    loads = [number(point.load) if math.isfinite(point.load) else "inf" for point in points]
    best = knee(points)
    table = table_of(console, f"by {what}", what, *(f"{load} " for load in loads))
    for row in zip(*map(swept, points), strict=True):
        if any(cell is not None for _, cell in row):
            table.add_row(row[0][0], *("-" if cell is None else cell for _, cell in row))
    if best is not None:
        table.add_row("", *("knee" if i == best else "" for i in range(len(points))))
    emit(console, table)
    if best is not None:
        console.print(
            f"note: the knee is where output throughput by mean latency is largest: {loads[best]} {what}",
            soft_wrap=True,
        )
    elif (end := largest_power(points)) is not None:
        side = "lowest" if end == 0 else "highest"
        console.print(
            f"note: no knee was found: output throughput by mean latency is largest at the sweep's {side} "
            f"load, {loads[end]} {what}; add {'lower' if end == 0 else 'higher'} loads",
            soft_wrap=True,
        )


@contextmanager
def progress(total: int, shown: bool, title: str) -> Iterator[Callable[[Measured], None]]:
    """Shows the progress on standard error, if that is a terminal."""
    if not (shown and sys.stderr.isatty()):
        yield lambda _: None
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(),
        TextColumn("{task.fields[more]}"), TimeElapsedColumn(),
               TimeRemainingColumn())  # fmt: skip
    with Progress(*columns, console=console_of(error=True), transient=True, refresh_per_second=4) as bar:
        task = bar.add_task(title, total=total, more="")
        failed = tokens = 0

        def done(request: Measured) -> None:
            nonlocal failed, tokens
            failed, tokens = failed + (request.failure is not None), tokens + request.output_tokens
            bar.update(
                task, advance=1, more=f"{tokens:,} tokens" + (f", {failed:,} failed" if failed else "")
            )

        yield done
