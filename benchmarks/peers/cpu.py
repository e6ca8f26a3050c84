"""mtpserve, vLLM, transformers and mistral.rs on this machine's CPU: `python benchmarks/peers/cpu.py --vllm VENV/bin/python --json FILE`.

All serve the same checkpoints with the same real acceptance: `small` is a model of 6.4 M parameters that is trained once on this machine's
Python files (trained.py), `258m` and `500m` compute the same function at the cost of larger models (common/inflate.py), and `demo` is the
bundled one, DeepSeek-V3 in miniature. 128 tokens, greedy without --temperature, for prompts of 64 tokens of held-out source text that no
request shares with another; `mtp` drafts three tokens, where an engine can. vLLM runs without its prefix cache and with it. Only one engine
runs at a time; they take turns, `--rounds` times and each time in another order, each started anew, and the medians and extremes over
rounds are reported.

tok/s         all output tokens over the time from the first request to the last token
TTFT          until a request's first text, median over requests
TPOT          a request's time per token after the first text, median over requests
ITL           between two chunks with text, however many tokens each has, median over all chunks
accepted      tokens per verification, by each server's own counters
same text     share of requests whose text is mtpserve's first round's, but for white space at its beginning, which mistral.rs leaves out;
              in float32 all but ties within rounding. It says something of greedy texts alone

Engines that are not given are not measured. One that does not start, or fails, is left out from there for that model and mode; its log's
end is shown, and the result has a sentence under `skipped`. Where another engine gave more tokens per second, it has one under `losses`
(losses.py).
mistral.rs is asked in its own process, without HTTP: its Python package has no server.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[1]))
from common.inflate import SHAPES
from common.peers_table import worded
from common.record import instruction_sets, save
from peers.checkpoints import CACHE, MODELS, PROMPT, TRAINED, Prompt, checkpoint, make_prompts
from peers.figures import OWN, Measured, Skipped, Start, accept_length, figures, medians, tables
from peers.losses import losses, reasons_in, show
from peers.running import BUSY, EngineFailed, busy, started
from peers.servers import MODES, MTP, Server, mistralrs, mtpserve, transformers, versions, vllm
from trained import SIZES

WARM_UP, LEAST = 16, 4  # output tokens of a warm-up, requests of a load at least


def servers_of(args: argparse.Namespace, caches: Path) -> list[Server]:
    """mtpserve's first: the others' texts are compared with its."""
    servers = [mtpserve(args.dtype, args.mtpserve_options.split())]
    if args.vllm is not None:
        variants = [(dtype, cached) for dtype in args.vllm_dtype for cached in args.vllm_prefix_cache]
        more = args.vllm_options.split()
        servers += [vllm(args.vllm, dtype, cached, args.vllm_bind, caches, more) for dtype, cached in variants]
    if args.transformers is not None:
        servers.append(transformers(args.transformers, args.transformers_dtype))
    if args.mistralrs is not None:
        servers.append(mistralrs(args.mistralrs, args.mistralrs_dtype))
    return [replace(server, temperature=args.temperature) for server in servers]


class Bench:
    def __init__(self, args: argparse.Namespace, caches: Path) -> None:
        self.args, self.folder = args, caches / "views"
        self.servers = servers_of(args, caches)
        self.starts: list[Start] = []
        self.measured: list[Measured] = []
        self.skipped: list[Skipped] = []
        self.texts: dict[tuple[str, int], list[str]] = {}  # mtpserve's, by model and concurrency

    def run(self, after: Callable[[], None]) -> None:
        """`after` each round, since everything takes hours."""
        for name in self.args.models:
            model = checkpoint(name, self.args.checkpoints, self.args.minutes, self.args.size)
            prompts = make_prompts(model)
            for number in range(self.args.rounds):
                for mode in self.args.modes:
                    first = number % len(self.servers)
                    for server in self.servers[first:] + self.servers[:first]:
                        self.attempt(server, name, model, mode, number, prompts)
                after()

    def attempt(self, server: Server, name: str, model: Path, mode: str, number: int, prompts: list[Prompt]) -> None:
        if any((each.server, each.model, each.mode) == (server.name, name, mode) for each in self.skipped):
            return
        why = server.undrafted if mode == "mtp" else None
        try:
            if why is None:
                self.turn(server, name, model, mode, number, prompts)
                return
        except EngineFailed as error:
            if server.engine == OWN:
                raise
            print(error, file=sys.stderr)
            why = f"With {worded(name)} and {'drafts' if mode == 'mtp' else 'no drafts'}, {server.name} {error.said}"
        self.skipped.append(Skipped(server.engine, server.name, name, mode, why))
        print(f"{name} {mode} {server.name}: left out: {why}", flush=True)

    def turn(self, server: Server, name: str, model: Path, mode: str, number: int, prompts: list[Prompt]) -> None:
        given = iter(prompts)

        def take(count: int) -> list[Prompt]:
            taken = [prompt for prompt, _ in zip(given, range(count), strict=False)]
            if len(taken) < count:
                raise SystemExit(f"only {len(prompts)} prompts of {PROMPT} tokens are held out: ask for less concurrency or fewer waves")
            return taken

        others = busy()
        with started(server, model, mode, take(1)[0], self.folder) as running:
            self.starts.append(Start(name, mode, server.name, number, running.health_seconds, running.first_seconds, others))
            for concurrency in self.args.concurrency:
                running.load(take(concurrency), min(WARM_UP, self.args.tokens), concurrency)
                before = running.counters()
                answer = running.load(take(max(concurrency * self.args.waves, LEAST)), self.args.tokens, concurrency)
                length = accept_length(before, running.counters())
                said = [request["text"] for request in answer["requests"]]
                same = [a.lstrip() == b.lstrip() for a, b in zip(said, self.texts.setdefault((name, concurrency), said), strict=True)]
                seen: dict[str, Any] = figures(answer, self.args.tokens) | {"accept_length": length, "same_text": sum(same) / len(same)}
                row = Measured(name, mode, server.name, server.engine, concurrency, number, **seen)
                self.measured.append(row)
                print(f"{name} {mode} round {number + 1} {server.name}, {concurrency} at once: {row.tokens_per_s:.1f} tok/s", flush=True)


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    own = "bfloat16" if {"avx512_bf16", "amx_bf16"} & set(instruction_sets()) else "float32"
    every = f"0-{(os.cpu_count() or 1) - 1}"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    engines = parser.add_argument_group("the engines (README.md says how to make their virtual environments)")
    engines.add_argument("--vllm", type=Path, metavar="PYTHON", help="of vLLM's venv, or its vllm")
    engines.add_argument("--transformers", type=Path, metavar="PYTHON", help="of a venv with transformers[serving] and accelerate")
    engines.add_argument("--mistralrs", type=Path, metavar="PYTHON", help="of a venv with mistralrs")
    engines.add_argument("--dtype", default="auto", help="mtpserve's (default: %(default)s)")
    engines.add_argument("--mtpserve-options", default="", metavar="OPTIONS", help="more of mtpserve's options: --mtpserve-options='--x 1'")
    engines.add_argument("--vllm-dtype", type=several, default=[own], metavar="DTYPE,…", help=f"a server for each (default: {own})")
    engines.add_argument("--vllm-prefix-cache", type=caches, default=[False, True], metavar="off,on")
    engines.add_argument("--vllm-bind", default=every, metavar="CPUS", help="VLLM_CPU_OMP_THREADS_BIND (default: all, %(default)s)")
    engines.add_argument("--vllm-options", default="", metavar="OPTIONS", help="more options of vLLM, in the same way")
    engines.add_argument("--transformers-dtype", default=own, metavar="DTYPE", help="(default: %(default)s)")
    engines.add_argument("--mistralrs-dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"], help="(default: auto)")
    load = parser.add_argument_group("the load")
    load.add_argument("--models", type=several, default=[TRAINED, *SHAPES], metavar=",".join(MODELS), help="(default: all but demo)")
    load.add_argument("--modes", type=several, default=list(MODES), metavar=",".join(MODES))
    load.add_argument("--concurrency", type=numbers, default=[1, 4, 16, 64], metavar="1,4,16,64")
    load.add_argument("--rounds", type=int, default=3)
    load.add_argument("--waves", type=int, default=2, help="requests of each of the concurrent clients, but 4 in all at least")
    load.add_argument("--tokens", type=int, default=128, help="output tokens of each request")
    load.add_argument("--temperature", type=float, default=0.0, help="of mtpserve and vLLM; texts are compared where it is 0 (default: 0)")
    load.add_argument("--minutes", type=float, default=9, help="of training, where the small model is not in --checkpoints yet")
    load.add_argument("--size", choices=list(SIZES), default="6m", help="of the small model; toy to try this program")
    load.add_argument("--checkpoints", type=Path, default=CACHE, help="where models are kept (default: %(default)s)")
    parser.add_argument("--reasons", type=Path, metavar="FILE", help="JSON: why cells were lost, by the keys that the result names")
    parser.add_argument("--json")
    return parser.parse_args(given)


def several(value: str) -> list[str]:
    return value.split(",")


def numbers(value: str) -> list[int]:
    return [int(part) for part in value.split(",")]


def caches(value: str) -> list[bool]:
    return [{"off": False, "on": True}[part] for part in value.split(",")]


def main() -> None:
    args = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # not without stopping the engine
    for chosen, known in ((args.models, MODELS), (args.modes, MODES)):
        if unknown := set(chosen) - set(known):
            raise SystemExit(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    if args.temperature and (args.transformers or args.mistralrs):
        raise SystemExit(f"--temperature {args.temperature} is for mtpserve and vLLM: transformers and mistral.rs are measured greedy")
    given = {"vllm": args.vllm, "transformers": args.transformers, "mistral.rs": args.mistralrs}
    peers = {engine: versions(python, engine) for engine, python in given.items() if python is not None}  # what is missing, before all else
    reasons = reasons_in(args.reasons)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(args, Path(folder))
        bench.run(lambda: save(args.json, result(bench, peers, reasons)))
    report(bench, result(bench, peers, reasons), reasons)


def result(bench: Bench, peers: dict[str, dict[str, str]], reasons: dict[str, str]) -> dict[str, Any]:
    rows = medians(bench.measured)
    how = {"servers": [server.described() for server in bench.servers], "peers": peers, "mtp": MTP}
    load_of = {"tokens": bench.args.tokens, "prompt": PROMPT, "waves": bench.args.waves}
    found = {"losses": losses(rows, reasons), "skipped": [asdict(each) for each in bench.skipped], "medians": rows}
    return how | load_of | found | {"rounds": [asdict(row) for row in bench.measured], "starts": [asdict(row) for row in bench.starts]}


def report(bench: Bench, found: dict[str, Any], reasons: dict[str, str]) -> None:
    console = Console(width=None if sys.stdout.isatty() else 220)
    for table in tables(found["medians"], bench.starts):
        console.print(table)
    for sentence in dict.fromkeys(one.skipped for one in bench.skipped):
        print(f"not measured: {sentence}")
    if found["peers"]:
        show(found["losses"], reasons)
    if disturbed := [start for start in bench.starts if start.busy > BUSY]:
        most = max(start.busy for start in disturbed)
        print(f"the machine was not idle before {len(disturbed)} of {len(bench.starts)} starts: up to {100 * most:.0f} % of its cores")


if __name__ == "__main__":
    main()
