"""Whole steps of the engine on a GPU, with random weights of published shapes: `python benchmarks/gpu_step.py --json FILE`.

For each model and batch: plain decoding, chains of 1, 3 and 7 drafts and a tree, with synthetic acceptance by a published curve, which
makes the engine's speed comparable without the models' weights. At batch 1 also kernels per step and the share of time in which the GPU
is idle, from a profiler's trace. All are compared with transformers, eager and compiled with a static cache, and with the bound: bytes
that a step must read over the copy bandwidth measured in the same run, and 1.6 us per kernel.

`--trained` adds a model that is trained first, on this machine's Python files (trained.py), with its real acceptance.
`--dry-run` runs everything at toy size, on a CPU too, and prints no numbers: a test of the benchmark itself.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported

from common.record import save
from common.shapes import SHAPES, TOYS, Traffic, write_config

from mtpserve.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, SpecConfig
from mtpserve.core.request import Request
from mtpserve.core.sampling import SamplingParams
from mtpserve.engine.build import build_engine
from mtpserve.engine.engine import Engine

ARMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "k=1": {"speculative_num_steps": 1},
    "k=3": {"speculative_num_steps": 3},
    "k=7": {"speculative_num_steps": 7},
    "tree": {"speculative_num_steps": 3, "speculative_eagle_topk": 2, "speculative_num_draft_tokens": 8},
}
GAP = 1.6e-6  # seconds per kernel in a graph, fitted to published H100 numbers


@dataclass(frozen=True, slots=True)
class Sizes:
    context: int
    batches: tuple[int, ...]
    steps: int  # timed
    warm_up: int
    profiled: int
    peer_tokens: int


FULL = Sizes(context=1024, batches=(1, 2, 4, 8, 16, 32, 64, 128), steps=60, warm_up=12, profiled=20, peer_tokens=128)
TOY = Sizes(context=12, batches=(1, 3), steps=4, warm_up=2, profiled=2, peer_tokens=4)


@dataclass(frozen=True, slots=True)
class Row:
    model: str
    arm: str
    batch: int
    step_ms: float  # median
    accept_length: float
    tokens_per_second: float
    speedup: float | None = None  # against plain decoding of the same batch
    multiplier: float | None = None  # what a step costs, in steps of plain decoding: accept_length / speedup
    bound_share: float | None = None  # of the tokens per second that the bound allows
    kernels: float | None = None  # per step
    idle: float | None = None  # share of the time in which no kernel runs


def engine_of(directory: Path, arm: dict[str, Any], sizes: Sizes, curve: str | None, token_map: str | None) -> Engine:
    spec = SpecConfig(speculative_algorithm="none")
    if arm:
        spec = SpecConfig(
            speculative_algorithm="MTP",
            speculative_adaptive=False,
            speculative_synthetic_acceptance=curve,
            speculative_token_map=token_map,
            **arm,
        )  # fmt: skip
    most, longest = max(sizes.batches), sizes.context + 8 * (sizes.steps + sizes.warm_up + sizes.profiled) + 64
    dummy = "dummy" if curve is not None else "auto"
    return build_engine(
        EngineConfig(
            model=ModelConfig(model=str(directory), load_format=dummy, context_length=longest, dtype="auto"),
            cache=CacheConfig(page_size=64, max_total_tokens=most * (longest + 128)),
            spec=spec,
            scheduler=SchedulerConfig(max_running_requests=most, chunked_prefill_size=max(2048, most * 8)),
        )
    )


def synchronise() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def decode(engine: Engine, sizes: Sizes, batch: int, prompts: list[list[int]], temperature: float) -> tuple[list[float], int]:
    """→ seconds of each timed step, tokens generated in all of them. The requests continue."""
    for i in range(batch):
        params = SamplingParams(max_tokens=None, temperature=temperature, seed=i, ignore_eos=True)
        engine.add(Request(f"{batch}-{i}", prompts[i % len(prompts)], params))
    started: set[str] = set()
    while len(started) < batch:
        started |= {event.id for event in engine.step() if event.tokens}
    for _ in range(sizes.warm_up):
        engine.step()
    synchronise()
    engine.stats.accept_lengths[:] = [0] * len(engine.stats.accept_lengths)
    times, tokens = [], 0
    for _ in range(sizes.steps):
        start = time.perf_counter()
        tokens += sum(len(event.tokens) for event in engine.step())
        times.append(time.perf_counter() - start)
    synchronise()
    return times, tokens


def end(engine: Engine) -> None:
    for request in list(engine._scheduler.live):
        engine.abort(request)
    while engine.has_work:
        engine.step()


def traced(engine: Engine, steps: int) -> tuple[float | None, float | None]:
    """→ kernels per step, idle share; None on a CPU."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CUDA] if torch.cuda.is_available() else [ProfilerActivity.CPU]
    with profile(activities=activities) as recorded:
        for _ in range(steps):
            engine.step()
        synchronise()
    if not torch.cuda.is_available():
        return None, None
    ranges = sorted((e.time_range.start, e.time_range.end) for e in recorded.events() if e.device_type == torch.autograd.DeviceType.CUDA)
    busy, last = 0.0, ranges[0][0]
    for start, stop in ranges:
        busy += max(stop - max(start, last), 0.0)
        last = max(last, stop)
    return len(ranges) / steps, 1 - busy / (last - ranges[0][0])


