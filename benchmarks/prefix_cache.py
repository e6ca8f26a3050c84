"""The prefix cache and the order of service, in one engine: `python benchmarks/prefix_cache.py --json FILE [PART …]`. All parts by default:

unshared   tokens per second for prompts that share nothing, cache on / off (interleaved, medians)
long       a prompt of 1k, 8k and 32k tokens: seconds to its first token, computed and found; then the host's part of a decoding step,
           and of a step that admits a short request
planning   what scheduler and cache alone take for these two kinds of step, beside 1k, 8k and 32k tokens (interleaved, medians)
beside     first token of a short prompt, alone and beside 8 clients that send prompts of 1,900 tokens one after the other
gap        between two tokens of a running request while a prompt of 16k tokens enters, against the time of a chunk's own step
tiers      bytes per second of saves and loads against memcpy, of files against dd

Random weights of the bundled model's size with a longer context; nothing but time depends on them.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import count, pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import numpy as np
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parent))
from common.record import save
from common.shapes import write_config

from mtpserve import LLM
from mtpserve.cache.disk import DiskPages
from mtpserve.cache.groups import PageGroups
from mtpserve.cache.keys import root
from mtpserve.core.request import Request
from mtpserve.core.sampling import SamplingParams
from mtpserve.core.spec_sizes import SpecSizes
from mtpserve.core.state.request_state import RequestState
from mtpserve.engine.engine import Engine
from mtpserve.engine.scheduler import Scheduler
from mtpserve.runtime.paging import WORKERS
from mtpserve.tools.simulate.simulated import SimulatedDevice

CONTEXT = 40960
CONFIG: dict[str, Any] = {
    "architectures": ["MiMoForCausalLM"], "model_type": "mimo", "vocab_size": 2048, "hidden_size": 256, "intermediate_size": 768,
    "num_hidden_layers": 6, "num_nextn_predict_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "rms_norm_eps": 1e-6, "rope_theta": 640000.0, "max_position_embeddings": CONTEXT, "tie_word_embeddings": False,
    "attention_bias": True, "bos_token_id": 0, "eos_token_id": 1, "torch_dtype": "bfloat16", "hidden_act": "silu",
}  # fmt: skip


def engine(directory: Path, **options: Any) -> Engine:
    shared = {
        "load_format": "dummy",
        "speculative_algorithm": "NEXTN",
        "speculative_adaptive": False,
        "max_total_tokens": 90000,
        "random_seed": 0,
    }
    return LLM(str(directory), **(shared | options)).engine


def prompt(length: int, seed: object) -> list[int]:
    dice = random.Random(repr(seed))
    return [dice.randrange(2, 2048) for _ in range(length)]


class Client:
    """Requests by name, and when their tokens came."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self.sent, self.came = engine, dict[str, float](), dict[str, list[float]]()

    def send(self, name: str, tokens: list[int], output: int) -> None:
        self.sent[name], self.came[name] = time.perf_counter(), []
        self.engine.add(Request(name, tokens, SamplingParams(max_tokens=output, temperature=0, ignore_eos=True)))

    def step(self) -> list[str]:
        """→ those that have ended."""
        events = self.engine.step()
        for event in events:
            if event.tokens:
                self.came[event.id].append(time.perf_counter())
        return [event.id for event in events if event.finish is not None]

    def drain(self) -> None:
        while self.engine.has_work:
            self.step()

    def first(self, name: str) -> float:
        return self.came[name][0] - self.sent[name]


def unshared(directory: Path) -> dict[str, Any]:
    engines = {"on": engine(directory), "off": engine(directory, disable_radix_cache=True)}
    rates: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(9):
        for name in sorted(engines, reverse=turn % 2 == 1):
            client, began = Client(engines[name]), time.perf_counter()
            for who in range(16):
                client.send(f"{turn} {who}", prompt(100, (turn, who)), 80)
            client.drain()
            if turn:
                rates[name].append(16 * 80 / (time.perf_counter() - began))
    return {name: median(each) for name, each in rates.items()} | {
        "ratio": median(a / b for a, b in zip(rates["on"], rates["off"], strict=True))
    }


def timed_host(engine: Engine, steps: Callable[[], None]) -> list[float]:
    """Seconds of each step without what the runner takes."""
    launch, inside, hosts = engine.runner.launch, [0.0], list[float]()

    def launched(plan: Any) -> Any:
        began = time.perf_counter()
        made = launch(plan)
        inside[0] += time.perf_counter() - began
        return made

    step = engine.step

    def stepped() -> Any:
        inside[0], began = 0.0, time.perf_counter()
        events = step()
        hosts.append(time.perf_counter() - began - inside[0])
        return events

    engine.runner.launch, engine.step = launched, stepped  # type: ignore[method-assign]
    steps()
    del engine.runner.launch, engine.step
    return hosts


