"""Throughput of several ways to start a server on one machine, each against the first one: engines side by side, ranks of one engine.

python benchmarks/engines.py --json FILE
python benchmarks/engines.py --arm "--cpu-affinity 0" --arm "--tensor-parallel-size 2" --json FILE

All servers are there at once, an idle one computes nothing, and they are loaded in turns by `mtpserve bench serve`: what slows the machine
down for a while slows all of them down. The model is the demo inflated to 475 million parameters (common/inflate.py).
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from common.inflate import Shape, inflate, opened
from common.record import save
from rich.console import Console
from rich.table import Table

from mtpserve.config import ModelConfig

# One core, and both of them: the ratio is what the second one gives.
ARMS = ("--cpu-affinity 0", "--data-parallel-size 2")
SHAPE = {"layers": 36, "hidden": 1024, "heads": 8, "kv_heads": 8, "experts": 32, "experts_per_token": 4}
START_LIMIT = 300.0  # seconds
ROOT = Path(__file__).parents[1]
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"} | {
    "PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "kernels")))
}


@contextmanager
def served(options: str, model: Path, folder: Path) -> Iterator[int]:
    """The port of a server that is ready."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = ["--model", str(model), "--port", str(port), "--log-interval", "0", "--log-level", "warning"]
    log = folder / f"{port}.log"
    with log.open("wb") as out:
        command = [sys.executable, "-m", "mtpserve", "launch", *common, *shlex.split(options)]
        process = subprocess.Popen(command, stdout=out, stderr=out, env=ENVIRONMENT)
    try:
        until = time.perf_counter() + START_LIMIT
        while not ready(port):
            if process.poll() is not None or time.perf_counter() > until:
                raise SystemExit(f"mtpserve launch {options} did not start\n{log.read_text()[-3000:]}")
            time.sleep(0.2)
        yield port
    finally:
        process.terminate()
        process.wait()


def ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
            return True
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def throughput(port: int, args: argparse.Namespace, seed: int, folder: Path) -> float:
    """Tokens per second of one load."""
    out = folder / "result.json"
    command = [
        sys.executable, "-m", "mtpserve", "bench", "serve", "--base-url", f"http://127.0.0.1:{port}", "--dataset-name", "random",
        "--random-input-len", str(args.input), "--random-output-len", str(args.output), "--num-prompts", str(args.requests),
        "--max-concurrency", str(args.concurrency), "--seed", str(seed), "--temperature", "0", "--ignore-eos", "--disable-tqdm",
        "--output-file", str(out),
    ]  # fmt: skip
    out.unlink(missing_ok=True)
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=ENVIRONMENT)
    if done.returncode:
        raise SystemExit(f"{shlex.join(command)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    found = json.loads(out.read_text().splitlines()[-1])
    if found["completed"] != args.requests:
        raise SystemExit(f"{found['completed']} of {args.requests} requests succeeded")
    return float(found["output_throughput"])


def measured(args: argparse.Namespace, model: Path, folder: Path) -> dict[str, list[float]]:
    arms = {f"{arm} {args.options}".strip(): list[float]() for arm in args.arm or ARMS}
    with ExitStack() as stack:
        ports = {arm: stack.enter_context(served(arm, model, folder)) for arm in arms}
        for number in range(-1, args.rounds):  # the first one warms up
            for arm in list(arms) if number % 2 else reversed(arms):
                found = throughput(ports[arm], args, number + 1, folder)
                if number >= 0:
                    arms[arm].append(found)
                print(f"round {number + 1}, {arm}: {found:.1f} tok/s", flush=True)
    return arms


def rows_of(arms: dict[str, list[float]]) -> list[dict[str, Any]]:
    """The ratio is the median of those of each round."""
    first = next(iter(arms.values()))
    return [
        {
            "options": arm,
            "tokens_per_second": round(median(found), 2),
            "least": round(min(found), 2),
            "most": round(max(found), 2),
            "ratio": round(median(own / base for own, base in zip(found, first, strict=True)), 3),
        }
        for arm, found in arms.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arm", action="append", help=f"options of a server; may be repeated (default: {', '.join(ARMS)})")
    parser.add_argument("--options", default="--speculative-algorithm NEXTN", help="options of all servers")
    parser.add_argument("--model", type=Path, help="another model than the inflated demo")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--input", type=int, default=64)
    parser.add_argument("--output", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder, model = Path(made), args.model
        if model is None:
            source, model = ModelConfig().directory, folder / "large"
            inflate(source, model, replace(Shape.of(opened(source).config.values), **SHAPE))
        rows = rows_of(measured(args, model, folder))
    table = Table("server", "tok/s", "least", "most", "ratio")
    for row in rows:
        table.add_row(*map(str, row.values()))
    Console().print(table)
    load = {name: getattr(args, name) for name in ("requests", "concurrency", "input", "output", "rounds")}
    save(args.json, {"rows": rows, "load": load})


if __name__ == "__main__":
    main()
