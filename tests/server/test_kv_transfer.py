"""Prompts computed by one node, texts by another: the fields of requests, and real servers behind what a router does."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from mtpserve.config import CacheConfig, DisaggregationConfig, EngineConfig, ParallelConfig
from mtpserve.core.errors import ConfigError
from mtpserve.core.kv_transfer import PageOffer, PageSource
from mtpserve.server.app import create_app
from mtpserve.server.schema.kv_transfer import kv_transfer_fields
from mtpserve.text.tokenizer import Tokenizer
from tests.server.fake_client import FakeClient
from tests.server.metric_text import without_model
from tests.server.test_errors import error, send
from tests.server.test_launch import free_port

ROOT = Path(__file__).parents[2]
TO_PREFILL: dict[str, Any] = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None, "remote_host": None,
    "remote_port": None,
}  # fmt: skip
TO_DECODE: dict[str, Any] = {
    "do_remote_decode": False, "do_remote_prefill": True, "remote_engine_id": "e", "remote_block_ids": [[0, 1]], "remote_host": "127.0.0.1",
    "remote_port": 8998, "remote_request_id": "r", "tp_size": 1, "remote_num_tokens": 40,
}  # fmt: skip
ROOM: dict[str, Any] = {"bootstrap_host": "127.0.0.1", "bootstrap_port": 8998, "bootstrap_room": 77}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "abc", "max_tokens": 8, "min_tokens": 4},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 8},
    "/generate": {"text": "abc", "sampling_params": {"max_new_tokens": 8}},
}


@pytest.fixture
def served(tokenizer: Tokenizer) -> Any:
    def serve(mode: str, **options: Any) -> tuple[FakeClient, httpx.AsyncClient]:
        client = FakeClient()
        nodes = DisaggregationConfig(disaggregation_mode=mode, **options)
        app = create_app(client, tokenizer, EngineConfig(disaggregation=nodes))
        return client, httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")

    return serve


# ------------------------------------------------------------------------------------------------------------- fields


@pytest.mark.parametrize("route", ROUTES)
def test_vllms_fields(served: Any, route: str) -> None:
    client, http = served("prefill")
    assert send(http, "POST", route, json=ROUTES[route] | {"kv_transfer_params": TO_PREFILL}).status_code == 200
    asked = client.submitted[-1]
    assert asked.kv_offer_id is not None and asked.kv_offer_id.endswith("/0") and asked.source is None
    assert (asked.sampling.max_tokens, asked.sampling.min_tokens) == (1, 0), "the text is the other node's"
    client, http = served("decode")
    assert send(http, "POST", route, json=ROUTES[route] | {"kv_transfer_params": TO_DECODE}).status_code == 200
    asked = client.submitted[-1]
    assert asked.source == PageSource("127.0.0.1", 8998, "r/0") and asked.kv_offer_id is None and asked.sampling.max_tokens == 8


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("listed", [False, True])
def test_sglangs_fields(served: Any, route: str, listed: bool) -> None:
    fields = {name: [value] if listed else value for name, value in ROOM.items()}
    client, http = served("prefill")
    assert send(http, "POST", route, json=ROUTES[route] | fields).status_code == 200
    assert client.submitted[-1].kv_offer_id == "room 77/0" and client.submitted[-1].sampling.max_tokens == 1
    client, http = served("decode", disaggregation_bootstrap_port=9001)
    assert send(http, "POST", route, json=ROUTES[route] | fields).status_code == 200
    assert client.submitted[-1].source == PageSource("127.0.0.1", 8998, "room 77/0", waits=True)
    fields["bootstrap_port"] = [None] if listed else None
    assert send(http, "POST", route, json=ROUTES[route] | fields).status_code == 200
    assert client.submitted[-1].source == PageSource("127.0.0.1", 9001, "room 77/0", waits=True)


def test_each_prompt_has_a_lease_and_its_choices_share_it(served: Any) -> None:
    client, http = served("decode")
    body = {"prompt": ["abc", "abd"], "max_tokens": 8, "n": 2, "kv_transfer_params": TO_DECODE}
    assert send(http, "POST", "/v1/completions", json=body).status_code == 200
    assert [request.source.lease for request in client.submitted] == ["r/0", "r/0", "r/1", "r/1"]


def test_nothing_is_asked_for(served: Any) -> None:
    client, http = served("null")
    nothing = dict.fromkeys(ROOM) | {"kv_transfer_params": {"do_remote_decode": False, "do_remote_prefill": False}}
    assert send(http, "POST", "/v1/completions", json=ROUTES["/v1/completions"] | nothing).status_code == 200
    assert client.submitted[-1].kv_offer_id is None and client.submitted[-1].source is None


@pytest.mark.parametrize(
    ("mode", "fields", "param", "text"),
    [
        ("null", {"kv_transfer_params": TO_PREFILL}, "kv_transfer_params", "needs a server with --disaggregation-mode"),
        ("null", ROOM, "bootstrap_room", "needs a server with --disaggregation-mode"),
        ("decode", {"kv_transfer_params": TO_PREFILL}, "kv_transfer_params", "needs a node with --disaggregation-mode prefill"),
        ("prefill", {"kv_transfer_params": TO_DECODE}, "kv_transfer_params", "needs a node with --disaggregation-mode decode"),
        ("decode", {"kv_transfer_params": TO_DECODE | {"remote_port": None}}, "kv_transfer_params", "remote_port is missing"),
        ("decode", {"kv_transfer_params": TO_DECODE | {"remote_port": 0}}, "kv_transfer_params", "remote_port: Input should be"),
        ("decode", {"kv_transfer_params": TO_DECODE | {"remote_host": "10.1.2.3"}}, "kv_transfer_params", "--disaggregation-peers 127"),
        ("decode", {"kv_transfer_params": TO_DECODE | {"do_remote_decode": True}}, "kv_transfer_params", "give one of them"),
        ("decode", {"kv_transfer_params": 7}, "kv_transfer_params", "dictionary"),
        ("decode", ROOM | {"bootstrap_host": "evil"}, "bootstrap_host", "--disaggregation-peers"),
        ("decode", ROOM | {"bootstrap_host": None}, "bootstrap_host", "is missing"),
        ("decode", ROOM | {"bootstrap_room": -1}, "bootstrap_room", "a number of at least 0"),
        ("decode", ROOM | {"kv_transfer_params": TO_DECODE}, "bootstrap_room", "give one of them"),
    ],
)
def test_what_is_wrong_is_named(served: Any, mode: str, fields: dict[str, Any], param: str, text: str) -> None:
    client, http = served(mode)
    found = error(send(http, "POST", "/v1/completions", json=ROUTES["/v1/completions"] | fields), 400)
    assert found["param"] == param and text in found["message"], found
    assert not client.submitted


def test_the_answer_is_what_the_other_node_is_asked_with() -> None:
    assert kv_transfer_fields(None) == {}
    given = kv_transfer_fields(PageOffer("e", "10.0.0.1", 8998, "abc/0", 2))["kv_transfer_params"]
    assert (given.do_remote_prefill, given.do_remote_decode, given.remote_request_id, given.tp_size) == (True, False, "abc", 1)
    assert (given.remote_engine_id, given.remote_host, given.remote_port, given.remote_block_ids) == ("e", "10.0.0.1", 8998, [[0, 1]])


# ------------------------------------------------------------------------------------------------------------ options


def transfer(**values: Any) -> DisaggregationConfig:
    return DisaggregationConfig(kv_transfer_config=json.dumps({"kv_connector": "NixlConnector"} | values))


def test_vllms_option() -> None:
    both = transfer(kv_role="kv_both", kv_ip="10.0.0.1", kv_port=9000, engine_id="x", kv_connector_extra_config={"a": 1})
    assert (both.role, both.keeps, both.pulls, both.host, both.port(2)) == ("both", True, True, "10.0.0.1", 9002)
    assert [transfer(kv_role=role).role for role in ("kv_producer", "kv_consumer")] == ["prefill", "decode"]
    assert DisaggregationConfig().role is None and DisaggregationConfig(disaggregation_mode="none").role is None


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"kv_transfer_config": "{"}, "a JSON object"),
        ({"kv_transfer_config": '{"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}'}, "kv_connector must be NixlConnector"),
        ({"kv_transfer_config": '{"kv_connector": "NixlConnector", "kv_role": "x"}'}, "kv_role must be kv_producer, kv_consumer, kv_both"),
        ({"kv_transfer_config": '{"kv_connector": "NixlConnector", "kv_role": "kv_both", "y": 1}'}, "unknown key 'y'"),
        ({"kv_transfer_config": '{"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_port": "1"}'}, "kv_port must be"),
        ({"disaggregation_host": "0.0.0.0"}, "not all interfaces"),
        ({"disaggregation_lease": 0.0}, "--disaggregation-lease must be"),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(text)):
        DisaggregationConfig(**options)


@pytest.mark.parametrize(
    ("others", "text"),
    [
        ({"cache": CacheConfig(disable_radix_cache=True)}, "--disable-radix-cache must be left out"),
        ({"parallel": ParallelConfig(enable_expert_parallel=True, data_parallel_size=2)}, "left out with --enable-expert-parallel"),
    ],
)
def test_what_does_not_go_together(others: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        EngineConfig(disaggregation=DisaggregationConfig(disaggregation_mode="decode"), **others)


# ------------------------------------------------------------------------------------------------------- real servers


class Node:
    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process, self.url = process, url

    def post(self, route: str, body: dict[str, Any]) -> httpx.Response:
        return httpx.post(self.url + route, json=body, timeout=60)

    def metric(self, name: str) -> float:
        found = re.search(rf"^mtpserve_{re.escape(name)} (\S+)$", without_model(httpx.get(self.url + "/metrics").text), re.MULTILINE)
        return float(found[1]) if found else 0.0

    def eventually(self, name: str, value: float) -> None:
        until = time.monotonic() + 10
        while self.metric(name) != value:
            assert time.monotonic() < until, (name, self.metric(name))
            time.sleep(0.05)


@contextmanager
def nodes(*each: tuple[str, ...]) -> Iterator[list[Node]]:
    """Started together."""
    command = [sys.executable, "-m", "mtpserve", "launch", "--model", "demo", "--speculative-algorithm", "NEXTN", "--port", "0"]
    command += [
        "--chat-template",
        "mtpserve/demo/comments.jinja",
        "--kv-offload-gib",
        "0.05",
        "--max-total-tokens",
        "4096",
        "--no-speculative-adaptive",
        "--speculative-num-steps",
        "3",
    ]
    with ExitStack() as stack:
        started = [
            stack.enter_context(subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True, cwd=ROOT)) for options in each
        ]
        for process in started:
            stack.callback(process.kill)
        found = [re.search(r"http://\S+", process.stdout.readline()) for process in started if process.stdout is not None]
        yield [Node(process, match[0]) for process, match in zip(started, found, strict=True) if match is not None]


TREE = ("--speculative-eagle-topk", "2", "--speculative-num-draft-tokens", "6")
PROMPT = "import os\n\n\ndef read_lines(path):\n    with open(path) as file:\n        return file.readlines()\n\n\n" * 2


@pytest.fixture(scope="module")
def split() -> Iterator[list[Node]]:
    port = str(free_port())
    prefill = ("--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", port)
    with nodes(prefill, ("--disaggregation-mode", "decode"), ("--disaggregation-mode", "decode", *TREE)) as started:
        assert len(started) == 3
        yield started


def routed(prefill: Node, decode: Node, route: str, body: dict[str, Any]) -> httpx.Response:
    """What vLLM's proxies and routers do."""
    first = body | {"max_tokens": 1, "stream": False, "kv_transfer_params": TO_PREFILL}
    first.pop("stream_options", None)
    answer = prefill.post(route, first).json()
    return decode.post(route, body | {"kv_transfer_params": answer["kv_transfer_params"]})