def long(directory: Path) -> dict[str, Any]:
    made, numbers = engine(directory), dict[str, Any]()
    for length in (1024, 8192, 32768):
        client, text = Client(made), prompt(length, length)
        client.send("miss", text, 1)
        client.drain()
        client.send("hit", [*text, 7], 200)
        while not client.came["hit"]:
            client.step()

        def decode(client: Client = client) -> None:
            for _ in range(40):
                client.step()

        decoding = timed_host(made, decode)

        def admit(client: Client = client, length: int = length) -> None:
            for number in range(20):
                client.send(f"{length} {number}", prompt(30, (length, number)), 1)
                client.step()

        admitting = timed_host(made, admit)
        client.drain()
        numbers[str(length)] = {
            "miss_s": client.first("miss"), "hit_s": client.first("hit"), "host_decoding_us": 1e6 * median(decoding),
            "host_admitting_us": 1e6 * median(admitting),
        }  # fmt: skip
    return numbers


def planning(directory: Path) -> dict[str, Any]:
    pairs = {length: planned(length) for length in (1024, 8192, 32768)}
    taken = {length: ([step()], [admit()]) for length, (step, admit) in pairs.items()}
    for _ in range(400):
        for length, (step, admit) in pairs.items():
            taken[length][0].append(step())
            taken[length][1].append(admit())
    return {str(length): {"decoding_us": 1e6 * median(a), "admitting_us": 1e6 * median(b)} for length, (a, b) in taken.items()}


def planned(length: int) -> tuple[Callable[[], float], Callable[[], float]]:
    """Seconds of planning and booking a step that decodes a request of so many tokens, and one that admits a short request beside it."""
    device = SimulatedDevice(SpecSizes(steps=3, num_proposed=3, written=3), (0.8, 0.7, 0.6))
    scheduler = device.limited(Scheduler)(PageGroups([None], [6000], 16, 512), max_running=8, token_budget=512, eos_ids=())
    numbers = count(1)

    def add(prompt: list[int], output: int) -> RequestState:
        start = root(b"", "")
        request = Request(str(next(numbers)), prompt, SamplingParams(), seed=0)
        req = RequestState(request, list(prompt), len(prompt) + output)
        req.cache.hash_root = start
        device.prepare(req, 0)
        device.answers[req.id] = [1] * output
        scheduler.add(req)
        return req

    def step() -> float:
        began = time.perf_counter()
        plan = scheduler.plan(3)
        between = time.perf_counter()
        result = device.launch(plan.plan)
        again = time.perf_counter()
        scheduler.commit(plan, result)
        return between - began + time.perf_counter() - again

    def admit() -> float:
        began = time.perf_counter()
        add(prompt(30, (length, next(numbers))), 1)
        return time.perf_counter() - began + step()

    whole = add(list(range(length)), 6000)
    while whole.num_computed_tokens < length:
        step()
    return step, admit


def beside(directory: Path) -> dict[str, Any]:
    """Loops of 8 clients, each with a new prompt every time; a short request every few steps."""
    made = engine(directory, context_length=2048)
    client = Client(made)
    for number in range(12):
        client.send(f"alone {number}", prompt(30, number), 4)
        client.drain()
    alone = [client.first(f"alone {number}") for number in range(2, 12)]
    numbers: dict[str, Any] = {"alone_ms": 1e3 * median(alone)}
    for name, options in (("default", {}), ("no bounds", {"long_prefill_token_threshold": 100000})):
        made = engine(directory, context_length=2048, **options)
        client, turns, short = Client(made), 0, 0
        for who in range(8):
            client.send(f"long {who} 0", prompt(1900, (who, 0)), 20)
        until = time.perf_counter() + 30
        open_short = 0
        while time.perf_counter() < until:
            for ended in client.step():
                if ended.startswith("long"):
                    turns += 1
                    _, who_text, turn = ended.split()
                    client.send(f"long {who_text} {int(turn) + 1}", prompt(1900, (who_text, turn)), 20)
                else:
                    open_short -= 1
            if not open_short:
                client.send(f"short {short}", prompt(30, ("short", short)), 4)
                open_short, short = 1, short + 1
        firsts = [client.first(f"short {number}") for number in range(short) if client.came[f"short {number}"]]
        numbers[name] = {
            "short_ms": 1e3 * median(firsts), "short_p90_ms": 1e3 * quantiles(firsts, n=10)[8] if len(firsts) > 1 else None,
            "ratio": median(firsts) / median(alone), "long_prompts_per_s": turns / 30,
        }  # fmt: skip
    return numbers


