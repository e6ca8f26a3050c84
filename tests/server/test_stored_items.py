"""Items that a client refers to instead of sending them: stored ones, sealed reasoning, compactions; and stored streams."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from mtpserve.server.openai.responses.store import ResponseStore
from mtpserve.text.tokenizer import Tokenizer
from tests.server.fake_client import FakeClient
from tests.server.speaking import checkpoint
from tests.server.test_errors import error, send
from tests.server.test_messages import named
from tests.server.test_response_items import ask as asked
from tests.server.test_tool_blocks import FUNCTION, RESPONSES, SAID, USER, respond
from tests.server.test_tools import Server

COMPACT = f"{RESPONSES}/compact"
SEALED = {"include": ["reasoning.encrypted_content"]}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(checkpoint(tmp_path_factory.mktemp("speaking")))


def results(response: dict[str, Any]) -> list[dict[str, Any]]:
    calls = [item["call_id"] for item in response["output"] if item["type"] == "function_call"]
    return [{"type": "function_call_output", "call_id": id, "output": "cold"} for id in calls]


@pytest.mark.parametrize("typed", [True, False])
def test_a_reference_is_the_item(tokenizer: Tokenizer, typed: bool) -> None:
    server = Server(tokenizer, SAID, "7 degrees", reasoning="qwen3")
    first = respond(server).json()
    references = [({"type": "item_reference"} if typed else {}) | {"id": item["id"]} for item in first["output"]]
    counted = asked(server.app, "POST", f"{RESPONSES}/input_tokens", input=[USER, *references, *results(first)], tools=[FUNCTION])
    second = respond(server, input=[USER, *references, *results(first)]).json()
    by_reference = server.prompt()
    respond(server, input=[USER, *first["output"], *results(first)])
    assert server.prompt() == by_reference and counted["input_tokens"] == second["usage"]["input_tokens"]
    listed = asked(server.app, "GET", f"{RESPONSES}/{second['id']}/input_items", order="asc")["data"]
    assert listed[1:5] == first["output"]


def test_a_reference_to_what_is_not_kept_is_refused(tokenizer: Tokenizer) -> None:
    server = Server(tokenizer, "a")
    respond(server, input=[USER | {"id": "msg_mine"}])
    kept = respond(server).json()
    fleeting = respond(server, store=False).json()
    id = kept["output"][0]["id"]
    asked(server.app, "DELETE", f"{RESPONSES}/{kept['id']}")
    for gone in (id, "msg_mine", "rs_none", fleeting["output"][0]["id"]):  # a client's own ids may be another's, too
        refused = asked(server.app, "POST", RESPONSES, 404, input=[USER, {"type": "item_reference", "id": gone}])["error"]
        assert refused["param"] == "input" and f"Item with id {gone!r} not found" in refused["message"], refused


def test_an_item_is_kept_as_long_as_a_response_has_it(tokenizer: Tokenizer) -> None:
    server = Server(tokenizer, "a", "b")
    first = respond(server).json()
    second = respond(server, previous_response_id=first["id"], input="more").json()
    asked(server.app, "DELETE", f"{RESPONSES}/{first['id']}")
    respond(server, input=[{"type": "item_reference", "id": first["output"][0]["id"]}, USER])
    assert "assistant: a\nuser: hello\n" in server.prompt()
    store: ResponseStore = server.app.state.responses
    for id in (second["id"], *list(store._by_id)):
        if id in store:
            store.delete(id)
    assert not store._holders and store._characters == 0


@pytest.mark.parametrize("stream", [False, True])
def test_sealed_reasoning_comes_back(tokenizer: Tokenizer, stream: bool) -> None:
    server = Server(tokenizer, SAID, "a", reasoning="qwen3")
    answer = respond(server, **SEALED, store=False, stream=stream)
    found = named(answer.text)[-1][1]["response"]["output"] if stream else answer.json()["output"]
    sealed = {name: value for name, value in found[0].items() if name != "content"}
    assert sealed["encrypted_content"].endswith("hm")
    (message,) = assistants(server, [USER, sealed, *found[1:]])
    assert message["reasoning_content"] == "hm"
    (foreign,) = assistants(server, [USER, sealed | {"encrypted_content": "gAAAAB"}, *found[1:]])
    assert "reasoning_content" not in foreign
    assert "encrypted_content" not in respond(Server(tokenizer, SAID, reasoning="qwen3")).json()["output"][0]


def assistants(server: Server, items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The assistant's messages, as the template gets them."""
    rendered: list[dict[str, Any]] = []
    tokenizer: Any = server.client.tokenizer
    whole = tokenizer.render_chat
    tokenizer.render_chat = lambda messages, **more: (rendered.extend(messages), whole(messages, **more))[1]
    try:
        respond(server, input=items)
    finally:
        del tokenizer.render_chat
    return [message for message in rendered if message["role"] == "assistant"]


