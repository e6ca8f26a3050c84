"""The client of peers/cpu.py, a process of its own: a job as JSON on stdin, what was seen as JSON on stdout.

It keeps `concurrency` requests running, each on a connection of its own that is used again, and only notes when which bytes came: they are
read after the last request has ended, so that the servers lose as little as possible of the cores that it shares with them.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Iterator
from typing import Any, cast

import httptools
import uvloop

Piece = tuple[float, bytes]


class Connection(asyncio.Protocol):
    """One request at a time."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.now = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(error or ConnectionError("the server closed the connection in the middle of an answer"))

    def data_received(self, data: bytes) -> None:
        self.now = time.perf_counter()
        self.parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        self.pieces.append((self.now, body))

    def on_message_complete(self) -> None:
        self.done.set_result(self.parser.get_status_code())

    async def post(self, path: str, body: bytes) -> tuple[int, float, list[Piece]]:
        """→ status, when the request was sent, what came."""
        self.parser, self.pieces, self.done = httptools.HttpResponseParser(self), [], asyncio.get_running_loop().create_future()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        sent = time.perf_counter()
        self.transport.write(head.encode() + body)
        return await self.done, sent, self.pieces


def events(pieces: list[Piece]) -> Iterator[tuple[float, dict[str, Any]]]:
    """A stream's events, each with when its last byte came."""
    rest = b""
    for now, data in pieces:
        *whole, rest = (rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in whole:
            if event.startswith(b"data: {"):
                yield now, json.loads(event.removeprefix(b"data: "))


def summary(status: int, sent: float, pieces: list[Piece]) -> dict[str, Any]:
    """Times in seconds on one clock for all requests of this process. `arrivals`: of chunks that have text."""
    if status != 200:
        raise SystemExit(f"the server answered {status}: {b''.join(data for _, data in pieces)[:500]!r}")
    arrivals, text, counted, now = list[float](), "", dict[str, int](), sent
    for now, event in events(pieces):
        if "error" in event:
            raise SystemExit(f"the server answered {event}")
        for choice in event["choices"]:
            if choice["text"]:
                arrivals.append(now)
                text += choice["text"]
        if event.get("usage"):
            counted = event["usage"]
    totals = {"tokens": counted.get("completion_tokens", 0), "prompt_tokens": counted.get("prompt_tokens", 0)}
    return {"sent": sent, "arrivals": arrivals, "end": now, "text": text} | totals


async def drive(job: dict[str, Any]) -> list[dict[str, Any]]:
    asked = [json.dumps(body).encode() for body in job["bodies"]]
    waiting, seen = iter(enumerate(asked)), dict[int, tuple[int, float, list[Piece]]]()

    async def worker() -> None:
        _, connection = await asyncio.get_running_loop().create_connection(Connection, job["host"], job["port"])
        for number, body in waiting:
            seen[number] = await connection.post("/v1/completions", body)
        connection.transport.close()

    await asyncio.gather(*(worker() for _ in range(min(job["concurrency"], len(asked)))))
    return [summary(*seen[number]) for number in range(len(asked))]


if __name__ == "__main__":
    requests = uvloop.run(drive(json.load(sys.stdin)))
    json.dump({"requests": requests, "cpu_seconds": time.process_time()}, sys.stdout)
