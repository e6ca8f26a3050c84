"""A soak test: 10,000 requests of all kinds, 64 at once, against the demo model: `python benchmarks/soak.py --json FILE`.

One request in ten disconnects in the middle, one in twenty is far too large and one in twenty is malformed; the others use all parts of
the API. Checked: no 5xx but a deliberate 503, every error in OpenAI's form, no page leaked, and constant memory of both processes: the
last quarter's mean against the first's, after a warm-up of 2,000 requests that fills caches. Exit code 1 if a check fails.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import IO, Any

import httpx
from common.record import save

ROOT = Path(__file__).parents[1]
WORDS = "def class return import for while if else self None True yield with as try except lambda".split()  # noqa: SIM905
MALFORMED: list[Any] = [
    b"{", b"[]", b"\xff\xfe", {"model": "demo"}, {"model": "demo", "prompt": 7}, {"model": "no-such", "prompt": "a"},
    {"model": "demo", "prompt": "a", "temperature": -1}, {"model": "demo", "prompt": "a", "max_tokens": "many"},
    {"model": "demo", "prompt": "a", "n": 1000}, {"model": "demo", "prompt": [99999999]}, {"model": "demo", "prompt": "a", "regex": "("},
    {"model": "demo", "prompt": "a", "json_schema": "{"}, {"model": "demo", "prompt": "a", "logit_bias": {"x": 1}},
]  # fmt: skip

GUESS = {"type": "content", "content": "def f(x):\n"}


@dataclass(slots=True)
class Seen:
    statuses: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    memory: list[tuple[int, ...]] = field(default_factory=list)
    done: int = 0
    tokens: int = 0


def asked(choose: random.Random) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": "demo",
        "prompt": " ".join(choose.choices(WORDS, k=choose.randint(1, 30))),
        "max_tokens": choose.randint(1, 24),
        "temperature": choose.choice([0, 0.6, 1.0]),
        "stream": choose.random() < 0.5,
    }
    extra: list[dict[str, Any]] = [
        {}, {}, {"n": 2}, {"logprobs": 2}, {"stop": ["\n"]}, {"seed": 3}, {"repetition_penalty": 1.2}, {"regex": "[a-z]{2,9}"},
        {"json_schema": '{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]}'}, {"prediction": GUESS},
        {"speculative": {"enabled": False}}, {"min_p": 0.05, "top_k": 20}, {"logit_bias": {"17": 3}}, {"echo": True},
    ]  # fmt: skip
    return body | choose.choice(extra)


def shaped(body: bytes) -> bool:
    """OpenAI's: an object `error` with message, type, param and code."""
    try:
        error = json.loads(body)["error"]
    except (ValueError, KeyError, TypeError):
        return False
    return isinstance(error, dict) and {"message", "type", "param", "code"} <= set(error) and isinstance(error["message"], str)


async def one(client: httpx.AsyncClient, number: int, seen: Seen) -> None:
    choose = random.Random(number)
    lot = choose.random()
    kind = "hang up" if lot < 0.10 else "oversized" if lot < 0.15 else "malformed" if lot < 0.20 else "plain"
    body: Any = asked(choose)
    if kind == "oversized":
        body["prompt"] = choose.choice(["x " * 50_000, "y" * (9 << 20)])
    elif kind == "malformed":
        body = choose.choice(MALFORMED)
    elif kind == "hang up":
        body |= {"stream": True, "max_tokens": 200}
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        async with client.stream("POST", "/v1/completions", content=content, headers={"content-type": "application/json"}) as answer:
            if kind == "hang up" and answer.status_code == 200:
                async for _ in answer.aiter_lines():
                    if choose.random() < 0.3:
                        break
                seen.statuses["hang up"] += 1
                return
            data = await answer.aread()
    except httpx.TransportError as error:
        # A server may refuse a body before it has read all of it.
        seen.statuses[f"{kind}: {type(error).__name__}"] += 1
        if kind != "oversized":
            seen.wrong.append(f"{kind}: {type(error).__name__} {error}")
        return
    finally:
        seen.done += 1
    seen.statuses[f"{kind}: {answer.status_code}"] += 1
    expected = answer.status_code == 200 if kind == "plain" else 400 <= answer.status_code < 500 if kind != "hang up" else True
    if answer.status_code >= 400 and not shaped(data):
        seen.wrong.append(f"{kind}: {answer.status_code} with the body {data[:200]!r}")
    elif not expected and answer.status_code not in (429, 503):
        seen.wrong.append(f"{kind}: {answer.status_code} {data[:300]!r} for {content[:200]!r}")
    elif answer.status_code == 200 and not body["stream"]:
        seen.tokens += json.loads(data)["usage"]["completion_tokens"]


