"""Events that come together are streamed as those that come one by one, in fewer writes."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import httpx
import pytest

from mtpserve.server.app import create_app
from mtpserve.text.tokenizer import Tokenizer
from tests.server.fake_client import FakeClient

USER = [{"role": "user", "content": "hello"}]
USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "hello", "max_tokens": 31}),
    ("/v1/completions", {"prompt": "hello", "max_tokens": 31, "logprobs": 2, "echo": True, **USAGE}),
    ("/v1/completions", {"prompt": ["a", "b"], "n": 2, "max_tokens": 31, "return_token_ids": True}),
    ("/v1/chat/completions", {"messages": USER, "max_tokens": 31, **USAGE}),
    ("/v1/chat/completions", {"messages": USER, "max_tokens": 31, "logprobs": True, "top_logprobs": 1, "return_spec_trace": True}),
    ("/v1/chat/completions", {"messages": USER, "max_tokens": 31, "stop": ["PQ"]}),
    ("/v1/chat/completions", {"messages": USER, "max_tokens": 31, "seed": 500}),
    ("/v1/messages", {"messages": USER, "max_tokens": 31, "model": "fake"}),
    ("/v1/responses", {"input": "hello", "max_output_tokens": 31}),
    ("/generate", {"text": "hello", "sampling_params": {"max_new_tokens": 31}, "return_logprob": True}),
]


def streamed(tokenizer: Tokenizer, path: str, body: dict[str, Any], together: int) -> tuple[list[str], int]:
    """Its events, without what differs from one answer to the next, and the number of writes."""
    app, writes = create_app(FakeClient(together=together), tokenizer), 0

    async def counted(scope: Any, receive: Any, send: Any) -> None:
        async def written(message: Any) -> None:
            nonlocal writes
            writes += message["type"] == "http.response.body"
            await send(message)

        await app(scope, receive, written)

    async def ask() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(counted), base_url="http://test") as http:
            return await http.post(path, json=body | {"stream": True})

    text = asyncio.run(ask()).text
    text = re.sub(r"\b(chatcmpl-|cmpl-|msg_|resp_|rs_)?[0-9a-f]{32}\b", "ID", text)
    text = re.sub(r'"(created|created_at|e2e_latency)":[0-9.e-]+', r'"\1":0', text)
    return text.split("\n\n"), writes


@pytest.mark.parametrize(("path", "body"), CASES)
def test_the_events_are_the_same(tokenizer: Tokenizer, path: str, body: dict[str, Any]) -> None:
    alone, writes = streamed(tokenizer, path, body, 1)
    assert len(alone) >= 5
    for together in (3, 100):
        events, fewer = streamed(tokenizer, path, body, together)
        # The choices of one answer come in any order, each in its own.
        assert by_choice(events) == by_choice(alone)
        assert fewer < writes


def by_choice(events: list[str]) -> list[tuple[int, str]]:
    found = []
    for event in events:
        chunk = json.loads(event[6:]) if event.startswith("data: {") else {}
        found.append((chunk["choices"][0]["index"] if chunk.get("choices") else 9, event))
    return sorted(found, key=lambda each: each[0])
