"""What the front end costs: CPU time of its process for each streamed token, with many streams at once.

The front end is the real one (uvicorn, the app, the demo model's tokenizer), in a process of its own, behind it an engine process that
computes nothing and gives every stream its tokens once a step (common/paced.py), before it this process, which reads all streams over
loopback and compares every text. What is counted is the process's CPU time, of all its threads, from the step in which all streams have
begun to the one in which the first ends: a machine that others use disturbs it little, and admission is not in it.

`--against DIR` measures another checkout with the same script, one after the other, `--rounds` times.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from common.paced import DEMO, STEP_S, STEP_TOKENS, spoken
from common.record import save

from mtpserve.text.tokenizer import Tokenizer

ROOT = Path(__file__).parents[1]
CHAT = {"messages": [{"role": "user", "content": "Write some code."}], "temperature": 0}
TEXT = {"prompt": "Write some code.", "temperature": 0}
# Name → path and body.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", CHAT),
    "completions": ("/v1/completions", TEXT),
    "usage": ("/v1/chat/completions", CHAT | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}),
    "stop": ("/v1/chat/completions", CHAT | {"stop": ["\n\n\n\n", "###"]}),
    "logprobs": ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 2}),
}


@contextmanager
def served(checkout: Path, step_s: float, step_tokens: int) -> Iterator[tuple[int, int]]:
    """The front end's process id and its port."""
    paths = os.pathsep.join(map(str, (checkout, checkout / "kernels", ROOT / "benchmarks")))
    environment = os.environ | {"PYTHONPATH": paths, STEP_S: str(step_s), STEP_TOKENS: str(step_tokens)}
    command = [sys.executable, "-m", "common.paced"]
    with subprocess.Popen(command, env=environment, cwd=checkout, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            port = re.search(r":(\d+)\s", process.stdout.readline())
            assert port is not None
            yield process.pid, int(port[1])
        finally:
            process.terminate()


def cpu_seconds(pid: int) -> float:
    """Of all threads of a process: its CPU clock, as clock_getcpuclockid(3) names it on Linux."""
    return time.clock_gettime((~pid << 3) | 2)


@dataclass(slots=True)
class Window:
    """From when all streams have begun until the first ends."""

    streams: int
    pid: int
    begun: int = 0
    events: int = 0  # of all streams
    first: tuple[float, float, int] | None = None  # CPU time, wall time, events
    last: tuple[float, float, int] | None = None

    def now(self) -> tuple[float, float, int]:
        return cpu_seconds(self.pid), time.perf_counter(), self.events

    def begin(self) -> None:
        self.begun += 1
        if self.begun == self.streams:
            self.first = self.now()

    def end(self) -> None:
        self.last = self.last or self.now()


class Stream(asyncio.Protocol):
    """Sends one request and reads its answer as cheaply as can be: it counts events, and keeps the bytes for later."""

    def __init__(self, head: bytes, window: Window, ended: asyncio.Future[bytes]) -> None:
        self.head, self.window, self.ended = head, window, ended
        self.parts: list[bytes] = []
        self.begun = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(self.head)

    def data_received(self, data: bytes) -> None:
        count = data.count(b"data: {")
        if count and not self.begun:
            self.begun = True
            self.window.begin()
        self.window.events += count
        self.parts.append(data)
        if b"data: [DONE]" in data:
            self.window.end()
            self.ended.set_result(b"".join(self.parts))


@dataclass(slots=True)
class Answer:
    text: str = ""
    events: int = 0
    usage: list[int] = field(default_factory=list)


def answer_of(raw: bytes) -> Answer:
    head, _, rest = raw.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), raw[:500]
    body = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        body, rest = body + rest[: int(size, 16)], rest[int(size, 16) + 2 :]
    answer = Answer()
    for line in body.decode().split("\n\n")[:-2]:
        chunk = json.loads(line.removeprefix("data: "))
        answer.events += 1
        for choice in chunk["choices"]:
            answer.text += choice["text"] if "text" in choice else choice["delta"].get("content", "")
        if chunk.get("usage"):
            answer.usage.append(chunk["usage"]["completion_tokens"])
    return answer


async def streamed(pid: int, port: int, kind: str, streams: int, tokens: int) -> tuple[Window, list[Answer]]:
    path, body = KINDS[kind]
    content = json.dumps(body | {"max_tokens": tokens, "stream": True}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n".encode()
    loop, window = asyncio.get_running_loop(), Window(streams, pid)
    ended = [loop.create_future() for _ in range(streams)]
    opened = [await loop.create_connection(lambda each=each: Stream(head + content, window, each), "127.0.0.1", port) for each in ended]  # type: ignore[misc]
    raw = await asyncio.gather(*ended)
    for transport, _ in opened:
        transport.close()
    return window, [answer_of(each) for each in raw]


def measure(checkout: Path, kind: str, streams: int, step_tokens: int, step_s: float, steps: int) -> dict[str, float]:
    tokens = step_tokens * steps
    with served(checkout, step_s, step_tokens) as (pid, port):
        asyncio.run(streamed(pid, port, kind, streams, 16 * step_tokens))  # what is only done once
        window, answers = asyncio.run(streamed(pid, port, kind, streams, tokens))
    text = spoken()
    wanted = Tokenizer(DEMO).decode([text[i % len(text)] for i in range(tokens)])
    assert all(answer.text == wanted for answer in answers), "a stream's text is not the engine's"
    assert window.first is not None and window.last is not None
    cpu, wall, events = (after - before for before, after in zip(window.first, window.last, strict=True))
    return {
        "us_per_token": round(1e6 * cpu / (events * step_tokens), 2),
        "us_per_event": round(1e6 * cpu / events, 2),
        "load": round(cpu / wall, 3),  # of one core
        "tokens_per_second": round(events * step_tokens / wall, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--step-tokens", type=int, nargs="+", default=[1, 3], help="tokens that a step gives each stream")
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--against", type=Path, metavar="DIR", help="another checkout, to compare with")
    parser.add_argument("--note", help="what the numbers' readers must know")
    parser.add_argument("--json")
    args = parser.parse_args()
    sides = {"this": ROOT} | ({} if args.against is None else {"other": args.against.resolve()})
    table: dict[str, dict[str, dict[str, float]]] = {}
    for kind in args.kinds:
        for tokens in args.step_tokens:
            found: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
            for _ in range(args.rounds):
                for name, checkout in sides.items():
                    found[name].append(measure(checkout, kind, args.streams, tokens, args.step_ms / 1e3, args.steps))
            case = f"{kind}, {tokens} a step"
            table[case] = {name: {part: median(run[part] for run in runs) for part in runs[0]} for name, runs in found.items()}
            for name, numbers in table[case].items():
                print(f"{case:24} {name:5} " + "  ".join(f"{part} {value:g}" for part, value in numbers.items()), flush=True)
    setting = {"streams": args.streams, "step_ms": args.step_ms, "steps": args.steps, "rounds": args.rounds}
    noted = {} if args.note is None else {"note": args.note}
    save(args.json, setting | noted | {"by_case": table})


if __name__ == "__main__":
    main()
