"""mtpserve and vLLM on this machine's CPU, over HTTP: `python benchmarks/peers/cpu.py --vllm VENV/bin/python --json FILE`.

Both serve the same checkpoints with the same real acceptance: `small` is a model of 6.4 M parameters that is trained once on this machine's
Python files (trained.py), `258m` and `500m` compute the same function at the cost of larger models (common/inflate.py). Greedy, 128 tokens
for prompts of 64 tokens of held-out source text that no request shares with another; `mtp` drafts three tokens. vLLM runs without its
prefix cache and with it. Only one server runs at a time; the servers take turns, `--rounds` times, each started anew, and the medians
and extremes over rounds are reported. Without --vllm only mtpserve is measured.

tok/s         all output tokens over the time from the first request to the last token
TTFT          until a request's first text, median over requests
TPOT          a request's time per token after the first text, median over requests
ITL           between two chunks with text, however many tokens each has, median over all chunks
accepted      tokens per verification, by each server's own counters
same text     share of requests whose text is mtpserve's first round's: in float32 all but ties within rounding
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
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).parents[1]))
from common.inflate import SHAPES, inflate
from common.record import instruction_sets, save
from peers.servers import MTP, Running, Server, mtpserve, started, versions, vllm
from trained import SIZES, SMALL, texts, train

TRAINED, MODES = "small", ("plain", "mtp")
RATIOS = ("tokens_per_s", "ttft_ms", "tpot_ms")
PROMPT, WARM_UP, LEAST = 64, 16, 4  # tokens of a prompt, output tokens of a warm-up, requests of a load at least
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "mtpserve-benchmarks"
CLIENT = Path(__file__).parent / "client.py"


@dataclass(frozen=True, slots=True)
class Measured:
    """One load on one started server. Milliseconds."""

    model: str
    mode: str
    server: str
    concurrency: int
    round: int
    tokens_per_s: float
    ttft_ms: float
    tpot_ms: float
    itl_ms: float
    accept_length: float | None
    same_text: float
    client_share: float  # of one core's time, that the client took


@dataclass(frozen=True, slots=True)
class Start:
    model: str
    mode: str
    server: str
    round: int
    health_s: float
    first_completion_s: float


def checkpoint(name: str, cache: Path, minutes: float, size: str) -> Path:
    """Made if it is not in `cache`. `size`: of the trained model, in SIZES."""
    made = cache / f"{name}-{size}"
    if all((made / file).exists() for file in ("config.json", "tokenizer.json")):  # the last that are written
        return made
    if name == TRAINED:
        print(f"training the small model for {minutes:g} minutes", flush=True)
        return train(made, minutes, SIZES[size])
    inflate(checkpoint(TRAINED, cache, minutes, size), made, SHAPES[name])
    return made


def make_prompts(model: Path) -> list[list[int]]:
    """What the trained model has not seen, in pieces of PROMPT tokens."""
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    encoded = [tokenizer.encode(text).ids for text in texts(SMALL.corpus)[1]]
    pieces = [tuple(ids[at : at + PROMPT]) for ids in encoded for at in range(0, len(ids) - PROMPT + 1, PROMPT)]
    return [list(piece) for piece in dict.fromkeys(pieces)]


def load(running: Running, prompts: list[list[int]], tokens: int, concurrency: int) -> dict[str, Any]:
    job = {"host": "127.0.0.1", "port": running.port, "model": "model", "prompts": prompts, "tokens": tokens, "concurrency": concurrency}
    done = subprocess.run([sys.executable, str(CLIENT)], input=json.dumps(job), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the client failed: {done.stderr[-2000:]}\nthe server's log: {running.log}")
    answer = dict(json.loads(done.stdout))
    short = [request["tokens"] for request in answer["requests"] if request["tokens"] != tokens]
    if short:
        raise SystemExit(f"{len(short)} requests got {short[0]} tokens, not {tokens}")
    return answer


def summary(answer: dict[str, Any], tokens: int) -> dict[str, float]:
    requests = answer["requests"]
    seconds = max(r["end"] for r in requests) - min(r["sent"] for r in requests)
    gaps = [later - earlier for r in requests for earlier, later in zip(r["arrivals"], r["arrivals"][1:], strict=False)]
    return {
        "tokens_per_s": tokens * len(requests) / seconds,
        "ttft_ms": 1e3 * median(r["arrivals"][0] - r["sent"] for r in requests),
        "tpot_ms": 1e3 * median((r["arrivals"][-1] - r["arrivals"][0]) / max(1, tokens - 1) for r in requests),
        "itl_ms": 1e3 * median(gaps or [0.0]),
        "client_share": answer["cpu_seconds"] / seconds,
    }


def accept_length(before: dict[str, float], after: dict[str, float]) -> float | None:
    drafts = after["drafts"] - before["drafts"]
    return 1 + (after["accepted"] - before["accepted"]) / drafts if drafts else None


class Bench:
    def __init__(self, args: argparse.Namespace, caches: Path) -> None:
        self.args = args
        self.servers = [mtpserve(args.dtype, args.mtpserve_options.split())]
        if args.vllm is not None:
            variants = [(dtype, cached) for dtype in args.vllm_dtype for cached in args.vllm_prefix_cache]
            self.servers += [vllm(args.vllm, dtype, cached, args.vllm_bind, caches) for dtype, cached in variants]
        self.starts: list[Start] = []
        self.measured: list[Measured] = []
        self.texts: dict[tuple[str, int], list[str]] = {}  # mtpserve's, by model and concurrency

    def run(self) -> None:
        for name in self.args.models:
            model = checkpoint(name, self.args.checkpoints, self.args.minutes, self.args.size)
            prompts = make_prompts(model)
            for mode in self.args.modes:
                for number in range(self.args.rounds):
                    for server in self.servers:
                        self.turn(server, name, model, mode, number, prompts)

    def turn(self, server: Server, name: str, model: Path, mode: str, number: int, prompts: list[list[int]]) -> None:
        given = iter(prompts)

        def take(count: int) -> list[list[int]]:
            taken = [prompt for prompt, _ in zip(given, range(count), strict=False)]
            if len(taken) < count:
                raise SystemExit(f"only {len(prompts)} prompts of {PROMPT} tokens are held out: ask for less concurrency or fewer waves")
            return taken

        with started(server, model, mode, take(1)[0]) as running:
            self.starts.append(Start(name, mode, server.name, number, running.health_seconds, running.first_seconds))
            for concurrency in self.args.concurrency:
                load(running, take(concurrency), min(WARM_UP, self.args.tokens), concurrency)
                before = running.counters()
                answer = load(running, take(max(concurrency * self.args.waves, LEAST)), self.args.tokens, concurrency)
                length = accept_length(before, running.counters())
                said = [request["text"] for request in answer["requests"]]
                same = [a == b for a, b in zip(said, self.texts.setdefault((name, concurrency), said), strict=True)]
                numbers = summary(answer, self.args.tokens)
                row = Measured(
                    name, mode, server.name, concurrency, number, accept_length=length, same_text=sum(same) / len(same), **numbers
                )
                self.measured.append(row)
                print(f"{name} {mode} round {number + 1} {server.name}, {concurrency} at once: {row.tokens_per_s:.1f} tok/s", flush=True)

    def cells(self) -> list[tuple[str, str, int]]:
        return list(dict.fromkeys((row.model, row.mode, row.concurrency) for row in self.measured))

    def of(self, cell: tuple[str, str, int], server: str, number: str) -> list[float]:
        rows = [row for row in self.measured if (row.model, row.mode, row.concurrency) == cell and row.server == server]
        return [value for row in rows if (value := getattr(row, number)) is not None]

    def fastest_peer(self, cell: tuple[str, str, int]) -> str | None:
        peers = [server.name for server in self.servers if server.name != "mtpserve"]
        return max(peers, key=lambda name: median(self.of(cell, name, "tokens_per_s")), default=None)

    def medians(self) -> list[dict[str, Any]]:
        """A row for each cell and server: medians, extremes, and mtpserve's medians over the server's, or over the fastest peer's."""
        out = []
        for cell in self.cells():
            for server in self.servers:
                row: dict[str, Any] = {"model": cell[0], "mode": cell[1], "concurrency": cell[2], "server": server.name}
                for number in ("tokens_per_s", "ttft_ms", "tpot_ms", "itl_ms", "accept_length", "same_text", "client_share"):
                    values = self.of(cell, server.name, number)
                    row[number] = median(values) if values else None
                speeds = self.of(cell, server.name, "tokens_per_s")
                row |= {"least_tokens_per_s": min(speeds), "most_tokens_per_s": max(speeds)}
                against = self.fastest_peer(cell) if server.name == "mtpserve" else server.name
                for number in RATIOS:
                    ratio = None if against is None else median(self.of(cell, "mtpserve", number)) / median(self.of(cell, against, number))
                    row[f"mtpserve_over_{number}"] = ratio
                out.append(row)
        return out