def gap(directory: Path) -> dict[str, Any]:
    made = engine(directory)
    client = Client(made)
    client.send("alone", prompt(16384, "alone"), 1)
    chunks, before = list[float](), time.perf_counter()
    while made.has_work:
        client.step()
        chunks.append(time.perf_counter() - before)
        before = time.perf_counter()
    client.send("stream", prompt(30, "stream"), 2000)
    while len(client.came["stream"]) < 20:
        client.step()
    began = len(client.came["stream"])
    client.send("long", prompt(16384, "long"), 1)
    while not client.came["long"]:
        client.step()
    times = client.came["stream"][began:]
    gaps = [b - a for a, b in pairwise(times)]
    made.abort("stream")
    client.drain()
    p99 = quantiles(gaps, n=100)[98]
    return {
        "gap_p50_ms": 1e3 * median(gaps), "gap_p99_ms": 1e3 * p99, "chunk_p50_ms": 1e3 * median(chunks), "chunk_max_ms": 1e3 * max(chunks),
        "p99_over_longest_chunk": p99 / max(chunks), "long_alone_s": sum(chunks), "long_beside_s": client.first("long"),
    }  # fmt: skip


def tiers(directory: Path) -> dict[str, Any]:
    """Pages of 128 tokens, as large in bytes as GPUs' pages are. The disk's own speed is dd's without the system's cache."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_DIR")) as folder:
        made = engine(directory, page_size=128, max_total_tokens=16384, kv_offload_gib=1.0)
        client = Client(made)
        for turn in range(2):
            for who in range(24):
                client.send(f"{turn} {who}", prompt(3000, who), 1)
                client.drain()
        stats = made.stats
        rates = {kind: stats.transfer_bytes_total[kind] / stats.transfer_seconds_total[kind] / 1e9 for kind in ("save", "load")}
        page = stats.transfer_bytes_total["save"] // stats.transfers_total["save"] // 4096 * 4096
        source, target = np.ones((256, page), np.uint8), np.ones((256, page), np.uint8)
        bound = {"memcpy": rate(256 * page, lambda: [np.copyto(to, of) for to, of in zip(target, source, strict=True)])}
        disk, keys = DiskPages(folder, 4 << 30, bytes(16)), [number.to_bytes(16, "big") for number in range(256)]
        with ThreadPoolExecutor(WORKERS) as threads:
            for kind, work in (("spill", disk.write), ("fetch", disk.read)):
                pages = [row.data for row in source]
                rates[kind] = rate(256 * page, lambda work=work, pages=pages: list(threads.map(work, [0] * 256, keys, pages)), 1)
        for kind, arguments in (
            ("spill", [f"of={folder}/dd", "if=/dev/zero", "oflag=direct"]),
            ("fetch", [f"if={folder}/dd", "of=/dev/null", "iflag=direct"]),
        ):
            line = ["dd", *arguments, f"bs={page}", "count=256"]
            bound[f"dd {kind}"] = rate(256 * page, lambda line=line: subprocess.run(line, check=True, capture_output=True), 1)
    names = {"save": "memcpy", "load": "memcpy", "spill": "dd spill", "fetch": "dd fetch"}
    shares = {kind: rates[kind] / bound[name] for kind, name in names.items()}
    return {"page_kib": page / 1024, "gb_per_s": rates, "bound_gb_per_s": bound, "share": shares}


def rate(size: int, work: Callable[[], object], turns: int = 4) -> float:
    """GB/s of so many bytes in each turn."""
    began = time.perf_counter()
    for _ in range(turns):
        work()
    return turns * size / (time.perf_counter() - began) / 1e9


PARTS = {"unshared": unshared, "long": long, "planning": planning, "beside": beside, "gap": gap, "tiers": tiers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], default=[], help="default: all")
    parser.add_argument("--json")
    given = parser.parse_args()
    console, numbers = Console(), dict[str, Any]()
    with tempfile.TemporaryDirectory() as directory:
        model = write_config(Path(directory), CONFIG)
        for name in given.parts or PARTS:
            numbers[name] = PARTS[name](model)
            console.print(name, numbers[name])
    save(given.json, numbers)


if __name__ == "__main__":
    main()
