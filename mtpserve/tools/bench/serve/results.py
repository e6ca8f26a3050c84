"""A run as JSON, under the names of vLLM's and SGLang's clients where they have one. Times in milliseconds
(`_ms`) or seconds."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mtpserve.core.errors import ConfigError
from mtpserve.tools.bench.serve.measured import Measured
from mtpserve.tools.bench.serve.run import RawRun
from mtpserve.tools.bench.serve.summary import Spread, Summary

TIMES = {"ttft": "ttft", "tpot": "tpot", "itl": "itl", "e2el": "e2e", "e2el_from_planned": "from_planned",
    "lateness": "lateness",
         "slot_wait": "slot_wait"}  # fmt: skip


def percent(share: float) -> str:
    return f"p{share:g}"


def of_spread(name: str, values: Spread | None, scale: float, unit: str) -> dict[str, float | None]:
    if values is None:
        return {}
    statistics = {"mean": values.mean, "median": values.median, "std": values.std, "max": values.max}
    statistics |= {percent(share): value for share, value in values.percentiles}
    return {f"{what}_{name}{unit}": scale * value for what, value in statistics.items()}


def as_json(summary: Summary, run: RawRun, setup: Mapping[str, Any]) -> dict[str, Any]:
    """`setup`: what was run."""
    results: dict[str, Any] = dict(setup) | {
        "duration": summary.seconds,
        "completed": summary.completed,
        "failed": summary.requests - summary.completed,
        "failures": [
            {"reason": reason, "count": count, "example": example}
            for reason, count, example in summary.failures
        ],
        "total_input_tokens": summary.input_tokens,
        "total_output_tokens": summary.output_tokens,
        "total_cached_tokens": summary.cached_tokens,
        "request_throughput": summary.request_throughput,
        "request_goodput": summary.goodput,
        "input_throughput": summary.input_throughput,
        "output_throughput": summary.output_throughput,
        "total_token_throughput": summary.total_throughput,
        "max_output_tokens_per_s": summary.peak_output,
        "max_concurrent_requests": summary.peak_concurrency,
        "concurrency": summary.concurrency,
        "answers_shorter_than_asked": summary.short,
        "tokens_counted_by": dict(summary.counted_by),
        "client_cpu_cores": summary.client_load,
    }
    for name, field in TIMES.items():
        results |= of_spread(name, getattr(summary, field), 1000, "_ms")
    results |= of_spread("output_throughput_per_user", summary.per_user, 1, "")
    if (prompts := summary.prompts) is not None:
        results["prompt_tokens_against_intended"] = {
            "compared": prompts.compared,
            "differ": prompts.differ,
            "mean_difference": prompts.mean_difference,
            "largest": prompts.largest,
        }
    if (price := summary.price) is not None:
        results["cost"] = {
            "total": price.total,
            "per_million_input_tokens": price.per_million_input,
            "per_million_output_tokens": price.per_million_output,
            "output_price_ratio": price.ratio,
            "per_million_output_tokens_if_input_is_free": price.per_million_output_alone,
        }
    if summary.categories:
        results["categories"] = [
            {"category": category.name, "requests": category.requests,
                "output_tokens": category.output_tokens,
             "tokens_per_step": category.tokens_per_step, "acceptance_rate": category.rate,
             "mean_tpot_ms": None if category.tpot is None else 1000 * category.tpot.mean}
            for category in summary.categories]  # fmt: skip
    return results | (run.server.as_json() if run.server is not None else {})


def details(requests: Sequence[Measured], start: float) -> dict[str, Any]:
    """One entry for each request, in seconds; start times count from the run's start."""
    return {
        "input_lens": [request.prompt_tokens for request in requests],
        "output_lens": [request.output_tokens for request in requests],
        "ttfts": [request.ttft for request in requests],
        "itls": [request.gaps for request in requests],
        "tokens_in_chunks": [[arrival.tokens for arrival in request.arrivals] for request in requests],
        "e2els": [request.e2e for request in requests],
        "start_times": [request.sent.at - start for request in requests],
        "planned_times": [request.sent.planned_at - start for request in requests],
        "finish_reasons": [request.finish for request in requests],
        "generated_texts": [request.text for request in requests],
        "errors": [
            "" if request.failure is None else f"{request.failure.reason}: {request.failure.detail}"
            for request in requests
        ],
    }


def finite(value: Any) -> Any:
    """JSON has no infinity; the peers' clients write "inf" for a rate without limit."""
    if isinstance(value, dict):
        return {name: finite(inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def write(option: str, file: str, results: Mapping[str, Any], *, append: bool) -> None:
    """One line of JSON. Raises ConfigError naming the option and the file."""
    try:
        with open(file, "a" if append else "w", encoding="utf-8") as out:
            out.write(json.dumps(finite(dict(results))) + "\n")
    except OSError as error:
        raise ConfigError(f"--{option} {file}: {error.strerror}") from error


def folder(option: str, name: str) -> None:
    """Makes it where it is missing. Raises ConfigError where that cannot be."""
    try:
        Path(name).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--{option} {name}: {error.strerror}") from error


def writable(option: str, file: str) -> None:
    """Raises ConfigError if `file` cannot be written: before the run, which may take an hour. Leaves no empty
    file behind."""
    path = Path(file)
    if path.is_dir():
        raise ConfigError(f"--{option} {file}: Is a directory")
    new = not path.exists()
    try:
        with open(path, "a", encoding="utf-8"):
            pass
        if new:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"--{option} {file}: {error.strerror}") from error