def shown(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def tables(bench: Bench) -> list[Table]:
    loads = Table(title="medians over rounds; ×: mtpserve's over this server's, in its own rows over the fastest other's")
    for name in ("model", "mode", "at once", "server"):
        loads.add_column(name)
    for name in ("tok/s", "least … most", "×", "TTFT ms", "×", "TPOT ms", "×", "ITL ms", "accepted", "same text"):
        loads.add_column(name, justify="right")
    for row in bench.medians():
        ratios = [shown(row[f"mtpserve_over_{number}"], 2) for number in RATIOS]
        loads.add_row(
            row["model"], row["mode"], str(row["concurrency"]), row["server"], shown(row["tokens_per_s"]),
            f"{shown(row['least_tokens_per_s'])} … {shown(row['most_tokens_per_s'])}", ratios[0], shown(row["ttft_ms"]), ratios[1],
            shown(row["tpot_ms"], 2), ratios[2], shown(row["itl_ms"], 2), shown(row["accept_length"], 2), shown(row["same_text"], 2),
        )  # fmt: skip
    begins = Table(title="seconds from a server's start: each round")
    for name in ("model", "mode", "server", "until /health answers", "until the first completion"):
        begins.add_column(name)
    for key in dict.fromkeys((start.model, start.mode, start.server) for start in bench.starts):
        of = [start for start in bench.starts if (start.model, start.mode, start.server) == key]
        begins.add_row(*key, " ".join(shown(start.health_s) for start in of), " ".join(shown(start.first_completion_s) for start in of))
    return [loads, begins]


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    def several(value: str) -> list[str]:
        return value.split(",")

    def numbers(value: str) -> list[int]:
        return [int(part) for part in value.split(",")]

    def caches(value: str) -> list[bool]:
        return [{"off": False, "on": True}[part] for part in value.split(",")]

    own = "bfloat16" if {"avx512_bf16", "amx_bf16"} & set(instruction_sets()) else "float32"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path, metavar="PATH", help="python of vLLM's venv, or its vllm (README.md says how to make it)")
    parser.add_argument("--vllm-prefix-cache", type=caches, default=[False, True], metavar="off,on")
    parser.add_argument("--vllm-dtype", type=several, default=[own], metavar="DTYPE,…", help="a server for each (default: %(default)s)")
    every = f"0-{(os.cpu_count() or 1) - 1}"
    parser.add_argument("--vllm-bind", default=every, metavar="CPUS", help="VLLM_CPU_OMP_THREADS_BIND (default: all, %(default)s)")
    parser.add_argument("--dtype", default="auto", help="mtpserve's (default: %(default)s)")
    parser.add_argument("--mtpserve-options", default="", metavar="OPTIONS", help="more options of mtpserve, in one string")
    parser.add_argument("--models", type=several, default=[TRAINED, *SHAPES], metavar=",".join([TRAINED, *SHAPES]))
    parser.add_argument("--modes", type=several, default=list(MODES), metavar=",".join(MODES))
    parser.add_argument("--concurrency", type=numbers, default=[1, 4, 16, 64], metavar="1,4,16,64")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--waves", type=int, default=2, help="requests of each of the concurrent clients, but 4 in all at least")
    parser.add_argument("--tokens", type=int, default=128, help="output tokens of each request")
    parser.add_argument("--minutes", type=float, default=9, help="of training, where the small model is not in --checkpoints yet")
    parser.add_argument("--size", choices=list(SIZES), default="6m", help="of the small model; toy to try this program")
    parser.add_argument("--checkpoints", type=Path, default=CACHE, help="where models are kept (default: %(default)s)")
    parser.add_argument("--json")
    return parser.parse_args(given)


def main() -> None:
    args = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # not without stopping the server
    for chosen, known in ((args.models, [TRAINED, *SHAPES]), (args.modes, MODES)):
        if unknown := set(chosen) - set(known):
            raise SystemExit(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    with tempfile.TemporaryDirectory() as caches:
        bench = Bench(args, Path(caches))
        bench.run()
    console = Console(width=None if sys.stdout.isatty() else 200)
    for table in tables(bench):
        console.print(table)
    peer = None if args.vllm is None else versions(args.vllm)
    how = {"servers": [server.described() for server in bench.servers], "peer": peer, "mtp": MTP}
    load_of = {"tokens": args.tokens, "prompt": PROMPT, "waves": args.waves}
    rows = {"rounds": [asdict(row) for row in bench.measured], "starts": [asdict(row) for row in bench.starts]}
    save(args.json, how | load_of | {"medians": bench.medians()} | rows)


if __name__ == "__main__":
    main()