def resident(pids: list[int]) -> tuple[int, ...]:
    """Bytes."""
    return tuple(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") for pid in pids)


async def watch(pids: list[int], seen: Seen) -> None:
    while True:
        seen.memory.append((seen.done, *resident(pids)))
        await asyncio.sleep(1)


async def drive(url: str, pids: list[int], warm_up: int, total: int, at_once: int) -> Seen:
    seen, gate = Seen(), asyncio.Semaphore(at_once)

    async def limited(number: int) -> None:
        async with gate:
            await one(client, number, seen)

    limits = httpx.Limits(max_connections=at_once, max_keepalive_connections=at_once)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        await asyncio.gather(*(limited(number) for number in range(total, total + warm_up)))
        seen.done = 0
        watching = asyncio.create_task(watch(pids, seen))
        await asyncio.gather(*(limited(number) for number in range(total)))
        watching.cancel()
        for _ in range(50):
            text = (await client.get("/metrics")).text
            metrics = {
                name: float(value)
                for name, value in re.findall(r"^(mtpserve_\w+)\{model_name=\"[^\"]*\"\} ([\d.e+]+)$", text, re.MULTILINE)
            }
            if metrics["mtpserve_requests_running"] == metrics["mtpserve_kv_pages_used"] == metrics["mtpserve_requests_waiting"] == 0:
                break
            await asyncio.sleep(0.2)
        else:
            seen.wrong.append(f"{metrics['mtpserve_kv_pages_used']:.0f} pages are still in use")
    return seen


def growth(seen: Seen, process: int, total: int) -> float:
    """The last quarter's mean over the first's."""
    quarters = [[row[process] for row in seen.memory if k * total / 4 <= row[0] < (k + 1) * total / 4] for k in range(4)]
    return mean(quarters[3]) / mean(quarters[0])


def ready(server: subprocess.Popen[bytes], log: IO[str]) -> str:
    """→ where it listens."""
    while server.poll() is None:
        log.seek(0)
        if hit := re.search(r"is ready.*?(http://[\d.:]+)", log.read()):
            return hit[1]
        time.sleep(0.2)
    raise SystemExit("the server did not start")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--warm-up", type=int, default=2000)
    parser.add_argument("--at-once", type=int, default=64)
    parser.add_argument("--json")
    args = parser.parse_args()
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "kernels")))
    command = [sys.executable, "-m", "mtpserve", "launch", "--model", "demo", "--speculative-algorithm", "NEXTN", "--port", "0"]
    command += ["--log-interval", "0", "--max-total-tokens", "32768"]
    log = tempfile.TemporaryFile("w+")  # noqa: SIM115
    server = subprocess.Popen(command, env=os.environ | {"PYTHONPATH": paths}, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
    try:
        url = ready(server, log)
        children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
        start = time.perf_counter()
        seen = asyncio.run(drive(url, [server.pid, *map(int, children)], args.warm_up, args.requests, args.at_once))
        spent = time.perf_counter() - start
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(timeout=60)
    grown = [growth(seen, process, args.requests) for process in range(1, len(seen.memory[0]))]
    if any(abs(ratio - 1) > 0.05 for ratio in grown):
        seen.wrong.append(f"memory did not stay: {grown}")
    for status, count in sorted(seen.statuses.items()):
        print(f"{count:6} {status}")
    print(f"{args.requests} requests in {spent:.0f} s; memory, last quarter against the first: {', '.join(f'{r:.3f}' for r in grown)}")
    for line in seen.wrong[:20]:
        print("WRONG", line)
    result = {"statuses": dict(seen.statuses), "memory": grown, "wrong": seen.wrong[:20]}
    save(args.json, {"requests": args.requests, "warm_up": args.warm_up, "at_once": args.at_once, "seconds": spent} | result)
    raise SystemExit(int(bool(seen.wrong)))


if __name__ == "__main__":
    main()
