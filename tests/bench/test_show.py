"""What a user sees: tables, notes, warnings, the picture, the JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from mtpserve.core.errors import ConfigError
from mtpserve.tools.bench.exported import ServerCounters
from mtpserve.tools.bench.serve.measured import BY_CHUNK, BY_LENGTH, Arrival, Failure, Measured, OwnFigures, Sent
from mtpserve.tools.bench.serve.plot import check_plot, plot
from mtpserve.tools.bench.serve.results import as_json, details, finite, writable, write
from mtpserve.tools.bench.serve.run import RawRun
from mtpserve.tools.bench.serve.show import NAMES, number, show, show_sweep
from mtpserve.tools.bench.serve.summary import SummaryOptions, summarise
from mtpserve.tools.bench.serve.sweep import Point

ONE = Measured(Sent(0.0, 0.0, 0.0), 2.0, arrivals=(Arrival(1.0, 1), Arrival(2.0, 4)), prompt_tokens=10, output_tokens=5, cached_tokens=4)
SERVER = ServerCounters("mtpserve", 10, 30, 15, (8, 5, 2), (10, 10, 10), 20, 8, 10)


def run_of(*requests: Measured, server: ServerCounters | None = SERVER, cpu: float = 0.0) -> RawRun:
    return RawRun(requests or (ONE, ONE), 0.0, server, cpu)


def shown(run: RawRun, notes: tuple[str, ...] = (), metrics: tuple[str, ...] = tuple(NAMES), **options: Any) -> str:
    console = Console(width=160, record=True, file=StringIO(), highlight=False, markup=False)
    show(summarise(run, SummaryOptions(**options)), run, metrics, notes, ("mind this",), console)
    return console.export_text()


def test_the_report() -> None:
    text = shown(run_of(), ("made up",), price_per_hour=3600.0, goodput={"ttft": 1.0})
    rows = [line.split() for line in text.splitlines()]
    for row in (["input", "tokens", "20", "10"], ["output", "tokens", "10", "5"], ["good", "requests", "2", "1"], ["cost", "2.0000"],
                ["acceptance", "length", "2.50"], ["acceptance", "rate", "50.0%"], ["at", "position", "1", "80.0%"]):  # fmt: skip
        assert row in rows
    assert "2 of 2 requests in 2.00 s" in text and "TTFT, first token" in text
    assert (
        "note: made up" in text
        and "8 of the input tokens (40.0%) were in the prefix cache" in text
        and text.count("warning") == 1
        and "warning: mind this" in text
    )
    assert "ITL" not in shown(run_of(), metrics=("ttft",))


def test_failures_and_what_is_in_doubt() -> None:
    failed = replace(ONE, failure=Failure("HTTP 429", "the queue is full"))
    late = replace(ONE, sent=Sent(0.0, 0.5, 0.5), counted_by=BY_LENGTH, max_tokens=9)
    text = shown(run_of(failed, late, replace(late, counted_by=BY_CHUNK), cpu=1.99, server=replace(SERVER, generated=500)), open_loop=True)
    assert "1 request failed" in text and "the queue is full" in text and "2 answers were shorter" in text
    assert "sent late (p99 500.0 ms" in text and "divided among the chunks by characters" in text
    assert "counted as one token each" in text and "100% of a core" in text and "other clients" not in text, "one has failed"
    assert "there were other clients" in shown(run_of(server=replace(SERVER, generated=500)))
    assert "0 of 1 request" in shown(run_of(failed))


def test_categories_need_the_servers_figures() -> None:
    known = replace(ONE, category="qa", figures=OwnFigures(2, 6, 3))
    assert "2.50" in shown(run_of(known)) and "--spec-bench-category" not in shown(run_of(known))
    assert "--spec-bench-category" in shown(run_of(replace(known, figures=None)))


def points() -> list[Point]:
    made = []
    for load, tokens, seconds in ((1, 10, 1.0), (2, 18, 1.1), (4, 20, 1.9)):
        requests = [replace(ONE, end=seconds, arrivals=(Arrival(0.2, 1), Arrival(seconds, tokens - 1)), output_tokens=tokens)] * 2
        made.append(Point(load, summarise(run_of(*requests), SummaryOptions()), SERVER, tuple(requests)))
    return made


def swept(made: list[Point], width: int = 80) -> list[list[str]]:
    console = Console(width=width, record=True, file=StringIO(), force_terminal=True)
    show_sweep(made, "requests at once", console)
    return [line.split() for line in console.export_text().splitlines()]


def test_the_sweeps_table() -> None:
    rows = [" ".join(row) for row in swept(points())]
    for row in (
        "requests at once 1 2 4",
        "requests 2/2 2/2 2/2",
        "requests per second 2 1.82 1.05",
        "output tokens per second 20 32.73 21.05",
        "E2EL, s, median 1 1.10 1.90",
        "p99 200 200 200",
        "acceptance length 2.50 2.50 2.50",
        "knee",
    ):
        assert row in rows
    assert not any(row.startswith(("good", "cost")) for row in rows) and rows[-1].endswith("largest: 2 requests at once")
    last = " ".join(swept([points()[0], points()[0], points()[1]])[-1])
    assert last.endswith(
        "no knee was found: output throughput by mean latency is largest at the sweep's highest load, 2 requests at once; add higher loads"
    )
    options = SummaryOptions(goodput={"ttft": 1.0}, price_per_hour=36.0)
    rows = [" ".join(row) for row in swept([replace(each, summary=summarise(run_of(*each.requests), options)) for each in points()])]

    assert "good requests per second 2 1.82 1.05" in rows and any(row.startswith("cost per million output ") for row in rows)
    failed = replace(points()[0], summary=summarise(run_of(replace(ONE, failure=Failure("HTTP 500"))), SummaryOptions()), server=None)
    assert ["acceptance", "length", "-", "2.50"] in swept([failed, points()[0]])


@pytest.mark.parametrize(("order", "side", "more"), [([1, 2, 2], "lowest", "lower"), ([0, 0, 1], "highest", "higher")])
def test_a_sweep_without_a_knee_says_which_loads_are_missing(order: list[int], side: str, more: str) -> None:
    rows = [" ".join(row) for row in swept([points()[i] for i in order], 200)]
    assert "knee" not in rows
    assert rows[-1].endswith(f"largest at the sweep's {side} load, 2 requests at once; add {more} loads")


@pytest.mark.parametrize("number_of", [1, 3])
@pytest.mark.parametrize("server", [True, False])
def test_pictures(tmp_path: Path, number_of: int, server: bool) -> None:
    made = points()[:number_of] if server else [replace(point, server=None) for point in points()[:number_of]]
    whole = [replace(point, summary=replace(point.summary, per_user=None)) for point in made]
    for each in (made, whole):
        plot(str(tmp_path / "a.svg"), each, "requests at once", "a title")
        text = (tmp_path / "a.svg").read_text()
        assert text.startswith("<?xml") and ("position in the proposal" in text or "<path" in text)
    with pytest.raises(ConfigError, match="No such file"):
        plot(str(tmp_path / "none" / "a.png"), made, "x", "y")


def test_kinds_of_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    check_plot("a.png")
    with pytest.raises(ConfigError, match=r"--plot must be a file whose name ends in one of .*\.png.*, got 'a.doc'"):
        check_plot("a.doc")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"--plot needs matplotlib, and it is not installed: pip install 'mtpserve\[bench\]'"):
        check_plot("a.png")


def test_json(tmp_path: Path) -> None:
    run = run_of(replace(ONE, category="qa", figures=OwnFigures(2, 6, 3), meant=9), replace(ONE, failure=Failure("HTTP 500", "x")))
    summary = summarise(run, SummaryOptions((50.0, 99.9), price_per_hour=1.0, goodput={"e2el": 1.0}, open_loop=True))
    file = tmp_path / "out.jsonl"
    for _ in range(2):
        write(
            "output-file", str(file), as_json(summary, run, {"request_rate": float("inf")}) | details(run.requests, run.start), append=True
        )
    first, second = map(json.loads, file.read_text().splitlines())
    assert first == second and first["request_rate"] == "inf"
    wanted = {
        "completed": 1, "failed": 1, "total_input_tokens": 10, "total_output_tokens": 5, "duration": 2.0, "output_throughput": 2.5,
        "request_throughput": 0.5, "total_token_throughput": 7.5, "mean_ttft_ms": 1000, "median_tpot_ms": 250, "p99.9_itl_ms": 250,
        "p50_e2el_ms": 2000, "mean_e2el_from_planned_ms": 2000, "max_lateness_ms": 0, "request_goodput": 0, "accept_length": 2.5,
        "spec_decode_acceptance_rate": 50, "spec_decode_per_position_acceptance_rates": [0.8, 0.5, 0.2], "cached_prompt_tokens": 8,
        "max_concurrent_requests": 2, "itls": [[0.25] * 4] * 2, "tokens_in_chunks": [[1, 4]] * 2, "errors": ["", "HTTP 500: x"],
    }  # fmt: skip
    assert {name: first[name] for name in wanted} == wanted
    assert first["failures"] == [{"reason": "HTTP 500", "count": 1, "example": "x"}] and first["categories"][0]["tokens_per_step"] == 2.5
    assert first["prompt_tokens_against_intended"]["differ"] == 1 and first["cost"]["output_price_ratio"] == 4


def test_files_are_checked_before_the_run(tmp_path: Path) -> None:
    writable("output-file", str(tmp_path / "new"))
    assert not (tmp_path / "new").exists()
    for name in (str(tmp_path), str(tmp_path / "none" / "x")):
        with pytest.raises(ConfigError, match="--output-file"):
            writable("output-file", name)
    assert finite({"a": [float("inf"), 1.0]}) == {"a": ["inf", 1.0]}


def test_numbers_are_short() -> None:
    assert [number(each) for each in (None, 0, 3, 0.123, 12.345, 123.45, 1234.5, 1e6)] == [
        "-",
        "0",
        "3",
        "0.12",
        "12.35",
        "123.5",
        "1,234",
        "1,000,000",
    ]
