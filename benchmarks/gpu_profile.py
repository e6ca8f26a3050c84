"""What a GPU does with a step of the engine, kernel by kernel, and what it could do: one command, one JSON file.

    python benchmarks/gpu_profile.py --json FILE                          all parts, 330 seconds
    python benchmarks/gpu_profile.py --json FILE --parts ceilings steps --models 475m --batches 1 128
    python benchmarks/gpu_profile.py --parts tune check --write-tuned kernels/mtpserve_kernels/tuned/sm_90.json
    python benchmarks/gpu_profile.py --compile-only                       without a GPU: fills TRITON_CACHE_DIR, to be taken to one
    python benchmarks/gpu_profile.py --dry-run                            everything at toy size, interpreted on a CPU: a test of itself

    env        versions, driver, clocks, and how many kernels Triton found compiled; always there
    ceilings   bytes and products per second; what a launch costs, with programmatic dependent launch too; what a replay costs
    steps      captured steps of models with random weights, plain and with three drafts: the device's time, and a table of kernels with
               their bytes, beside what gpu_model.py predicts; prompt graphs apart
    host       plan, launch, wait and book of the engine's own steps, beside the device's time, while requests end and others arrive
    tune       candidate tilings of kernels, by shape and rows; attention of prompts beside torch's
    check      the chosen tilings against float64, and captured steps against eager ones

Each part has a time limit: it is cut there, and what was measured is kept and written. What fails leaves a sentence under `skipped`. The
result's schema is gpu_kit/schema.json. From a checkout nothing need be installed but torch with its triton, numpy and msgspec.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

if "--dry-run" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

from common.shapes import SHAPES
from gpu_kit import tuned_table
from gpu_kit.ceilings import ceilings
from gpu_kit.check import check
from gpu_kit.environment import CompilerCache, compilations, environment
from gpu_kit.host import host
from gpu_kit.launch_counter import PROCESSORS
from gpu_kit.models import DeviceConfig, cells_of
from gpu_kit.precompile import Job, cell_jobs, compile_ahead, compile_ceilings, stub_driver, workload_jobs
from gpu_kit.predict import Ceilings
from gpu_kit.report import Result
from gpu_kit.steps import steps
from gpu_kit.tables import predictions, summary
from gpu_kit.timing import Alarm
from gpu_kit.tune import tune
from gpu_kit.untuned_workloads import untuned_workloads
from gpu_kit.workloads import prompt_workloads, workloads_of

SHARES = {"env": 3.0, "ceilings": 12.0, "steps": 150.0, "host": 30.0, "tune": 120.0, "check": 15.0}  # seconds of 330
COMPILE_SHARE = 0.35  # of a part's time, at most
MODELS, TOY_MODELS = ["475m", "7b", "0.5b", "30b-a3b", "v2-lite"], ["475m", "0.5b"]  # the most important first: a part may be cut
BATCHES, CONTEXTS, PROMPT = [1, 128, 8, 64], (256, 2048), 512
TOY_BATCHES, TOY_CONTEXTS, TOY_PROMPT = [1], (24, 40), 64


class Run:
    """The parts of one run, which share what the ones before have found."""

    def __init__(self, options: argparse.Namespace, device_config: DeviceConfig, result: Result, compiler_cache: CompilerCache) -> None:
        self.options, self.device_config, self.result, self.compiler_cache = options, device_config, result, compiler_cache
        toy = device_config.toy
        contexts, prompt = (TOY_CONTEXTS, TOY_PROMPT) if toy else (CONTEXTS, PROMPT)
        self.cells = cells_of(options.models, options.batches, contexts, prompt)

    @property
    def numbers(self) -> dict[str, Any]:
        return self.result.numbers

    def env(self, alarm: Alarm) -> Iterator[dict[str, Any]]:
        yield environment(self.device_config.device)

    def ceilings(self, alarm: Alarm) -> Iterator[dict[str, Any]]:
        yield from ceilings(self.device_config.device, self.device_config.toy, alarm)

    def steps(self, alarm: Alarm) -> Iterator[dict[str, Any]]:
        self.compile(cell_jobs(self.cells), alarm)
        limits = Ceilings.of(self.numbers.get("ceilings", {}), self.numbers.get("env", {}).get("processors", PROCESSORS))
        yield from steps(self.device_config, self.cells, limits, alarm)

    def host(self, alarm: Alarm) -> Iterator[dict[str, Any]]:
        yield from host(self.device_config, self.options.models, alarm)

    def tune(self, alarm: Alarm) -> Iterator[dict[str, Any]]:
        self.compile(tune_jobs(self.options.models), alarm)
        yield from tune(self.device_config, self.options.models, alarm)

    def check(self, alarm: Alarm) -> Iterator[dict[str, Any]]:
        yield from check(self.device_config, self.options.models, self.numbers.get("tune", []), alarm)

    def compile(self, jobs: list[Job], alarm: Alarm) -> None:
        """Ahead, in all cores; interpreted kernels are not compiled."""
        if self.device_config.toy:
            return
        processes = os.cpu_count() or 1
        ahead = compile_ahead(jobs, processes, COMPILE_SHARE * alarm.left, probes=2 * processes)
        print(f"compiled ahead: {ahead.hits} were there, {ahead.misses} were compiled", flush=True)
        self.numbers["skipped"] += ahead.failures
        before = self.numbers.get("env", {}).get("compile_ahead", {"hits": 0, "misses": 0})
        total = {"hits": before["hits"] + ahead.hits, "misses": before["misses"] + ahead.misses}
        self.numbers.setdefault("env", {})["compile_ahead"] = total

    def record_sink(self, part: str) -> Callable[[dict[str, Any]], None]:
        """Where a part's records go. Facts are one record, all else is a list of them."""
        facts: dict[str, Any] = {}
        if part in ("env", "ceilings"):
            facts = self.numbers.setdefault(part, facts)
            return facts.update
        records: list[dict[str, Any]] = self.numbers.setdefault(part, [])
        return records.append

    def run_parts(self) -> None:
        for part in SHARES:
            if part in self.options.parts:
                print(f"{part}: {self.result.limit_of(part):.0f} s", flush=True)
                self.result.run(part, getattr(self, part), self.record_sink(part))
                self.numbers.get("env", {})["compiler_cache"] = asdict(self.compiler_cache)
        self.result.save()


