"""`mtpserve bench serve`: a run against a server, or one for each load of a sweep; its tables, files and
picture, and its exit code."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from random import Random
from time import strftime
from typing import Any

from mtpserve.cli.parser import Parser
from mtpserve.core.errors import quantity
from mtpserve.tools.bench.dataset.arrivals import arrival_times
from mtpserve.tools.bench.dataset.asked import Questions
from mtpserve.tools.bench.dataset.datasets import questions_of
from mtpserve.tools.bench.dataset.tokenizing import BenchTokenizer, tokenizer_at
from mtpserve.tools.bench.serve.bench_peers import refuse_unknown
from mtpserve.tools.bench.serve.bench_serve_options import ServeBench, bench_of, parser
from mtpserve.tools.bench.serve.client import Client
from mtpserve.tools.bench.serve.plot import check_plot, plot
from mtpserve.tools.bench.serve.results import as_json, details, folder, writable, write
from mtpserve.tools.bench.serve.run import Load, RawRun, measure
from mtpserve.tools.bench.serve.show import progress, show, show_sweep
from mtpserve.tools.bench.serve.summary import Summary, summarise
from mtpserve.tools.bench.serve.sweep import LOADS, Point

__all__ = ["parser", "run"]

KNOWN_SHARE = 0.1  # a share of the input; more cached tokens than that are reported
FEW_IDS = 1000  # prompts of ids are below it where nobody says how large the vocabulary is


def run(arguments: Sequence[str]) -> int:
    """0; 1 if no request was answered."""
    arg_parser: Parser = parser()
    refuse_unknown(arguments, list(arg_parser._option_string_actions))
    bench = bench_of(arg_parser.parse(arguments))
    if bench.options.plot is not None:
        check_plot(bench.options.plot)
        writable("plot", bench.options.plot)
    if bench.options.output_file is not None:
        writable("output-file", bench.options.output_file)
    if bench.options.save_result:
        folder("result-dir", bench.options.result_dir or ".")
    allow_connections()
    try:
        import uvloop
    except ImportError:  # not on Windows
        points = asyncio.run(all_loads(bench))
    else:
        points = uvloop.run(all_loads(bench))
    if bench.swept is not None:
        show_sweep(points, LOADS[bench.swept])
    if bench.options.plot is not None:
        what = LOADS[bench.swept] if bench.swept is not None else "one run"
        plot(
            bench.options.plot,
            points,
            what,
            f"{bench.target.model or bench.target.base_url}, {bench.dataset.dataset_name}",
        )
    return 0 if any(point.summary.completed for point in points) else 1


def allow_connections() -> None:
    """Raises the limit of open files as far as the system lets it: each open request needs one."""
    try:
        from resource import RLIMIT_NOFILE, getrlimit, setrlimit
    except ImportError:  # not on Windows
        return
    _, hard_limit = getrlimit(RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # macOS has a lower limit of its own
        setrlimit(RLIMIT_NOFILE, (hard_limit, hard_limit))


async def all_loads(bench: ServeBench) -> list[Point]:
    async with Client(bench.target) as client:
        if bench.options.ready_check_timeout_sec:
            await client.wait_until_ready(bench.options.ready_check_timeout_sec)
        listed = await client.models()
    first = listed[0] if listed else None
    model = bench.target.model or (first.id if first is not None else None)
    bench = replace(bench, target=replace(bench.target, model=model))
    tokenizer = tokenizer_at(
        bench.options.tokenizer, bench.options.model or model, first.root if first is not None else None
    )
    return [await one_load(bench, number, load, tokenizer) for number, load in enumerate(bench.loads)]


async def one_load(bench: ServeBench, number: int, load: float, tokenizer: BenchTokenizer | None) -> Point:
    options, seed = bench.options, bench.dataset.seed + number
    rate = load if bench.swept == "request-rate" else options.request_rate
    concurrency = int(load) if bench.swept == "max-concurrency" else options.max_concurrency
    if bench.dataset.dataset_name not in ("random-ids", "custom"):
        print_status(bench, "making prompts ...")
    questions = questions_of(
        replace(bench.dataset, seed=seed), tokenizer, FEW_IDS if tokenizer is None else tokenizer.size
    )
    times = arrival_times(len(questions.measured), rate, options.burstiness, Random(seed))
    count = None if tokenizer is None else tokenizer.count
    async with Client(bench.target, count) as client:
        title = "" if bench.swept is None else f"{LOADS[bench.swept]}: {load:g} "
        with progress(questions.requests, not options.disable_tqdm, title or "requests") as done:
            raw_run = await measure(
                client,
                questions,
                Load(times, concurrency, options.multi_turn_delay),
                done,
                flush=options.flush_cache,
            )
    summary = summarise(raw_run, bench.summary)
    described = setup(bench, questions, rate, concurrency, seed)
    report(bench, summary, raw_run, questions, load)
    save(bench, as_json(summary, raw_run, described), raw_run)
    return Point(load, summary, raw_run.server, raw_run.requests)


def print_status(bench: ServeBench, text: str) -> None:
    if sys.stderr.isatty() and not bench.options.disable_tqdm:
        print(text, end="\r", file=sys.stderr)


def report(bench: ServeBench, summary: Summary, raw_run: RawRun, questions: Questions, load: float) -> None:
    if bench.swept is not None:
        rate = f"{summary.output_throughput:,.1f} output tokens per second"
        print(
            f"{LOADS[bench.swept]} {load:g}: {summary.completed:,} of "
            f"{quantity(summary.requests, 'request')}, {rate}",
            file=sys.stderr,
        )
        if summary.completed == summary.requests:
            return  # the sweep's table has the rest
    is_cached = questions.fresh and (summary.cached_tokens or 0) > KNOWN_SHARE * summary.input_tokens
    again = (
        (
            "no two prompts share anything, so the server knows these from an earlier run: another "
            "--seed, or --flush-cache",
        )
        if is_cached
        else ()
    )
    show(summary, raw_run, bench.metrics, (*bench.notes, *questions.notes), again)


def setup(
    bench: ServeBench, questions: Questions, rate: float, concurrency: int | None, seed: int
) -> dict[str, Any]:
    options = bench.options
    fields = {
        "date": strftime("%Y%m%d-%H%M%S"),
        "backend": options.backend,
        "base_url": bench.target.base_url,
        "endpoint": bench.target.endpoint,
        "model_id": bench.target.model,
        "tag": options.tag,
        "dataset_name": options.dataset_name,
        "dataset_path": options.dataset_path,
        "dataset": list(questions.notes),
        "num_prompts": questions.requests,
        "request_rate": rate,
        "burstiness": options.burstiness,
        "max_concurrency": concurrency,
        "warmup_requests": options.warmup_requests,
        "seed": seed,
        "stream": bench.target.stream,
        "request_body": dict(bench.target.body),
        "sweep": options.sweep,
    }
    return fields | dict(bench.metadata)


def save(bench: ServeBench, results: dict[str, Any], raw_run: RawRun) -> None:
    options = bench.options
    if options.output_details:
        results = results | details(raw_run.requests, raw_run.start)
    if options.output_file is not None:
        write("output-file", options.output_file, results, append=True)
    if options.save_result:
        write("result-filename", str(result_file(bench, results)), results, append=options.append_result)


def result_file(bench: ServeBench, results: dict[str, Any]) -> Path:
    """Returns the file that vLLM's client would write: backend, load, model, date. Each run of a sweep has
    its own."""
    rate, concurrency = results["request_rate"], results["max_concurrency"]
    load = f"{rate:g}qps" + ("" if concurrency is None else f"-concurrency{concurrency}")
    model = str(results["model_id"]).rstrip("/").rsplit("/", 1)[-1]
    name = (
        bench.options.result_filename
        or "-".join([bench.options.tag or bench.options.backend, load, model, results["date"]]) + ".json"
    )
    if bench.options.result_filename and bench.swept and not bench.options.append_result:
        name = f"{Path(name).stem}-{load}{Path(name).suffix}"
    return Path(bench.options.result_dir or ".") / name