def texts(response: httpx.Response) -> str:
    """Of an answer, whole or streamed."""
    assert response.status_code == 200, response.text
    if not response.headers["content-type"].startswith("text/event-stream"):
        choice = response.json()["choices"][0]
        return str(choice["text"] if "text" in choice else choice["message"]["content"])
    chunks = [json.loads(line[6:]) for line in response.text.split("\n\n") if line.startswith("data: {")]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content") or "" for choice in choices)


@pytest.mark.parametrize("number", [1, 2], ids=["chain", "tree"])
@pytest.mark.parametrize("law", [{"temperature": 0}, {"temperature": 0.8, "seed": 5}], ids=["greedy", "seeded"])
@pytest.mark.parametrize("stream", [False, True])
def test_behind_a_proxy(split: list[Node], number: int, law: dict[str, Any], stream: bool) -> None:
    prefill, decode = split[0], split[number]
    for route, ask in (
        ("/v1/completions", {"prompt": PROMPT}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": PROMPT}]}),
    ):
        body = ask | law | {"max_tokens": 24, "model": "demo", "stream": stream, "cache_salt": uuid.uuid4().hex}
        if stream:
            body["stream_options"] = {"include_usage": True}
        before = decode.metric('kv_transfers_total{kind="pull"}')
        answer = routed(prefill, decode, route, body)
        alone = decode.post(route, body | {"cache_salt": uuid.uuid4().hex})
        assert texts(answer) == texts(alone) != ""
        pulled = decode.metric('kv_transfers_total{kind="pull"}') - before
        tokens = int(re.findall(r'"prompt_tokens": ?(\d+)', answer.text)[-1])
        assert pulled == tokens // 16 > 0 and f'"cached_tokens":{16 * int(pulled)}' in answer.text.replace(": ", ":")
    assert prefill.metric("spec_draft_tokens_total") == 0
    prefill.eventually("kv_transfer_leased_pages", 0)


def test_as_sglangs_routers_do_it(split: list[Node]) -> None:
    """Both nodes are asked at once."""
    prefill, decode, _ = split
    port = int(httpx.get(prefill.url + "/server_info").json()["disaggregation_bootstrap_port"])
    for number, (route, ask) in enumerate((("/v1/completions", {"prompt": PROMPT}), ("/generate", {"text": PROMPT}))):
        body = ask | {"temperature": 0, "max_tokens": 24, "cache_salt": uuid.uuid4().hex}
        if route == "/generate":
            body = {"text": PROMPT, "sampling_params": {"temperature": 0, "max_new_tokens": 24}, "cache_salt": uuid.uuid4().hex}
        room = ROOM | {"bootstrap_port": port, "bootstrap_room": 1000 + number}
        with ThreadPoolExecutor(2) as pool:
            later = pool.submit(decode.post, route, body | room)
            time.sleep(0.1)
            assert prefill.post(route, body | room).status_code == 200
            answer = later.result()
        alone = decode.post(route, body | {"cache_salt": uuid.uuid4().hex})
        shown = (lambda r: r.json()["text"]) if route == "/generate" else texts
        assert shown(answer) == shown(alone) != ""
        assert re.search(r'"cached_tokens": ?[1-9]', answer.text)
    assert decode.metric('kv_transfer_failures_total{reason="timeout"}') == 0


def test_a_prefill_node_that_dies(split: list[Node]) -> None:
    """Between its answer and the other node's question. The text is the same, and nothing hangs."""
    _, decode, _ = split
    with nodes(("--disaggregation-mode", "prefill", "--disaggregation-bootstrap-port", "0")) as (prefill,):
        body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 24, "cache_salt": uuid.uuid4().hex}
        answer = prefill.post("/v1/completions", body | {"max_tokens": 1, "kv_transfer_params": TO_PREFILL}).json()
        children = Path(f"/proc/{prefill.process.pid}/task/{prefill.process.pid}/children").read_text().split()
        for child in children:
            os.kill(int(child), signal.SIGKILL)
        prefill.process.kill()
        prefill.process.wait()
    given = decode.post("/v1/completions", body | {"kv_transfer_params": answer["kv_transfer_params"]})
    assert texts(given) == texts(decode.post("/v1/completions", body | {"cache_salt": "own"}))
    # A connection that the system has already taken for the dead process is cut instead of refused.
    assert sum(decode.metric(f'kv_transfer_failures_total{{reason="{reason}"}}') for reason in ("unreachable", "broken")) > 0