def tune_jobs(models: list[str]) -> list[Job]:
    return workload_jobs([*workloads_of(models, False), *prompt_workloads(models, False)], untuned_workloads(False))


def write_tuned(run: Run, file: Path) -> None:
    numbers, env = run.numbers, run.numbers["env"]
    chip = env.get("capability", "sm_90")
    source = f"{env['device']}, commit {env['commit'] or 'unknown'}, triton {env['versions']['triton']}"
    table = tuned_table.table_of(numbers.get("tune", []), numbers.get("check", []), chip, source, tuned_table.read(file))
    tuned_table.write(file, table)
    print(f"{file}: {sum(map(len, table['ops'].values()))} shapes of {len(table['ops'])} ops")


def options_of() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=list(SHARES), default=list(SHARES))
    parser.add_argument("--models", nargs="+", choices=list(SHAPES))
    parser.add_argument("--batches", nargs="+", type=int)
    parser.add_argument("--seconds", type=float, default=330.0, help="of all parts together")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--write-tuned", type=Path, metavar="FILE", help="the table of tilings; needs the parts tune and check")
    parser.add_argument("--compile-only", action="store_true", help="compile the kernels of steps and tune for sm_90, and run nothing")
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    toy = options.dry_run
    options.models = options.models or (TOY_MODELS if toy else MODELS)
    options.batches = options.batches or (TOY_BATCHES if toy else BATCHES)
    if min(options.batches) < 1:
        parser.error(f"--batches must be at least 1, got {min(options.batches)}")
    if options.seconds <= 0:
        parser.error(f"--seconds must be above 0, got {options.seconds:g}")
    if options.write_tuned is not None and not {"tune", "check"} <= set(options.parts):
        parser.error(f"--write-tuned needs the parts tune and check, got {' '.join(options.parts)}")
    options.parts = list(dict.fromkeys(["env", *options.parts]))  # a result without says nothing
    return options


def compile_only(options: argparse.Namespace) -> None:
    os.environ.pop("TRITON_INTERPRET", None)  # of the processes that compile
    cells = cells_of(options.models, options.batches, CONTEXTS, PROMPT)
    jobs: list[Job] = [(compile_ceilings, ()), *cell_jobs(cells), *tune_jobs(options.models)]
    with TemporaryDirectory() as folder:
        if not torch.cuda.is_available():
            stub_driver(Path(folder))
        ahead = compile_ahead(jobs, os.cpu_count() or 1, options.seconds)
    print(*ahead.failures, f"{ahead.hits} kernels were compiled already, {ahead.misses} were compiled now", sep="\n")


def main() -> None:
    options = options_of()
    if options.compile_only:
        return compile_only(options)
    if not options.dry_run and not torch.cuda.is_available():
        print("no GPU: there is nothing to measure; --dry-run tries everything at toy size, gpu_model.py predicts")
        return None
    device_config = DeviceConfig(
        torch.device("cpu") if options.dry_run else torch.device("cuda", torch.cuda.current_device()), options.dry_run
    )
    result = Result(options.json, options.seconds, {part: SHARES[part] for part in options.parts})
    with compilations() as compiler_cache:
        run = Run(options, device_config, result, compiler_cache)
        run.run_parts()
    if options.write_tuned is not None:
        write_tuned(run, options.write_tuned)
    cells = result.numbers.get("steps", [])
    print("\n".join([*(predictions(cells) if cells else []), *summary(result.numbers)]))
    return None


if __name__ == "__main__":
    main()