def copy_bandwidth(dry: bool) -> float:
    """Bytes per second, read and written."""
    size = 1 << (16 if dry else 30)
    source = torch.empty(size, dtype=torch.uint8, device="cuda" if torch.cuda.is_available() else "cpu")
    target, best = torch.empty_like(source), float("inf")
    for _ in range(10):
        synchronise()
        start = time.perf_counter()
        target.copy_(source)
        synchronise()
        best = min(best, time.perf_counter() - start)
    return 2 * size / best


def measure(name: str, directory: Path, config: dict[str, Any], arms: list[str], sizes: Sizes, args: argparse.Namespace) -> Iterator[Row]:
    bandwidth, plain = copy_bandwidth(args.dry_run), dict[int, float]()
    traffic = Traffic(config)
    real = name == "trained"
    prompts = held_out(directory, sizes) if real else make_prompts(config["vocab_size"], sizes)
    curve = None if real else args.curve
    for arm in arms:
        engine = engine_of(directory, ARMS[arm], sizes, curve, args.token_map)
        drafts = ARMS[arm].get("speculative_num_draft_tokens", ARMS[arm].get("speculative_num_steps", 0) + 1) - 1
        for batch in sizes.batches:
            times, tokens = decode(engine, sizes, batch, prompts, args.temperature)
            kernels, idle = traced(engine, sizes.profiled) if batch == 1 else (None, None)
            lengths = engine.stats.accept_lengths
            length = sum((n + 1) * count for n, count in enumerate(lengths)) / sum(lengths) if sum(lengths) else 1.0
            speed = tokens / sum(times)
            plain.setdefault(batch, speed)
            least = traffic.step(batch, sizes.context, drafts) / bandwidth + GAP * (kernels or 0)
            gained = speed / plain[batch] if arms[0] == "plain" else None
            yield Row(
                name, arm, batch, 1e3 * median(times), length, speed, gained, None if gained is None else length / gained,
                speed * least / (batch * length), kernels, idle,
            )  # fmt: skip
            end(engine)
        del engine
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def make_prompts(vocab: int, sizes: Sizes) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(1, vocab, (8, sizes.context), generator=generator).tolist()


def held_out(directory: Path, sizes: Sizes) -> list[list[int]]:
    """Of the files that the trained model has not seen."""
    from tokenizers import Tokenizer
    from trained import FULL as TRAINED, texts

    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    encoded = (tokenizer.encode(text).ids[: sizes.context] for text in texts(TRAINED.corpus)[1])
    return [ids for ids in encoded if len(ids) == sizes.context][:8]


