"""Throughput on a CPU beside other processes that compute: what a browser or a compiler does to a server on the same machine.

python benchmarks/neighbours.py --json FILE

The arms take turns: alone, alone with one thread, and beside one and two busy loops. A loop is a process that adds numbers; it is stopped
while it has no turn. Each turn begins with seconds that do not count, in which the engine finds out how many threads pay. `--against DIR`
measures another checkout by the same script, in turns with this one: for `alone`, whose ratio is the cost of sleeping in barriers.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common.inflate import Shape, inflate, opened
from common.record import save
from never_slower import DEPTH, LARGE, Load, engine_of
from rich.console import Console
from rich.table import Table

from mtpserve.config import ModelConfig, SpecConfig

LOOP = "while True: sum(range(100_000))"
SETTLE_S = 2.5  # the engine looks at the cores each second, and changes its threads when two looks agree
# The demo, and the demo at the cost of 258 M and of 475 M parameters.
LAYERS = {"demo": 0, "258m": 19, "475m": 36}
ARMS = {"alone": 0, "one thread": 0, "beside 1": 1, "beside 2": 2}  # and how many busy loops


@contextmanager
def busy_loops(count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    loops = [subprocess.Popen([sys.executable, "-c", LOOP]) for _ in range(count)]
    for loop in loops:
        loop.send_signal(signal.SIGSTOP)
    try:
        yield loops
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


class FollowingLoad(Load):
    """Looks at the cores between steps, as the engine's process does."""

    follows = True

    def step(self) -> None:
        cores = getattr(self.engine, "cores", None)  # another checkout may have none
        if cores is not None and self.follows:
            cores.update()
        super().step()


def measure(model: Path, requests: int, arms: list[str], turns: int, seconds: float) -> dict[str, list[float]]:
    """Tokens per second of each turn."""
    threads, rates = torch.get_num_threads(), {arm: list[float]() for arm in arms}
    engine = engine_of(model, SpecConfig(speculative_algorithm="NEXTN", speculative_num_steps=DEPTH), requests)
    load = FollowingLoad(engine, requests, 0.0)
    load.fill()
    load.run(2)
    with busy_loops(max(ARMS[arm] for arm in arms)) as loops:
        for _ in range(turns):
            for arm in arms:
                load.follows = arm != "one thread"
                if not load.follows:
                    torch.set_num_threads(1)
                for loop in loops[: ARMS[arm]]:
                    loop.send_signal(signal.SIGCONT)
                load.run(SETTLE_S)
                turn = load.run(seconds)
                rates[arm].append(turn.tokens / turn.seconds)
                for loop in loops[: ARMS[arm]]:
                    loop.send_signal(signal.SIGSTOP)
                if not load.follows:
                    torch.set_num_threads(threads if not hasattr(engine, "cores") else engine.cores.num_threads or threads)
    load.end()
    engine.close()
    return rates


def measure_elsewhere(directory: Path, options: list[str]) -> dict[str, Any]:
    """By this script, with another checkout's package. → its numbers."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        path = os.pathsep.join([str(directory), str(directory / "kernels")])
        command = [sys.executable, __file__, *options, "--json", file.name]
        subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, check=True, stdout=subprocess.DEVNULL)
        return dict(json.loads(Path(file.name).read_text())["numbers"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(LAYERS), default="demo")
    parser.add_argument("--requests", type=int, default=1)
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--rounds", type=int, default=3, help="with --against: of each checkout")
    parser.add_argument("--json")
    options = parser.parse_args()
    if options.against:
        same = [f"--model={options.model}", f"--requests={options.requests}", f"--turns={options.turns}", f"--seconds={options.seconds}"]
        same += ["--arms", *options.arms]
        checkouts = {"here": Path(__file__).parents[1], "there": options.against}
        rounds = [
            {name: measure_elsewhere(where, same)["tokens_per_s"] for name, where in checkouts.items()} for _ in range(options.rounds)
        ]
        ratios = {arm: median(both["here"][arm] / both["there"][arm] for both in rounds) for arm in options.arms}
        print(json.dumps({"rounds": rounds, "ratios": ratios}, indent=1))
        save(options.json, {"model": options.model, "requests": options.requests, "rounds": rounds, "ratios": ratios})
        return
    with tempfile.TemporaryDirectory() as folder:
        model = Path(ModelConfig().directory)
        if layers := LAYERS[options.model]:
            inflate(model, Path(folder) / "model", replace(Shape.of(opened(model).config.values), **LARGE | {"layers": layers}))
            model = Path(folder) / "model"
        rates = measure(model, options.requests, options.arms, options.turns, options.seconds)
    medians = {arm: median(values) for arm, values in rates.items()}
    table = Table("arm", "tokens/s", "turns", title=f"{options.model}, {options.requests} requests")
    for arm, values in rates.items():
        table.add_row(arm, f"{medians[arm]:.0f}", " ".join(f"{value:.0f}" for value in values))
    Console().print(table)
    save(options.json, {"model": options.model, "requests": options.requests, "tokens_per_s": medians, "turns": rates})


if __name__ == "__main__":
    main()
