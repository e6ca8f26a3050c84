"""Throughput with depths chosen while serving, against plain decoding and each fixed depth: offline, interleaved, medians of ratios.

python benchmarks/never_slower.py --json FILE

The demo, and the demo inflated to some hundred million parameters (common/inflate.py), which answers the same. `untrained` is that with a
random projection in its draft layer, which guesses next to nothing. A ratio is taken in each round, whose arms run one after the other.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from statistics import median

import torch
from common.demo import prompts, run
from common.inflate import Shape, inflate, opened
from common.record import save
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file

from mtpserve.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, SpecConfig
from mtpserve.engine.build import build_engine
from mtpserve.engine.engine import Engine

DEPTH, TOKENS, PROMPT = 3, 96, 128
LARGE = {"layers": 12, "hidden": 1024, "heads": 8, "kv_heads": 8, "experts": 64, "experts_per_token": 8}
ARMS = {
    "plain": SpecConfig(),
    **{f"k = {k}": SpecConfig(speculative_algorithm="NEXTN", speculative_num_steps=k, speculative_adaptive=False) for k in (1, DEPTH)},
    "adaptive": SpecConfig(speculative_algorithm="NEXTN", speculative_num_steps=DEPTH),
}


def large(folder: Path) -> Path:
    """The demo's text at the cost of a larger model."""
    source = ModelConfig().directory
    config, _ = opened(source)
    inflate(source, folder / "large", replace(Shape.of(config), **LARGE))
    return folder / "large"


def untrained(model: Path, folder: Path) -> Path:
    """Its draft layer's input is a random projection of what it should be."""
    made = folder / "untrained"
    shutil.copytree(model, made)
    found = 0
    for file in made.glob("*.safetensors"):
        tensors = load_file(file)
        for name, tensor in tensors.items():
            if name.endswith("eh_proj.weight"):
                generator, found = torch.Generator().manual_seed(0), found + 1
                tensors[name] = (torch.randn(tensor.shape, generator=generator) * tensor.float().std()).to(tensor.dtype)
        save_file(tensors, file, metadata={"format": "pt"})
    if not found:
        raise SystemExit(f"{model} has no eh_proj")
    return made


def engine_of(model: Path, spec: SpecConfig, most: int) -> Engine:
    engine = build_engine(
        EngineConfig(
            model=ModelConfig(model=str(model)),
            # Each run computes its prompts, as the first one does.
            cache=CacheConfig(max_total_tokens=most * (PROMPT + TOKENS + 32), disable_radix_cache=True),
            scheduler=SchedulerConfig(max_running_requests=most),
            spec=spec,
        )
    )
    engine.try_out()
    return engine


@dataclass(frozen=True, slots=True)
class Row:
    """One model, number of requests and temperature. `least`, `most`: of the adaptive arm's ratios to plain, by round."""

    model: str
    requests: int
    temperature: float
    accept_length: float  # of the deepest fixed arm
    tokens_per_s: dict[str, float]
    against_plain: float
    least: float
    most: float
    best: str
    against_best: float


def measured(model: str, engines: dict[str, Engine], requests: int, temperature: float, rounds: int) -> Row:
    """The first round warms up, and is not one of `rounds`."""
    asked = (prompts(min(requests, 16)) * requests)[:requests]
    speeds: dict[str, list[float]] = {name: [] for name in engines}
    deepest = engines[f"k = {DEPTH}"]
    before = list(deepest.stats.accept_lengths)
    for number in range(rounds + 1):
        for name, engine in engines.items():
            began = time.perf_counter()
            made = run(engine, asked, TOKENS, temperature, seed=1000 * number)
            if number:
                speeds[name].append(made / (time.perf_counter() - began))
    lengths = [now - then for now, then in zip(deepest.stats.accept_lengths, before, strict=True)]
    medians = {arm: median(values) for arm, values in speeds.items()}
    best = max((arm for arm in ARMS if arm.startswith("k")), key=medians.__getitem__)
    plain, fixed = ([a / b for a, b in zip(speeds["adaptive"], speeds[other], strict=True)] for other in ("plain", best))
    length = sum((n + 1) * count for n, count in enumerate(lengths)) / max(1, sum(lengths))
    return Row(model, requests, temperature, length, medians, median(plain), min(plain), max(plain), best, median(fixed))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=["demo", "large", "untrained"], default=["demo", "large", "untrained"])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 0.8])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json")
    args = parser.parse_args()
    table, rows = Table("model", "requests", "T", "accept length", *ARMS, "adaptive / plain", "adaptive / best k"), list[Row]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        inflated = large(folder) if {"large", "untrained"} & set(args.models) else None
        for model in args.models:
            path = ModelConfig().directory if model == "demo" or inflated is None else inflated
            path = untrained(path, folder) if model == "untrained" else path
            engines = {arm: engine_of(path, spec, max(args.requests)) for arm, spec in ARMS.items()}
            for requests, temperature in product(args.requests, args.temperatures):
                row = measured(model, engines, requests, temperature, args.rounds)
                rows.append(row)
                print(f"{model}, {requests} requests, T = {temperature}: {row.against_plain:.2f} x plain", file=sys.stderr, flush=True)
    for row in rows:
        speeds = (f"{row.tokens_per_s[arm]:.0f}" for arm in ARMS)
        ratios = f"{row.against_plain:.2f} ({row.least:.2f} to {row.most:.2f})", f"{row.against_best:.2f}"
        table.add_row(row.model, str(row.requests), str(row.temperature), f"{row.accept_length:.2f}", *speeds, *ratios)
    Console().print(table)
    save(args.json, {"tokens": TOKENS, "rounds": args.rounds, "rows": [asdict(row) for row in rows]})


if __name__ == "__main__":
    main()
