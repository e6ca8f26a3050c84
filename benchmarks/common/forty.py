"""Forty streamed requests while something happens, and how each of them ended: of the trials with routers, Ray Serve and Dynamo.

A request ends well with status 200, a finish_reason and [DONE].
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import httpx

REQUESTS, TOKENS, APART_S = 40, 64, 0.05


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def ok(url: str) -> bool:
    with suppress(httpx.TransportError):
        return httpx.get(url, timeout=5).status_code == 200
    return False


def until(condition: Callable[[], bool], what: str, seconds: float = 120) -> float:
    """→ how long it took."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > seconds:
            raise SystemExit(f"{what} is not ready after {seconds:g} s")
        time.sleep(0.1)
    return time.monotonic() - began


def asked(number: int) -> tuple[str, dict[str, Any]]:
    """Path and body: completions and chats that share four beginnings."""
    text = f"# part {number % 4} of the module\nimport os\nimport sys\n\n\ndef main_{number}("
    body = {"model": "demo", "temperature": 0, "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
    if number % 2:
        return "/v1/chat/completions", body | {"messages": [{"role": "user", "content": text}]}
    return "/v1/completions", body | {"prompt": text}


async def one(http: httpx.AsyncClient, number: int) -> tuple[str, str]:
    """→ how it ended, "ok" or what went wrong, and its text."""
    path, body = asked(number)
    text, reason = "", None
    try:
        async with http.stream("POST", path, json=body) as answer:
            if answer.status_code != 200:
                return f"status {answer.status_code}", (await answer.aread()).decode(errors="replace")[:200]
            async for line in answer.aiter_lines():
                if line == "data: [DONE]":
                    return ("ok", text) if reason == "length" else (f"finish_reason {reason}", text)
                if not line.startswith("data: "):
                    continue
                chunk = json.loads(line[6:])
                if "choices" not in chunk:
                    return "error in the stream", line[:200]
                for choice in chunk["choices"]:
                    text += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
                    reason = choice.get("finish_reason") or reason
    except httpx.TransportError as error:
        return f"{type(error).__name__}", text
    return "cut", text


async def load(url: str, midway: Callable[[], Awaitable[None]] | None = None) -> list[tuple[str, str]]:
    """40 requests, 50 ms apart. `midway`: after a third of them."""
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=httpx.Limits(max_connections=REQUESTS)) as http:
        tasks = []
        for number in range(REQUESTS):
            tasks.append(asyncio.create_task(one(http, number)))
            await asyncio.sleep(APART_S)
            if midway is not None and number == REQUESTS // 3:
                await midway()
        return await asyncio.gather(*tasks)


def sending(pid: Callable[[], int], number: signal.Signals) -> Callable[[], Awaitable[None]]:
    async def send() -> None:
        os.kill(pid(), number)

    return send


def summary(answers: list[tuple[str, str]], expected: list[str]) -> dict[str, Any]:
    ended = Counter(how for how, _ in answers)
    wrong = sum(how == "ok" and text != whole for (how, text), whole in zip(answers, expected, strict=True))
    return {"ok": ended["ok"], "other_texts": wrong, "ended": dict(ended), "examples": [text for how, text in answers if how != "ok"][:3]}