def peers(name: str, config: dict[str, Any], sizes: Sizes, dry: bool) -> Iterator[Row]:
    """transformers with random weights of the same shape, greedy, batch 1: tokens per second of what comes after the first."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, Qwen2Config, Qwen2ForCausalLM

    known = {key: value for key, value in config.items() if key not in ("architectures", "model_type", "torch_dtype", "eos_token_id")}
    made, kind = (DeepseekV3Config, DeepseekV3ForCausalLM) if name == "moe" else (Qwen2Config, Qwen2ForCausalLM)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_default_dtype(torch.bfloat16 if device.type == "cuda" else torch.float32)
    with device:
        model: Any = kind(made(**known, eos_token_id=None)).eval()
    torch.set_default_dtype(torch.float32)
    ids = torch.tensor(make_prompts(config["vocab_size"], sizes)[:1], device=device)

    def seconds(new: int, **how: Any) -> float:
        synchronise()
        start = time.perf_counter()
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new, do_sample=False, **how)
        synchronise()
        return time.perf_counter() - start

    for arm in ("transformers, eager", "transformers, compiled"):
        how: dict[str, Any] = {}
        if arm.endswith("compiled"):
            how = {"cache_implementation": "static", "disable_compile": True}
            compiler = {"backend": "aot_eager"} if dry else {"mode": "reduce-overhead", "fullgraph": True}
            model.forward = torch.compile(model.forward, **compiler)
        for new in (2, sizes.peer_tokens, sizes.peer_tokens):  # warm-up
            seconds(new, **how)
        spent = median(seconds(sizes.peer_tokens, **how) - seconds(1, **how) for _ in range(3))
        each = spent / (sizes.peer_tokens - 1)
        yield Row(name, arm, 1, 1e3 * each, 1.0, 1 / each)


def show(row: Row) -> None:
    def shown(value: float | None, digits: int) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    print(
        f"{row.model:8} {row.arm:24} batch {row.batch:4}  {row.step_ms:8.3f} ms  AL {row.accept_length:5.2f}",
        f"{row.tokens_per_second:9.1f} tok/s  x {shown(row.speedup, 2)}  M {shown(row.multiplier, 2)}  bound {shown(row.bound_share, 2)}",
        f"kernels {shown(row.kernels, 0)}  idle {shown(row.idle, 3)}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--batches", nargs="+", type=int)
    parser.add_argument("--curve", default="glm-5.2-mtp", help="see --speculative-synthetic-acceptance")
    parser.add_argument("--token-map", help="see --speculative-token-map")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--no-peers", action="store_true", help="leave transformers out")
    parser.add_argument("--trained", type=float, metavar="MINUTES", help="train a model of 125 M parameters so long, and measure it too")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--json")
    args = parser.parse_args()
    if not args.dry_run and not torch.cuda.is_available():
        print("no GPU: there is nothing to time; --dry-run tries everything at toy size")
        return
    given, sizes = (TOYS, TOY) if args.dry_run else (SHAPES, FULL)
    if args.batches:
        sizes = Sizes(**(asdict(sizes) | {"batches": tuple(args.batches)}))
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        models = {name: (write_config(Path(scratch) / name, given[name]), given[name]) for name in args.models}
        if args.trained is not None:
            from trained import FULL as TRAINED, TOY as TRAINED_TOY, train

            directory = train(Path(scratch) / "trained", args.trained, TRAINED_TOY if args.dry_run else TRAINED)
            models["trained"] = directory, json.loads((directory / "config.json").read_text())
        for name, (directory, config) in models.items():
            ours = measure(name, directory, config, args.arms, sizes, args)
            for row in (*ours, *(() if args.no_peers else peers(name, config, sizes, args.dry_run))):
                rows.append(row)
                if not args.dry_run:
                    show(row)
    if args.dry_run:
        print(f"{len(rows)} rows would be measured; nothing was")
        return
    save(args.json, {"rows": [asdict(row) for row in rows], "curve": args.curve, "context": sizes.context, "copy": copy_bandwidth(False)})


if __name__ == "__main__":
    main()