def test_a_compaction_stands_for_its_conversation(tokenizer: Tokenizer) -> None:
    server = Server(tokenizer, SAID, "7 degrees", reasoning="qwen3")
    first = respond(server).json()
    whole = [USER, *first["output"], *results(first)]
    respond(server, input=[*whole, USER])
    expected = server.prompt()
    for asking in ({"input": whole}, {"previous_response_id": first["id"], "input": results(first)}):
        compaction = asked(server.app, "POST", COMPACT, model="fake", instructions="be brief", **asking)
        (item,) = compaction["output"]
        assert (compaction["object"], item["type"], compaction["usage"]["total_tokens"]) == ("response.compaction", "compaction", 0)
        respond(server, input=[item, USER])
        assert server.prompt() == expected
    (again,) = asked(server.app, "POST", COMPACT, model="fake", input=[item, {"role": "assistant", "content": "hm"}])["output"]
    respond(server, input=[again, USER])
    assert "assistant: hm\nuser: hello\n" in server.prompt()


@pytest.mark.parametrize(("fields", "status", "param"), [
    ({}, 400, "input"), ({"model": None, "input": "a"}, 400, "model"),
    ({"model": "other", "input": "a"}, 404, "model"), ({"previous_response_id": "resp_no"}, 400, "previous_response_id"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, 400, "input"),
    ({"input": [{"type": "compaction", "encrypted_content": "mtpserve:{"}]}, 400, "input"),
])  # fmt: skip
def test_what_cannot_be_compacted(http: httpx.AsyncClient, fields: dict[str, Any], status: int, param: str) -> None:
    assert error(send(http, "POST", COMPACT, json={"model": "default"} | fields), status)["param"] == param


def test_a_stored_response_is_streamed_again(tokenizer: Tokenizer) -> None:
    server = Server(tokenizer, SAID, reasoning="qwen3", step=1000)
    live = [data for _, data in named(respond(server, stream=True, **SEALED).text)]
    path = f"{RESPONSES}/{live[-1]['response']['id']}"

    def replayed(**query: Any) -> list[Any]:
        async def ask() -> httpx.Response:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(server.app), base_url="http://test") as http:
                return await http.get(path, params={"stream": "true"} | query)

        return [data for _, data in named(asyncio.run(ask()).text)]

    assert replayed() == live and [data["sequence_number"] for data in live] == list(range(len(live)))
    assert replayed(starting_after=3) == live[4:]
    assert live[-1]["response"]["output"][0]["encrypted_content"].endswith("hm")
    assert next(data["item"]["status"] for data in live if data["type"] == "response.output_item.added") == "in_progress"


def test_a_response_that_is_being_written_is_streamed_once_it_is(http: httpx.AsyncClient, client: FakeClient) -> None:
    client.pause = 0.001

    async def work() -> tuple[httpx.Response, httpx.Response]:
        writing = asyncio.create_task(http.post(RESPONSES, json={"input": "hello", "max_output_tokens": 400, "stream": True}))
        while not (kept := list(http._transport.app.state.responses._by_id)):  # type: ignore[attr-defined]
            await asyncio.sleep(0.005)
        again = await http.get(f"{RESPONSES}/{kept[0]}", params={"stream": True})
        return await writing, again

    first, again = (named(answer.text) for answer in asyncio.run(work()))
    assert again[-1] == (first[-1][0], first[-1][1] | {"sequence_number": again[-1][1]["sequence_number"]})
    assert error(send(http, "GET", f"{RESPONSES}/resp_none", params={"stream": True}), 404)["code"] == "response_not_found"
    assert error(send(http, "GET", f"{RESPONSES}/resp_none", params={"stream": "maybe"}), 400)["param"] == "stream"
