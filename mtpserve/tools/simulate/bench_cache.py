"""`mtpserve bench cache --trace FILE`: what hit rate and which times to the first token a trace gets with
pools of some sizes. No model runs: the real scheduler and cache work through the trace in simulated time
(tools/simulate/simulator.py), on a device that is a formula (tools/simulate/costs.py)."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtpserve.cli.options import Values, add_options, parsed_values, settings
from mtpserve.cli.parser import Parser
from mtpserve.config import ENGINE_SECTIONS, EngineConfig
from mtpserve.config.options import check
from mtpserve.core.errors import ConfigError, quantity
from mtpserve.tools.simulate.costs import DISK, PROFILES, DeviceProfile, ModelShape, StepCost
from mtpserve.tools.simulate.simulated import OPTIONS, named, noted, passes

if TYPE_CHECKING:
    from mtpserve.models.family import Family
    from mtpserve.text.tokenizer import Tokenizer
    from mtpserve.tools.simulate.simulator import Simulated
    from mtpserve.tools.simulate.traces import Encode, TraceConversation
    from mtpserve.weights.checkpoint.hf_config import HFConfig

# The server's options that a simulation knows. A --config file may have all.
KNOWN = (
    "model", "tokenizer", "dtype", "quantization", "context_length", "page_size", "max_total_tokens",
    "kv_cache_dtype",
    "disable_radix_cache", "kv_offload_gib", "kv_offload_dir", "kv_offload_dir_gib", "max_running_requests",
    "chunked_prefill_size",
    "scheduling_policy", "schedule_conservativeness", "long_prefill_token_threshold",
    "max_long_partial_prefills", "random_seed",
    "disable_overlap_schedule", *OPTIONS,
)  # fmt: skip
SECTIONS = {name: ENGINE_SECTIONS[name] for name in ("model", "cache", "spec", "scheduler")}
PERCENTILES = (50, 90, 99)


def parser() -> Parser:
    arg_parser = Parser(
        prog="mtpserve bench cache",
        usage="%(prog)s --trace FILE --pool-tokens N,N,... [options]",
        description=(
            "Simulate a trace of requests, and report cache hit rate and time to the first token for "
            "several sizes of the KV cache. No model runs: scheduler and cache process the trace in "
            "simulated time, and a roofline model of the device gives the time of a step."
        ),
    )

    def number(group: Any, name: str, help: str, default: float | None = None) -> None:
        shown = "" if default is None else f" (default: {default:g})"
        group.add_argument(f"--{name}", metavar="X", type=float, default=default, help=help + shown)

    trace = arg_parser.add_argument_group("the trace")
    trace.add_argument(
        "--trace",
        metavar="FILE",
        required=True,
        help="file with the trace: in Mooncake's format (one JSON object per line) or ShareGPT's (a list)",
    )
    trace.add_argument(
        "--num-prompts", metavar="N", type=int, help="number of conversations of the trace (default: all)"
    )
    number(
        trace,
        "request-rate",
        "conversations per second, at random times, if the trace has no times",
        1.0,
    )
    number(trace, "think-time", "seconds before a conversation's next turn", 0.0)
    number(trace, "slowdown-factor", "factor for the trace's own times", 1.0)
    add_device(arg_parser.add_argument_group("device"), number)
    arg_parser.add_argument("--output-file", metavar="FILE", help="file for the results, as JSON")
    add_options(arg_parser, SECTIONS, KNOWN)
    return arg_parser


def add_device(device: Any, number: Callable[..., None]) -> None:
    sizes = "size of the KV cache in tokens; several sizes give one row each (default: --max-total-tokens)"
    device.add_argument("--pool-tokens", metavar="N,N,...", help=sizes)
    below = (
        "host memory for evicted KV pages, in GiB; several sizes give one row each (default: "
        "--kv-offload-gib)"
    )
    device.add_argument("--host-gib", metavar="X,X,...", help=below)
    device.add_argument(
        "--device-profile",
        choices=tuple(PROFILES),
        default="h200",
        help="device whose speed is simulated (default: h200)",
    )
    number(device, "bandwidth", "memory bandwidth in bytes per second (default: the profile's)")
    number(
        device,
        "flops",
        "16-bit matrix operations per second (default: the profile's)",
    )
    number(
        device,
        "host-bandwidth",
        "bandwidth to and from host memory in bytes per second (default: the profile's)",
    )
    number(device, "disk-bandwidth", "bandwidth of the disk in bytes per second", DISK)
    number(
        device,
        "step-overhead-ms",
        "fixed time of each step in milliseconds (default: the profile's time per kernel)",
    )


@dataclass(frozen=True, slots=True)
class CacheBench:
    """What is simulated, but for the size of the pool."""

    config: EngineConfig
    shape: ModelShape
    cost: StepCost
    context: int
    overlap: int
    host_rate: float  # bytes per second
    disk_rate: float

    @property
    def page_bytes(self) -> int:
        return self.shape.kv_bytes * self.config.cache.page_size


def run(arguments: Sequence[str]) -> int:
    options = parser().parse(arguments)
    for name in (
        "num_prompts",
        "request_rate",
        "slowdown_factor",
        "bandwidth",
        "flops",
        "host_bandwidth",
        "disk_bandwidth",
    ):
        check((value := getattr(options, name)) is None or 0 < value < math.inf, name, value, "above 0")
    for name in ("think_time", "step_overhead_ms"):
        check((value := getattr(options, name)) is None or 0 <= value < math.inf, name, value, "at least 0")
    values = parsed_values(options)
    config = decided(values, settings(values).engine)
    config = replace(
        config, scheduler=config.scheduler.on("cpu" if options.device_profile == "cpu" else "cuda")
    )
    pools, hosts = read_pools(options.pool_tokens, config), read_hosts(options.host_gib, config)
    bench = bench_of(options, values, config)
    trace = load_trace(options.trace, options, values, config)
    rows = [
        as_row(bench, tokens, host, simulate(bench, trace, tokens, host))
        for tokens in pools
        for host in hosts
    ]
    show(rows, options.trace, notes(values, options.device_profile, bench))
    if options.output_file is not None:
        write(
            options.output_file,
            {"trace": options.trace, "device_profile": options.device_profile, "pools": rows},
        )
    return 0


def bench_of(options: Any, values: Values, config: EngineConfig) -> CacheBench:
    profile = PROFILES[options.device_profile]
    profile = DeviceProfile(
        options.bandwidth or profile.bandwidth,
        options.flops or profile.flops,
        profile.gap,
        options.host_bandwidth or profile.host,
    )
    overhead = None if options.step_overhead_ms is None else options.step_overhead_ms / 1000
    shape = shape_of(config) if "model" in values else ModelShape()
    # On a CPU the host computes: nothing overlaps.
    overlap = int(options.device_profile != "cpu" and not config.scheduler.disable_overlap_schedule)
    context = config.model.context_length or shape.context
    return CacheBench(
        config,
        shape,
        StepCost.of(shape, profile, passes(config.spec) > 0, overhead),
        context,
        overlap,
        profile.host,
        options.disk_bandwidth,
    )


def read_pools(text: str | None, config: EngineConfig) -> list[int]:
    if text is None:
        if config.cache.max_total_tokens is None:
            raise ConfigError(
                "--pool-tokens says how many tokens the KV pool has: one number, or several with "
                "commas between them"
            )
        return [config.cache.max_total_tokens]
    parts = [piece.strip().replace("_", "") for piece in text.split(",")]
    if not all(piece.isdecimal() and int(piece) >= 16 for piece in parts):
        raise ConfigError(
            f"--pool-tokens must be whole numbers of at least 16 with commas between them, got {text!r}"
        )
    return [int(piece) for piece in parts]


def read_hosts(text: str | None, config: EngineConfig) -> list[int]:
    """Returns the sizes in bytes. Raises ConfigError."""
    if text is None:
        return [config.cache.host_bytes]
    try:
        sizes = [float(piece) for piece in text.split(",")]
    except ValueError:
        sizes = [-1.0]
    allowed = "numbers of GiB with commas between them"
    check(all(0 <= size < 1 << 20 for size in sizes), "host_gib", text, allowed)
    return [int(size * (1 << 30)) for size in sizes]


def decided(values: Values, config: EngineConfig) -> EngineConfig:
    """Returns the configuration with the drafter that a server would choose, as far as config.json tells.
    Raises ConfigError."""
    has_mtp = False
    if "model" in values:
        from mtpserve.models.family import dummy_layout

        hf_config, family = described(config)
        has_mtp = dummy_layout(family, hf_config) is not None
    return replace(config, spec=named(config.spec, has_mtp))


def described(config: EngineConfig) -> tuple[HFConfig, Family]:
    """Reads config.json alone. Imports torch, as all families do."""
    from mtpserve.models.registry import family_of
    from mtpserve.weights.checkpoint.hf import read_config
    from mtpserve.weights.checkpoint.hub import fetched

    hf_config = read_config(fetched(config, download=False).model.directory)
    return hf_config, family_of(hf_config)


def shape_of(config: EngineConfig) -> ModelShape:
    from mtpserve.core.arch.model import page_groups

    hf_config, family = described(config)
    arch = family.arch(hf_config, int(passes(config.spec) > 0))
    if page_groups(arch.layers) != (None,):
        raise ConfigError(
            f"--model {config.model.model}: some layers have sliding windows, which simulations do "
            "not support"
        )
    size = {"float32": 4}.get(arch.dtype if config.model.dtype == "auto" else config.model.dtype, 2)
    quantization = config.model.quantization
    small = quantization in ("fp8", "int4", "int8") or (
        quantization != "none" and hf_config.has("quantization_config")
    )
    return ModelShape.of(
        arch, 1 if small else size, 1 if config.cache.kv_cache_dtype.startswith("fp8") else size
    )


def load_trace(file: str, options: Any, values: Values, config: EngineConfig) -> list[TraceConversation]:
    from mtpserve.tools.simulate.traces import read_trace

    encode = encoder(config) if "tokenizer" in values or "model" in values else None
    return read_trace(
        file,
        rate=options.request_rate,
        pause=options.think_time,
        slowdown=options.slowdown_factor,
        limit=options.num_prompts,
        encode=encode,
        seed=config.scheduler.random_seed or 0,
    )


def encoder(config: EngineConfig) -> Encode:
    """Loads the tokenizer with the first text: not all traces have any."""
    loaded: list[Tokenizer] = []

    def encode(text: str) -> list[int]:
        if not loaded:
            from mtpserve.text.tokenizer import tokenizer_of

            loaded.append(tokenizer_of(config.model))
        return loaded[0].encode(text, special=False)

    return encode


def simulate(bench: CacheBench, trace: Sequence[TraceConversation], tokens: int, host: int) -> Simulated:
    from mtpserve.tools.simulate.simulated_tiers import PageTimes
    from mtpserve.tools.simulate.simulator import TierSizes, simulation_of

    if sys.stderr.isatty():
        print(f"simulating a pool of {tokens:,} tokens ...", file=sys.stderr)
    page, cache = bench.page_bytes, bench.config.cache
    disk = None if cache.kv_offload_dir is None else cache.disk_bytes // page
    below = TierSizes(host // page, disk, PageTimes(page / bench.host_rate, page / bench.disk_rate))
    return simulation_of(
        bench.config, tokens, bench.context, bench.cost, overlap=bench.overlap, below=below
    ).run(trace)


def as_row(bench: CacheBench, tokens: int, host: int, result: Simulated) -> dict[str, Any]:
    from mtpserve.tools.simulate.simulator import percentile

    def milliseconds(values: list[float]) -> dict[str, float]:
        return {f"p{share}": round(1000 * percentile(values, share / 100), 3) for share in PERCENTILES}

    return {
        "pool_tokens": tokens,
        "pool_bytes": tokens * bench.shape.kv_bytes,
        "host_bytes": host,
        "hit_rate": round(result.hit_rate, 6),
        "ideal_hit_rate": round(result.ideal_hit_rate, 6),
        "ttft_ms": milliseconds(result.first_token),
        "tpot_ms": milliseconds(result.between_tokens),
        "output_throughput": round(result.output_tokens / result.seconds, 3) if result.seconds else 0.0,
        "seconds": round(result.seconds, 6),
        "requests": result.requests,
        "refused": result.refused,
        "prompt_tokens": result.prompt_tokens,
        "cached_tokens": result.cached_tokens,
        "output_tokens": result.output_tokens,
        "steps": result.steps,
        "preemptions": result.preemptions,
        "max_running_requests": result.seats,
        "pages_peak": result.pages_peak,
    }


def notes(values: Values, profile: str, bench: CacheBench) -> list[str]:
    model = (
        bench.config.model.model if "model" in values else "no --model: a dense one of 8 billion parameters"
    )
    lines = [
        f"{model}; {bench.shape.kv_bytes:,} bytes of KV per token; times are a roofline's of "
        f"{profile}, no measurement"
    ]
    lines.append(noted(bench.config.spec))
    if not ("model" in values or "tokenizer" in values):
        lines.append("no tokenizer: in a trace of texts four characters are one token")
    return lines


def show(rows: Sequence[dict[str, Any]], file: str, notes: Sequence[str]) -> None:
    from mtpserve.tools.inspect.inspect_command import human, plain, terminal

    console = terminal()
    first = ("pool tokens", "memory", "host", "running", "hit rate", "ideal")
    columns = (*first, "TTFT p50 ms", "p90", "p99", "TPOT p50 ms", "output tok/s", "preempted")
    table = plain(
        console, f"{file}: {quantity(rows[0]['requests'], 'request')}", *(f"{column} " for column in columns)
    )
    for row in rows:
        rates = [f"{row[name]:.1%}" for name in ("hit_rate", "ideal_hit_rate")]
        times = [f"{row['ttft_ms'][f'p{share}']:,.1f}" for share in PERCENTILES]
        pool = [
            f"{row['pool_tokens']:,}",
            human(row["pool_bytes"]),
            human(row["host_bytes"]) if row["host_bytes"] else "-",
            f"{row['max_running_requests']:,}",
        ]
        rest = [
            f"{row['tpot_ms']['p50']:,.1f}",
            f"{row['output_throughput']:,.1f}",
            f"{row['preemptions']:,}",
        ]
        table.add_row(*pool, *rates, *times, *rest)
    console.print(table)
    refused = [
        f"{row['refused']:,} requests were too long for {row['pool_tokens']:,} tokens"
        for row in rows
        if row["refused"]
    ]
    for line in (*notes, *refused):
        console.print(f"note: {line}")


def write(file: str, results: dict[str, Any]) -> None:
    try:
        Path(file).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output-file {file}: {error.strerror}") from error
