"""mtpserve, vLLM and a torch.compile loop on this machine's GPU: `python benchmarks/peers/gpu.py --vllm PYTHON --json FILE`.

Random weights of published shapes: Qwen2.5-0.5B, MiMo-7B and Qwen3-8B plain, MiMo-7B with one and three drafts too, batches of 1 to 128.
One loop drives all engines by token ids, greedy, without end tokens and without a prefix cache:

throughput    output tokens per second of requests that arrive together, 128 tokens in and out; the median of three repeats
steady        milliseconds and accepted tokens of a step in which all requests run
bound         what a step must read, weights and KV cache, over the read bandwidth that was measured on the device, or stated

Drafts are accepted by lot, with the same probabilities in all engines: 1.84 / 2.50 / 2.99 tokens a step with 1 / 2 / 3 drafts. So the
engines' speed is compared and not what random weights guess.

Each arm (ENGINE:MODEL:DRAFTS) is a process of its own in its engine's interpreter. As many as fit into the device's memory start together
in a wave and are measured one after the other. Rows are written as they come. An arm that fails or is late leaves a sentence under
`skipped`, and the others go on. `--dry-run` runs everything at toy size, on a CPU too: a test of this program.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from common import gpu_tables
from common.record import context
from peers.gpu_engines.load import ACCEPT_CURVE, Sizes
from peers.gpu_engines.record import ENGINES, KIND, MTPSERVE, Arm, Record, Row
from peers.gpu_engines.shapes import SHAPES, has_mtp_layer, shape, weight_bytes
from peers.gpu_engines.waves import MIN_SECONDS, WORKER, Measurements, Waves, plan

BANDWIDTH = Path(__file__).parent / "gpu_engines" / "bandwidth.py"
OVERHEAD_BYTES = 2.5e9  # of an engine beside weights and KV cache: context, graphs, one step's numbers
MEMORY_SHARE = 0.9  # of the device, for all arms of a wave
TOY_SIZES = Sizes(batches=(1, 3), prompt=12, output=6, repeats=2, warm=2, timed=6)
DRAFTS = (0, 1, 3)
MAX_DRAFTS = len(ACCEPT_CURVE)


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", metavar="PYTHON", help="of an environment that has vLLM (benchmarks/README.md says how to get one)")
    parser.add_argument(
        "--engines", nargs="+", choices=ENGINES, metavar="ENGINE", help=f"of {', '.join(ENGINES)} (default: all, vllm if --vllm is there)"
    )
    parser.add_argument("--models", nargs="+", choices=list(SHAPES), default=list(SHAPES), metavar="MODEL", help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--drafts", type=int, nargs="+", default=list(DRAFTS), help="of models with an MTP layer (default: 0 1 3)")
    parser.add_argument("--batches", type=int, nargs="+", help="requests at once (default: 1 8 64 128)")
    parser.add_argument("--wave", action="append", type=wave, metavar="ARM,…", help="these arms, instead of planned waves; several times")
    parser.add_argument("--seconds", type=float, default=3600, help="after which nothing more is measured (default: %(default)g)")
    parser.add_argument("--kv-gib", type=float, help="of each arm's KV cache (default: what its requests need)")
    parser.add_argument("--bandwidth", type=float, metavar="TB_PER_S", help="stated, instead of measured")
    parser.add_argument("--vllm-options", type=options, default={}, metavar="JSON", help="more arguments of vllm.LLM")
    parser.add_argument("--mtpserve-options", type=options, default={}, metavar="JSON", help="more of mtpserve's SchedulerConfig")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="of engines' output (default: a new one)")
    parser.add_argument("--dry-run", action="store_true", help="toy shapes; on a CPU too")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args(argv)
    if args.engines is None:
        args.engines = [engine for engine in ENGINES if engine != "vllm" or args.vllm is not None]
    if problem := next(problems(args), None):
        parser.error(problem)
    return args


def problems(args: argparse.Namespace) -> Iterator[str]:
    """One line each: what is wrong with a field, its value, and what would do."""
    arms = [arm for arms in args.wave or [] for arm in arms]
    if args.vllm is None and "vllm" in [*args.engines, *(arm.engine for arm in arms)]:
        yield "--vllm PYTHON is needed to measure vllm, got none"
    if args.vllm is not None and shutil.which(args.vllm) is None:
        yield f"--vllm must be a Python interpreter, got {args.vllm}"
    if invalid := [number for number in args.drafts if not 0 <= number <= MAX_DRAFTS]:
        yield f"--drafts must be in [0, {MAX_DRAFTS}], got {invalid[0]}"
    if invalid := [number for number in args.batches or [] if number < 1]:
        yield f"--batches must be at least 1, got {invalid[0]}"
    for name in ("seconds", "kv_gib", "bandwidth"):
        if (value := getattr(args, name)) is not None and value <= 0:
            yield f"--{name.replace('_', '-')} must be more than 0, got {value:g}"
    if args.json is not None and not args.json.parent.is_dir():
        yield f"--json must be in a folder that exists, got {args.json}"


def wave(value: str) -> list[Arm]:
    return [arm_of(name) for name in value.split(",")]


def arm_of(name: str) -> Arm:
    """Raises argparse.ArgumentTypeError."""
    engine, _, rest = name.partition(":")
    model, _, drafts = rest.partition(":")
    if engine not in ENGINES or model not in SHAPES or not drafts.isdecimal():
        raise argparse.ArgumentTypeError(f"an arm is ENGINE:MODEL:DRAFTS with {', '.join(ENGINES)} and {', '.join(SHAPES)}, got {name}")
    arm = Arm(engine, model, int(drafts))
    if arm.drafts > MAX_DRAFTS or not can_draft(arm):
        most = MAX_DRAFTS if can_draft(replace(arm, drafts=1)) else 0
        raise argparse.ArgumentTypeError(f"{engine}:{model} can have at most {most} drafts, got {name}")
    return arm


def can_draft(arm: Arm) -> bool:
    """Whether it has as many drafts as it says: the loop, and models without an MTP layer, have none."""
    return arm.drafts == 0 or (arm.engine != "loop" and has_mtp_layer(SHAPES[arm.model]))


def options(value: str) -> dict[str, Any]:
    try:
        arguments = json.loads(value)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"is not valid JSON ({error}): {value}") from None
    if not isinstance(arguments, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {value}")
    return arguments


def all_arms(args: argparse.Namespace) -> list[Arm]:
    """Engines that are compared are neighbours, so that a run that is cut has whole comparisons."""
    arms = (Arm(engine, model, drafts) for model in args.models for drafts in args.drafts for engine in args.engines)
    return list(filter(can_draft, arms))


class Bench:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.deadline = args, time.monotonic() + args.seconds
        sizes = TOY_SIZES if args.dry_run else Sizes(batches=(1, 8, 64, 128))
        self.sizes = replace(sizes, batches=tuple(args.batches)) if args.batches else sizes
        self.measurements, self.context = Measurements(self.save), context()
        self.date = datetime.now(UTC).isoformat(timespec="seconds")
        self.bandwidth, self.memory, self.source = self.device()

    def device(self) -> tuple[float, float, str]:
        """Read bandwidth, bytes of memory, and where the bandwidth is from."""
        size = 16 if self.args.dry_run else 2048
        process = subprocess.run([sys.executable, str(BANDWIDTH), "--mib", str(size)], capture_output=True, text=True, check=False)
        if process.returncode:
            raise SystemExit(f"the read bandwidth could not be measured: {(process.stderr.splitlines() or ['no error was shown'])[-1]}")
        figures = json.loads(process.stdout)
        if self.args.bandwidth is not None:
            return self.args.bandwidth * 1e12, figures["memory_bytes"], "stated"
        return figures["read_bandwidth"], figures["memory_bytes"], "measured"

    def kv_bytes(self, arm: Arm) -> int:
        if self.args.kv_gib is not None:
            return int(self.args.kv_gib * 2**30)
        return self.sizes.kv_bytes(shape(arm.model, self.args.dry_run), arm.drafts)

    def memory_of(self, arm: Arm) -> float:
        return weight_bytes(shape(arm.model, self.args.dry_run)) + self.kv_bytes(arm) + (0 if self.args.dry_run else OVERHEAD_BYTES)

    def command(self, arm: Arm) -> list[str]:
        engine_options = {"vllm": self.args.vllm_options, MTPSERVE: self.args.mtpserve_options}.get(arm.engine, {})
        numbers = {name: getattr(self.sizes, name) for name in ("prompt", "output", "repeats", "warm", "timed")}
        command = [self.args.vllm if arm.engine == "vllm" else sys.executable, str(WORKER), arm.engine, arm.model, str(arm.drafts)]
        command += [
            "--batches",
            *map(str, self.sizes.batches),
            "--kv-bytes",
            str(self.kv_bytes(arm)),
            "--options",
            json.dumps(engine_options),
        ]
        command += [word for name, number in numbers.items() for word in (f"--{name}", str(number))]
        return [*command, *(["--toy"] if self.args.dry_run else [])]

    def run(self, logs: Path) -> None:
        waves = self.args.wave or plan(all_arms(self.args), self.memory_of, MEMORY_SHARE * self.memory)
        runner = Waves(self.command, logs, self.deadline, 0 if self.args.dry_run else MIN_SECONDS)
        for arms in waves:
            runner.run(arms, self.measurements)
        self.save()

    def with_bound(self, row: Row) -> Row:
        return replace(row, bound_ms=1e3 * row.step_bytes / self.bandwidth)

    def record(self) -> Record:
        rows = [self.with_bound(row) for row in self.measurements.rows]
        return Record(
            KIND, self.date, self.args.dry_run, self.bandwidth, self.source, self.sizes.prompt, self.sizes.output, list(ACCEPT_CURVE),
            rows, self.measurements.skipped, self.measurements.starts,
        )  # fmt: skip

    def save(self) -> None:
        """Whole or not at all: a run may be ended at any time."""
        if (path := self.args.json) is not None:
            part = path.with_name(f"{path.name}.part")
            part.write_text(json.dumps(self.context | {"numbers": asdict(self.record())}, indent=2) + "\n", encoding="utf-8")
            os.replace(part, path)


def main() -> None:
    args = arguments()
    if not args.dry_run and not torch.cuda.is_available():
        raise SystemExit("no GPU: there is nothing to time; --dry-run tries everything at toy size")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # not without ending the engines
    logs = Path(tempfile.mkdtemp(prefix="peers-")) if args.logs is None else args.logs
    logs.mkdir(parents=True, exist_ok=True)
    bench = Bench(args)
    print(f"read bandwidth {bench.bandwidth / 1e12:.2f} TB/s, {bench.source}; engines' output is in {logs}", flush=True)
    bench.run(logs)
    print(gpu_tables.screen(bench.record()))


if __name__ == "__main__":
    main()
