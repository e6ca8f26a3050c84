"""What the host does for one step of a captured engine, over a device that computes nothing: Python calls, and the thread's CPU time.

A captured step is run once, and each replay leaves its result as it is: so many drafts are accepted in every step. What is left is
planning, the runner's inputs and results, bookkeeping and statistics, as on a GPU: a step is in flight while the next one is planned.
The depth is fixed. Calls (cProfile counts them, built-in functions too) are the same on every machine, and tell what a
change saves where time cannot be measured. `--profile N` prints the N functions that take most of the time.

`--against DIR` measures another checkout with the same script, in turns, and prints both.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from common.record import save

from mtpserve.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, SpecConfig
from mtpserve.core.request import Request
from mtpserve.core.sampling import SamplingParams
from mtpserve.engine.engine import Engine
from mtpserve.engine.startup.build import build_engine
from mtpserve.runtime.graphs.graphs import StepGraphs

LENGTH = 2000  # tokens of each output, which none comes to
Numbers = dict[str, dict[str, float]]


class Frozen:
    """A GraphCapturer: the step is run once. From then on every request gets `accepted` drafts and a token of the target's."""

    def __init__(self, accepted: int) -> None:
        self.accepted = accepted

    def capture(self, body: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        output = body()
        table = output.table
        drafts = min(self.accepted, (table.shape[1] - 4) // 3)
        table[:, 0], table[:, 1], table[:, 2] = drafts, 0, drafts
        return output, lambda: None


def frozen_engine(requests: int, drafts: int, accepted: int) -> Engine:
    fixed = SpecConfig(speculative_algorithm="MTP", speculative_num_steps=drafts, speculative_adaptive=False)
    spec = fixed if drafts else SpecConfig(speculative_algorithm="none")
    config = EngineConfig(
        model=ModelConfig(model="demo"),
        cache=CacheConfig(max_total_tokens=4096 * requests),
        scheduler=SchedulerConfig(max_running_requests=requests, chunked_prefill_size=4096),
        spec=spec,
    )
    engine: Any = build_engine(config)
    runner = engine.runner
    runner.graphs, runner.overlapped, engine._overlap = StepGraphs(runner.step, runner.sampling, Frozen(accepted), requests), True, 1
    return engine  # type: ignore[no-any-return]


def measure(requests: int, drafts: int, accepted: int, steps: int, profile: int) -> dict[str, float]:
    """Calls, and milliseconds of the thread's CPU time, of one step in which all requests decode."""
    engine = frozen_engine(requests, drafts, accepted)
    for i in range(requests):
        prompt = [1 + (7 * i + j) % 4000 for j in range(32)]
        engine.add(Request(str(i), prompt, SamplingParams(max_tokens=LENGTH, temperature=0.0, seed=i, ignore_eos=True)))
    for _ in range(30):
        engine.step()
    times = []
    for _ in range(steps):
        began = time.thread_time()
        events = engine.step()
        times.append(time.thread_time() - began)
        assert len(events) == requests and not any(event.error or event.finish for event in events)
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(steps):
        engine.step()
    profiler.disable()
    stats = pstats.Stats(profiler)
    if profile:
        stats.sort_stats("tottime").print_stats(profile)
    return {"calls": round(stats.total_calls / steps, 1), "ms": round(1e3 * median(times), 4)}  # type: ignore[attr-defined]


def measured_by(checkout: Path, arguments: list[str]) -> Numbers:
    """This script's numbers of another checkout's code, from a process of its own."""
    paths = os.pathsep.join(map(str, (checkout, checkout / "kernels")))
    with tempfile.NamedTemporaryFile("r", suffix=".json") as out:
        command = [sys.executable, __file__, *arguments, "--json", out.name]
        subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}, cwd=checkout, check=True, stdout=subprocess.DEVNULL)
        return json.load(out)["numbers"]  # type: ignore[no-any-return]


def compare(other: Path, arguments: list[str], rounds: int) -> Numbers:
    """Medians over the rounds of both checkouts, and this one's over the other's."""
    runs: dict[str, list[Numbers]] = {"this": [], "other": []}
    for _ in range(rounds):
        for name, checkout in (("this", Path(__file__).parents[1]), ("other", other)):
            runs[name].append(measured_by(checkout, arguments))
    table: Numbers = {}
    for case in runs["this"][0]:
        for unit in ("calls", "ms"):
            this, that = (median(numbers[case][unit] for numbers in runs[name]) for name in ("this", "other"))
            table[f"{case}, {unit}"] = {"this": this, "other": that, "ratio": round(this / that, 3)}
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 32, 128])
    parser.add_argument("--drafts", type=int, nargs="+", default=[0, 3])
    parser.add_argument("--accepted", type=int, default=2, help="drafts of each request in each step (default: 2)")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--profile", type=int, default=0, metavar="N")
    parser.add_argument("--against", type=Path, metavar="DIR", help="another checkout, to compare with")
    parser.add_argument("--rounds", type=int, default=5, help="how often both are measured with --against (default: 5)")
    parser.add_argument("--json")
    args = parser.parse_args()
    if args.against is not None:
        lists = ["--requests", *map(str, args.requests), "--drafts", *map(str, args.drafts)]
        numbers = compare(args.against, [*lists, "--accepted", str(args.accepted), "--steps", str(args.steps)], args.rounds)
    else:
        numbers = {
            f"{requests} requests, {drafts} drafts": measure(requests, drafts, args.accepted, args.steps, args.profile)
            for drafts in args.drafts
            for requests in args.requests
        }
    for case, values in numbers.items():
        print(f"{case}: " + "  ".join(f"{name} {value:g}" for name, value in values.items()))
    save(args.json, numbers)


if __name__ == "__main__":
    main()
