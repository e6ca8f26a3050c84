"""`mtpserve bench WHAT …`: the benchmarks, each in a module of its own that is imported when it runs."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from mtpserve.cli.options import suggest
from mtpserve.core.errors import ConfigError

# name → "module:function", which takes the arguments after the name and returns the exit code; the module has
# a `parser()`, too.
BENCHMARKS = {
    "serve": "mtpserve.tools.bench.serve.bench_serve:run",
    "eval": "mtpserve.tools.bench.eval.bench_eval:run",
    "spec": "mtpserve.tools.bench.spec.bench_spec:run",
    "cache": "mtpserve.tools.simulate.bench_cache:run",
}
HELP = {
    "serve": "benchmark a running server with OpenAI's API: throughput, latencies, acceptance, cost",
    "eval": (
        "score a model on questions from files, and compare its answers with those without drafts or of "
        "another server"
    ),
    "spec": (
        "compare draft depths and trees in one engine: acceptance, step times, speed-up, the best "
        "options per batch size"
    ),
    "cache": (
        "simulate a trace of requests: cache hit rate and time to the first token for several KV cache sizes"
    ),
}


def usage() -> str:
    lines = [f"  {name:10} {HELP[name]}" for name in BENCHMARKS]
    return "\n".join(
        [
            "usage: mtpserve bench WHAT [options]",
            "",
            *lines,
            "",
            "mtpserve bench WHAT --help lists the options.",
        ]
    )


def run(arguments: Sequence[str]) -> int:
    what = arguments[0] if arguments else "--help"
    if what in ("-h", "--help", "help"):
        print(usage())
        return 0 if arguments else 2
    if what not in BENCHMARKS:
        raise ConfigError(
            f"unknown benchmark {what!r}{suggest(what, BENCHMARKS)} (see mtpserve bench --help)"
        )
    module, function = BENCHMARKS[what].split(":")
    code: int = getattr(import_module(module), function)(arguments[1:])
    return code
