"""The two generation routes, streamed and not, over a fake engine."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Coroutine
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from mtpserve.server.http.sse import EventStream
from mtpserve.text.tokenizer import Tokenizer
from tests.server.conftest import events
from tests.server.fake_client import FakeClient
from tests.server.fake_engine import CONTEXT, FIRST_TOKEN

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hello"}]


def body(route: str, **more: Any) -> dict[str, Any]:
    return ({"prompt": "hello"} if route == COMPLETIONS else {"messages": USER}) | {"model": "fake", "max_tokens": 9} | more


def text_of(tokenizer: Tokenizer, count: int) -> str:
    return tokenizer.decode(list(range(FIRST_TOKEN, FIRST_TOKEN + count)))


def post(http: httpx.AsyncClient, route: str, content: Any) -> httpx.Response:
    return asyncio.run(http.post(route, json=content))


def test_torch_is_not_imported() -> None:
    code = "import sys, mtpserve.server.app, mtpserve.server.launch, mtpserve.engine.process.client; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


# As in vLLM.
NOT_ASKED_FOR = dict.fromkeys(("logprobs", "prompt_logprobs", "token_ids", "prompt_token_ids"))


def test_a_completion(http: httpx.AsyncClient, client: FakeClient, tokenizer: Tokenizer) -> None:
    answer = post(http, COMPLETIONS, body(COMPLETIONS)).json()
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    ended = {"finish_reason": "length", "stop_reason": None, "matched_stop": None}
    assert answer["choices"] == [{"index": 0, "text": text_of(tokenizer, 9), **NOT_ASKED_FOR, **ended}]
    prompt = client.submitted[0].prompt
    assert prompt == tokenizer.encode("hello")
    usage = answer["usage"]
    assert usage.pop("speculative") == {"steps": 5, "draft_tokens": 10, "accepted_tokens": 4}
    assert usage.pop("completion_tokens_details") == {
        "accepted_prediction_tokens": 0,
        "rejected_prediction_tokens": 5,
        "reasoning_tokens": 0,
    }
    assert usage.pop("prompt_tokens_details") == {"cached_tokens": 0}
    assert usage == {"prompt_tokens": len(prompt), "completion_tokens": 9, "total_tokens": len(prompt) + 9}


def test_a_chat(http: httpx.AsyncClient, client: FakeClient, tokenizer: Tokenizer) -> None:
    answer = post(http, CHAT, body(CHAT)).json()
    assert answer["object"] == "chat.completion"
    choice = answer["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": text_of(tokenizer, 9), "refusal": None}
    assert choice["finish_reason"] == "length"
    assert client.submitted[0].prompt == tokenizer.encode("<|begin|>user: hello\nassistant:", special=False)


@pytest.mark.parametrize("route", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("stop", [None, "P", "JKL"])
def test_a_stream_adds_up_to_the_whole(http: httpx.AsyncClient, route: str, stop: str | None) -> None:
    async def both() -> tuple[httpx.Response, httpx.Response]:
        options = {"stream": True, "stream_options": {"include_usage": True}, "cache_salt": "another"}
        return await http.post(route, json=body(route, stop=stop)), await http.post(route, json=body(route, stop=stop, **options))

    whole, stream = asyncio.run(both())
    assert stream.headers["content-type"].startswith("text/event-stream")
    *chunks, usage, done = events(stream)
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"] == whole.json()["usage"]
    assert all(chunk["usage"] is None and len(chunk["choices"]) == 1 for chunk in chunks)
    assert len({chunk["id"] for chunk in chunks}) == 1
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
    assert choices[-1]["finish_reason"] == whole.json()["choices"][0]["finish_reason"] == ("stop" if stop == "JKL" else "length")
    if route == CHAT:
        assert choices[0]["delta"] == {"role": "assistant", "content": ""}
        text = "".join(choice["delta"].get("content", "") for choice in choices)
        assert text == whole.json()["choices"][0]["message"]["content"]
    else:
        assert "".join(choice["text"] for choice in choices) == whole.json()["choices"][0]["text"]


def test_a_stop_string_ends_the_request_in_the_engine(http: httpx.AsyncClient, client: FakeClient, tokenizer: Tokenizer) -> None:
    text = text_of(tokenizer, 40)
    stop = text[5:7]  # completed by the first of a step's two tokens
    answer = post(http, COMPLETIONS, body(COMPLETIONS, stop=[stop], max_tokens=500)).json()
    ended = {"finish_reason": "stop", "stop_reason": stop, "matched_stop": stop}
    assert answer["choices"][0] == {"index": 0, "text": text[:5], **NOT_ASKED_FOR, **ended}
    assert answer["usage"]["completion_tokens"] == 7
    assert client.aborted == [f"{answer['id']}-0"]
    assert not client.engine.live


def test_usage_is_absent_unless_asked_for(http: httpx.AsyncClient) -> None:
    chunks = events(post(http, COMPLETIONS, body(COMPLETIONS, stream=True)))
    assert all("usage" not in chunk for chunk in chunks[:-1])


@pytest.mark.parametrize("stream", [False, True])
def test_several_prompts_become_choices(http: httpx.AsyncClient, client: FakeClient, tokenizer: Tokenizer, stream: bool) -> None:
    response = post(http, COMPLETIONS, {"prompt": ["a", "bb", "ccc"], "max_tokens": 5, "stream": stream})
    if stream:
        choices = [chunk["choices"][0] for chunk in events(response)[:-1]]
        texts = ["".join(choice["text"] for choice in choices if choice["index"] == index) for index in range(3)]
        assert sum(choice["finish_reason"] == "length" for choice in choices) == 3
    else:
        choices = response.json()["choices"]
        assert [choice["index"] for choice in choices] == [0, 1, 2]
        texts = [choice["text"] for choice in choices]
        assert response.json()["usage"]["completion_tokens"] == 15
    assert texts == [text_of(tokenizer, 5)] * 3
    assert [request.prompt for request in client.submitted] == [tokenizer.encode(text) for text in ("a", "bb", "ccc")]


@pytest.mark.parametrize(("prompt", "expected"), [([5, 6], [[5, 6]]), ([[5], [6, 7]], [[5], [6, 7]])])
def test_prompts_of_tokens(http: httpx.AsyncClient, client: FakeClient, prompt: Any, expected: list[list[int]]) -> None:
    assert post(http, COMPLETIONS, {"prompt": prompt}).status_code == 200
    assert [request.prompt for request in client.submitted] == expected


def test_sampling_defaults_are_the_models_unless_the_request_sets_them(http: httpx.AsyncClient, client: FakeClient) -> None:
    async def ask() -> None:
        await http.post(COMPLETIONS, json={"prompt": "a"})
        await http.post(COMPLETIONS, json={"prompt": "a", "temperature": 0, "top_k": 7, "seed": 3, "stop": None, "min_p": 0.1})
        await http.post(CHAT, json={"messages": USER, "max_completion_tokens": 3, "top_p": 0.5, "max_tokens": None})
        await http.post(CHAT, json={"messages": USER, "seed": 1})

    asyncio.run(ask())
    first, second, third, fourth = (request.sampling for request in client.submitted)
    assert (first.temperature, first.top_p, first.top_k, first.max_tokens, first.seed) == (0.6, 0.95, 0, 16, None)
    assert (second.temperature, second.top_p, second.top_k, second.min_p, second.seed) == (0, 0.95, 7, 0.1, 3)
    assert (third.temperature, third.top_p, third.max_tokens) == (0.6, 0.5, 3)
    assert fourth.max_tokens is None  # the rest of the context


def test_the_default_length_fits_behind_a_long_prompt(http: httpx.AsyncClient, client: FakeClient) -> None:
    assert post(http, COMPLETIONS, {"prompt": [5] * (CONTEXT - 3)}).json()["usage"]["completion_tokens"] == 3


def test_fields_that_ask_for_nothing_pass(http: httpx.AsyncClient) -> None:
    neutral: dict[str, Any] = {"n": 1, "logprobs": None, "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "tools": None}
    neutral |= {"response_format": {"type": "text"}, "metadata": {"a": "b"}, "tool_choice": "auto", "user": "me"}
    assert post(http, CHAT, body(CHAT, **neutral)).status_code == 200


def test_contents_in_parts_and_messages_sent_back(http: httpx.AsyncClient, client: FakeClient, tokenizer: Tokenizer) -> None:
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]},
        {"role": "assistant", "content": "yes", "refusal": None, "tool_calls": None, "annotations": [], "audio": None},
        {"role": "user", "content": "go", "name": "me"},
    ]
    assert post(http, CHAT, {"messages": messages}).status_code == 200
    text = "<|begin|>system: one\ntwo\nassistant: yes\nuser: go\nassistant:"
    assert client.submitted[0].prompt == tokenizer.encode(text, special=False)


def test_small_routes(http: httpx.AsyncClient) -> None:
    async def ask() -> list[Any]:
        return [(await http.get(path)).json() for path in ("/health", "/version", "/v1/models", "/v1/models/fake")]

    health, version, models, model = asyncio.run(ask())
    assert health == {"status": "ok"}
    assert version["version"]
    assert models == {"object": "list", "data": [model]}
    assert (model["id"], model["object"], model["max_model_len"]) == ("fake", "model", CONTEXT)


@pytest.mark.parametrize("route", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_disconnects_frees_the_engine_at_once(app: FastAPI, client: FakeClient, route: str, stream: bool) -> None:
    """Raw ASGI: the client sends its request, waits for the engine to work, and hangs up."""
    client.pause = 0.001

    async def scenario() -> None:
        hangup, sent = asyncio.Event(), []
        request = json.dumps(body(route, stream=stream, max_tokens=4000)).encode()
        messages = [{"type": "http.request", "body": request, "more_body": False}]

        async def receive() -> Any:
            if messages:
                return messages.pop()
            await hangup.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = {"type": "http", "method": "POST", "path": route, "query_string": b"", "headers": [(b"content-type", b"application/json")]}
        serving = asyncio.create_task(app(scope, receive, send))
        while not client.engine.stats.generation_tokens_total:
            await asyncio.sleep(0.005)
        assert client.engine.live
        hangup.set()
        await asyncio.wait_for(serving, 1)
        assert not client.engine.live
        assert len(client.aborted) == 1
        assert bool(len(sent) > 1 and sent[1].get("body")) == stream

    asyncio.run(scenario())


def test_what_piled_up_for_a_client_that_left_is_not_written() -> None:
    encoded = 0

    class Counting(EventStream):
        def encoded(self, chunk: Any) -> bytes:
            nonlocal encoded
            encoded += 1
            return super().encoded(chunk)

    async def ready() -> AsyncGenerator[list[int], None]:
        for number in range(1000):  # never waits, as a queue that is full
            yield [number]

    async def scenario() -> None:
        left = asyncio.Event()

        async def receive() -> Any:
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.body":
                left.set()

        await Counting(ready())({"type": "http"}, receive, send)

    asyncio.run(scenario())
    assert 0 < encoded < 20


def test_a_long_prompt_is_tokenized_beside_the_server(http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    encode = Tokenizer.encode

    def slow(self: Tokenizer, text: str, *, special: bool = True) -> list[int]:
        time.sleep(0.5)
        return encode(self, text[:9], special=special)

    monkeypatch.setattr(Tokenizer, "encode", slow)
    ended = []

    async def ask(name: str, work: Coroutine[Any, Any, httpx.Response]) -> None:
        assert (await work).status_code == 200
        ended.append(name)

    async def scenario() -> None:
        long = asyncio.create_task(ask("long", http.post(COMPLETIONS, json=body(COMPLETIONS, prompt="a" * 5000))))
        await asyncio.sleep(0.1)
        await asyncio.gather(long, ask("health", http.get("/health")))

    asyncio.run(scenario())
    assert ended == ["health", "long"]
