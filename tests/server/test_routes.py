"""The routes beside OpenAI's two: tokens, SGLang's own generation, what the server says of itself, and what ends requests."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from mtpserve.config import EngineConfig, ServerConfig
from mtpserve.server.app import ROUTES, create_app
from mtpserve.server.schema.unsupported import REFUSED
from mtpserve.text.tokenizer import Tokenizer
from tests.server.conftest import events
from tests.server.fake_client import FakeClient
from tests.server.fake_engine import CONTEXT, FIRST_TOKEN, VOCAB
from tests.server.test_errors import error, send

USER = [{"role": "user", "content": "hello"}]


def post(http: httpx.AsyncClient, path: str, request: Any) -> Any:
    response = send(http, "POST", path, json=request)
    assert response.status_code == 200, response.text
    return response.json()


def test_tokens_and_back(http: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("Grüße")
    found = post(http, "/tokenize", {"model": "fake", "prompt": "Grüße", "return_token_strs": True})
    assert found == {
        "tokens": ids, "count": len(ids), "max_model_len": CONTEXT, "token_strs": [tokenizer.piece(id) for id in ids]
    }  # fmt: skip
    assert post(http, "/v1/tokenize", {"prompt": "a", "add_special_tokens": False})["tokens"] == tokenizer.encode("a", special=False)
    assert "Ġ" in "".join(post(http, "/tokenize", {"prompt": "a a", "return_token_strs": True})["token_strs"])
    several = post(http, "/tokenize", {"prompt": ["a", "Grüße"]})
    assert several["count"] == [2, len(ids)] and several["tokens"][1] == ids
    chat = post(http, "/tokenize", {"messages": USER, "add_generation_prompt": False})["tokens"]
    assert tokenizer.decode(chat) == "user: hello\n"
    assert post(http, "/detokenize", {"tokens": ids}) == {"prompt": "Grüße", "text": "Grüße"}
    assert post(http, "/v1/detokenize", {"tokens": [ids, []]})["text"] == ["Grüße", ""]
    assert post(http, "/detokenize", {"tokens": ids, "skip_special_tokens": False})["text"].startswith("<|begin|>")


@pytest.mark.parametrize(
    ("path", "request_", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": USER}, "prompt"),
        ("/tokenize", {"prompt": "a" * 9 * CONTEXT}, "prompt"),
        ("/tokenize", {"prompt": ["a"] * 129}, "prompt"),
        ("/tokenize", {"messages": [{"role": 5}]}, "messages"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "a", "tools": [{}]}, "tools"),
        ("/tokenize", {"prompt": "a", "continue_final_message": True}, "continue_final_message"),
        ("/tokenize", {"prompt": "a", "chat_template_kwargs": {"thinking": True}}, "chat_template_kwargs"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [VOCAB]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens"),
        ("/abort_request", {}, "rid"),
        ("/abort_request", {"rid": "a", "abort_all": True}, "rid"),
        ("/abort_request", {"rid": "a b\n"}, "rid"),
        ("/abort_request", {"rid": "", "abort_all": False}, "rid"),
        ("/v1/completions", {"prompt": "a", "rid": "a\nb"}, "rid"),
        ("/generate", {}, "text"),
        ("/generate", {"text": "a", "input_ids": [5]}, "text"),
        ("/generate", {"text": ""}, "text"),
        ("/generate", {"text": []}, "text"),
        ("/generate", {"input_ids": [VOCAB]}, "input_ids"),
        ("/generate", {"input_ids": [5] * CONTEXT}, "input_ids"),
        ("/generate", {"text": ["a"] * 129}, "text"),
        ("/generate", {"text": ["a"] * 100, "sampling_params": {"n": 100}}, "text"),
        ("/generate", {"text": ["a"], "rid": ["a", "b"]}, "rid"),
        ("/generate", {"text": "a", "rid": ["a"]}, "rid"),
        ("/generate", {"text": "a", "logprob_start_len": -2}, "logprob_start_len"),
        ("/generate", {"text": "a", "top_logprobs_num": 2}, "top_logprobs_num"),
        ("/generate", {"text": "a", "return_logprob": True, "top_logprobs_num": 21}, "top_logprobs_num"),
        ("/generate", {"text": "a", "sampling_params": {"n": 129}}, "n"),
        ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": -1}}, "max_new_tokens"),
        ("/generate", {"text": "a", "sampling_params": [{"max_new_tokens": 1}]}, "sampling_params"),
        ("/generate", {"text": ["a", "b"], "sampling_params": [{"max_new_tokens": 1}]}, "sampling_params"),
        ("/generate", {"text": ["a", "b"], "sampling_params": [{"n": 1}, {"n": 2}]}, "n"),
        ("/generate", {"text": ["a", "b"], "sampling_params": [{}, {"top_p": 0}]}, "top_p"),
        ("/generate", {"text": ["a", "b"], "return_logprob": [True]}, "return_logprob"),
        ("/generate", {"text": ["a", "b"], "return_logprob": [True, False], "top_logprobs_num": 2}, "top_logprobs_num"),
        ("/generate", {"text": ["a", "b"], "logprob_start_len": [0, -2]}, "logprob_start_len"),
        ("/generate", {"text": "a", "sampling_params": {"logit_bias": {"x": 1}}}, "logit_bias"),
        ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": CONTEXT}}, "max_new_tokens"),
        ("/generate", {"text": "a", "sampling_params": {"sampling_seed": 2**63}}, "sampling_seed"),
        ("/generate", {"text": "a", "sampling_params": {"temperature": -1}}, "temperature"),
        ("/generate", {"text": "a", "sampling_params": {"top_k": 2**63}}, "top_k"),
        ("/generate", {"text": "a", "sampling_params": {"min_new_tokens": 10**30}}, "min_new_tokens"),
        ("/generate", {"text": "a", "sampling_params": {"regex": "a", "ebnf": "b"}}, "ebnf"),
        *(("/generate", {"text": "a", name: "x"}, name) for name in REFUSED["generate"]),
        *(("/generate", {"text": "a", "sampling_params": {name: "x"}}, name) for name in REFUSED["sampling_params"]),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(http: httpx.AsyncClient, client: FakeClient, path: str, request_: Any, param: str) -> None:
    found = error(send(http, "POST", path, json=request_), 400)
    assert found["param"] == param
    assert not client.submitted


def test_tokens_of_a_conversation_with_tools_are_counted_without_a_parser(http: httpx.AsyncClient) -> None:
    tools = [{"type": "function", "function": {"name": "look_up", "description": "finds"}}]
    plain, none, told = (
        post(http, "/tokenize", {"messages": USER, **more})["count"]
        for more in ({}, {"tools": tools, "tool_choice": "none"}, {"tools": tools})
    )
    assert plain == none < told
    assert post(http, "/v1/messages/count_tokens", {"messages": USER, "tools": [{"name": "look_up", "input_schema": {}}]})["input_tokens"]


def test_a_native_generation(http: httpx.AsyncClient, client: FakeClient, tokenizer: Tokenizer) -> None:
    ids = list(range(FIRST_TOKEN, FIRST_TOKEN + 5))
    request = {
        "text": "hello", "rid": "mine", "return_logprob": True, "top_logprobs_num": 1, "logprob_start_len": 1,
        "return_text_in_logprobs": True,
        "sampling_params": {"max_new_tokens": 5, "temperature": 0, "sampling_seed": 7, "no_stop_trim": True, "regex": "a+"},
    }  # fmt: skip
    answer = post(http, "/generate", request)
    meta = answer["meta_info"]
    prompt = tokenizer.encode("hello")
    assert (answer["text"], answer["output_ids"]) == (tokenizer.decode(ids), ids)
    assert meta["id"] == "mine" and meta["finish_reason"] == {"type": "length", "length": 5}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (len(prompt), 5)
    # Steps of two, two and one tokens; the first one of each step but the last was a draft.
    assert (meta["spec_verify_ct"], meta["spec_accept_length"], meta["spec_num_correct_drafts"]) == (3, 5 / 3, 2)
    assert meta["spec_correct_drafts_histogram"] == [1, 2] and meta["spec_accept_rate"] == 2 / 6
    assert meta["output_token_logprobs"] == [[-0.5, id, tokenizer.token_text(id)] for id in ids]
    assert meta["input_token_logprobs"] == [[-1.0, id, tokenizer.token_text(id)] for id in prompt[1:]]
    assert [len(top) for top in meta["output_top_logprobs"]] == [1] * 5
    sampling = client.submitted[0].sampling
    assert (sampling.seed, sampling.include_stop, sampling.grammar and sampling.grammar.kind) == (7, True, "regex")


def test_native_streams_grow_and_lists_are_answered_by_lists(http: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
    *chunks, done = events(send(http, "POST", "/generate", json={"text": "a", "stream": True, "sampling_params": {"max_new_tokens": 5}}))
    assert done == "[DONE]"
    assert [len(chunk["output_ids"]) for chunk in chunks] == [2, 4, 5]
    assert all(after["text"].startswith(before["text"]) for before, after in pairwise(chunks))
    assert [chunk["meta_info"]["finish_reason"] is None for chunk in chunks] == [True, True, False]
    several = post(http, "/generate", {"text": ["a", "b"], "rid": "mine", "sampling_params": {"max_new_tokens": 2, "n": 2}})
    assert [each["meta_info"]["id"] for each in several] == ["mine-0", "mine-0", "mine-1", "mine-1"]
    assert len(post(http, "/generate", {"input_ids": [[5]], "sampling_params": {"max_new_tokens": 2}})) == 1
    stopped = post(http, "/generate", {"text": "a", "sampling_params": {"stop": tokenizer.decode([FIRST_TOKEN + 3])}})
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": tokenizer.decode([FIRST_TOKEN + 3])}


# What SGLang's SamplingParams have where nothing is given.
SGLANGS_DEFAULTS: dict[str, Any] = {
    "max_new_tokens": 128, "stop": None, "stop_token_ids": None, "stop_regex": None, "temperature": 1.0, "top_p": 1.0, "top_k": -1,
    "min_p": 0.0, "frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "min_new_tokens": 0, "n": 1,
    "json_schema": None, "regex": None, "ebnf": None, "structural_tag": None, "ignore_eos": False, "skip_special_tokens": True,
    "spaces_between_special_tokens": True, "no_stop_trim": False, "custom_params": None, "stream_interval": None, "logit_bias": None,
    "sampling_seed": None,
}  # fmt: skip


def test_native_sampling_as_sglang_dumps_it(http: httpx.AsyncClient, client: FakeClient) -> None:
    post(http, "/generate", {"text": "a", "sampling_params": SGLANGS_DEFAULTS})
    post(http, "/generate", {"text": "a", "sampling_params": dict.fromkeys(SGLANGS_DEFAULTS)})
    dumped, empty = (request.sampling for request in client.submitted)
    assert dumped.max_tokens == empty.max_tokens == 128 and dumped.temperature == 1.0
    post(http, "/generate", {"text": "a", "sampling_params": {"logit_bias": {"5": 2.5}}})
    assert client.submitted[-1].sampling.logit_bias == {5: 2.5}


def test_native_lists_for_each_prompt(http: httpx.AsyncClient, client: FakeClient) -> None:
    fields = {"return_logprob": [False, True], "logprob_start_len": [0, 0], "top_logprobs_num": [0, 2]}
    asked = {"text": ["a", "b"], "sampling_params": [{"max_new_tokens": 2}, {"max_new_tokens": 3, "min_p": 0.5}], **fields}
    first, second = post(http, "/generate", asked)
    assert (len(first["output_ids"]), len(second["output_ids"])) == (2, 3)
    assert "output_token_logprobs" not in first["meta_info"] and len(second["meta_info"]["output_top_logprobs"][0]) == 2
    assert [(r.sampling.min_p, r.sampling.logprobs, r.sampling.prompt_logprobs) for r in client.submitted] == [(0, None, None), (0.5, 2, 2)]


def test_native_scores_of_a_prompt_alone(http: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
    scored = {"return_logprob": True, "logprob_start_len": 0, "sampling_params": [{"max_new_tokens": 0}, {"max_new_tokens": 1}]}
    none, one = post(http, "/generate", {"text": ["hello", "hello"], **scored})
    assert (none["text"], none["output_ids"], none["meta_info"]["output_token_logprobs"]) == ("", [], [])
    assert none["meta_info"]["finish_reason"] == {"type": "length", "length": 0} and none["meta_info"]["completion_tokens"] == 0
    assert len(one["output_ids"]) == 1
    assert none["meta_info"]["input_token_logprobs"] == one["meta_info"]["input_token_logprobs"]
    assert len(none["meta_info"]["input_token_logprobs"]) == len(tokenizer.encode("hello"))


def test_what_the_server_says_of_itself(client: FakeClient, tokenizer: Tokenizer) -> None:
    config = EngineConfig()
    client.card = replace(client.card, lossy=True, synthetic_acceptance="glm", algorithm="MTP", drafting="MTP, 3 deep: why")
    app = create_app(client, tokenizer, config, ServerConfig(port=1234))
    http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")
    for path in ("/ready", "/ping", "/health_generate"):
        assert send(http, "GET", path).json() == {"status": "ok"}
    assert client.submitted[0].sampling.max_tokens == 1 and not client.engine.live
    for path in ("/server_info", "/get_server_info"):
        said = send(http, "GET", path).json()
        assert (said["speculative_algorithm"], said["port"], said["model"]) == ("MTP", 1234, "demo")
        assert (said["lossy"], said["synthetic_acceptance"], said["drafter"]) == (True, "glm", "MTP, 3 deep: why")
    # The trial's one verification committed a token, none of them a draft.
    assert said["internal_states"][0]["avg_spec_accept_length"] == 1.0
    for path in ("/model_info", "/get_model_info"):
        said = send(http, "GET", path).json()
        assert said["served_model_name"] == "fake"
        # Load generators take the tokenizer from there, whatever their own directory is.
        assert said["tokenizer_path"] == said["model_path"] == send(http, "GET", "/v1/models").json()["data"][0]["root"]
        assert Path(said["tokenizer_path"], "tokenizer.json").is_absolute() and Path(said["tokenizer_path"], "tokenizer.json").is_file()
    assert post(http, "/flush_cache", None)["success"] is True


def test_one_route_for_completions_and_chats(http: httpx.AsyncClient) -> None:
    assert post(http, "/invocations", {"prompt": "a"})["object"] == "text_completion"
    assert post(http, "/invocations", {"messages": USER, "max_tokens": 2})["object"] == "chat.completion"
    assert error(send(http, "POST", "/invocations", json={"messages": USER, "max_tokens": "2"}), 400)["param"] == "max_tokens"
    assert error(send(http, "POST", "/invocations", json={}), 400)["param"] == "prompt"


def test_vectors_are_refused_with_the_reason(http: httpx.AsyncClient) -> None:
    refused = error(send(http, "POST", "/v1/embeddings", json={"input": "a"}), 400)
    assert refused["code"] == "unsupported_parameter" and refused["message"].startswith("embeddings is not supported: ")


def test_what_can_be_read_has_a_head(http: httpx.AsyncClient) -> None:
    for path in ("/health", "/v1/models", "/metrics", "/"):
        assert send(http, "HEAD", path).status_code == 200, path
    assert send(http, "GET", "/load").json() == {"server_load": 0}


def test_requests_end_by_their_id(http: httpx.AsyncClient, app: FastAPI, client: FakeClient) -> None:
    client.pause = 0.001
    long = {"prompt": "a", "max_tokens": 4000}

    async def ask() -> tuple[list[int], list[httpx.Response]]:
        async def running(count: int) -> None:
            while len(client.engine.live) != count:
                await asyncio.sleep(0.005)

        async def abort(what: Any) -> int:
            return int((await http.post("/abort_request", json=what)).json()["aborted"])

        tasks = [
            asyncio.create_task(http.post("/v1/completions", json=long | {"rid": "one", "n": 2})),
            asyncio.create_task(http.post("/v1/completions", json=long | {"rid": "one-0", "stream": True})),
            asyncio.create_task(http.post("/generate", json={"text": "a", "sampling_params": {"max_new_tokens": 4000}})),
        ]
        await running(4)
        while not all(done for _, done in client.engine.live.values()):
            await asyncio.sleep(0.005)
        again = await http.post("/v1/completions", json=long | {"rid": "one"})
        counts = [await abort({"rid": "nobody"}), await abort({"rid": "one"})]
        await running(2)
        counts.append(await abort({"abort_all": True}))
        return counts, [again, *[await task for task in tasks]]

    counts, (again, whole, stream, native) = asyncio.run(ask())
    assert counts == [0, 2, 2]
    assert error(again, 400)["param"] == "rid"
    assert [choice["finish_reason"] for choice in whole.json()["choices"]] == ["abort", "abort"]
    assert whole.json()["id"] == "one" and whole.json()["choices"][0]["text"]
    assert events(stream)[-1] == "[DONE]" and events(stream)[-2]["choices"][0]["finish_reason"] == "abort"
    assert native.json()["meta_info"]["finish_reason"] == {"type": "abort"}
    assert not app.state.service._live and not app.state.service._aborted


def test_the_document_describes_every_route_and_its_body(http: httpx.AsyncClient) -> None:
    document = send(http, "GET", "/openapi.json").json()
    for method, paths, endpoint, _ in ROUTES:
        for path in paths:
            told = document["paths"][path.replace(":path", "")][method.lower()]
            assert told["description"], path
            assert told["responses"].keys() == {"200", "4XX", "5XX"}
            if "body" in endpoint.__annotations__:
                taken = told["requestBody"]["content"]["application/json"]["schema"]
                name = taken.get("anyOf", [taken])[0]["$ref"].rsplit("/", 1)[1]  # a body may be left out
                assert document["components"]["schemas"][name]["properties"]
    assert "sampling_params" in document["components"]["schemas"]["NativeRequest"]["properties"]
    assert document["components"]["schemas"]["ErrorObject"]["properties"].keys() == {"message", "type", "param", "code"}


TOOLS = [{"type": "function", "function": {"name": name}} for name in ("look", "now")]


def test_a_text_is_taken_apart_for_those_who_ask(http: httpx.AsyncClient) -> None:
    text = 'So.\n<tool_call>\n{"name": "now", "arguments": {"a": 1}}\n</tool_call>\n<tool_call>\n{"name": "other"}\n</tool_call>'
    answer = send(http, "POST", "/parse_function_call", json={"text": text, "tools": TOOLS, "tool_call_parser": "hermes"}).json()
    calls = [{"tool_index": 1, "name": "now", "parameters": '{"a": 1}'}, {"tool_index": -1, "name": "other", "parameters": "{}"}]
    assert answer == {"normal_text": "So.", "calls": calls}
    for parser, text, reasoning in (("deepseek-r1", "a</think>b", "a"), ("qwen3", "<think>a</think>b", "a"), ("qwen3", "b", "")):
        answer = send(http, "POST", "/separate_reasoning", json={"text": text, "reasoning_parser": parser}).json()
        assert answer == {"reasoning_text": reasoning, "text": "b"}


@pytest.mark.parametrize(("path", "body", "param"), [
    ("/parse_function_call", {"text": "a", "tools": TOOLS}, "tool_call_parser"),
    ("/parse_function_call", {"text": "a", "tools": TOOLS, "tool_call_parser": "x"}, "tool_call_parser"),
    ("/parse_function_call", {"text": "a", "tools": [1], "tool_call_parser": "hermes"}, "tools[0]"),
    ("/parse_function_call", {"text": "a" * 10**6, "tools": [], "tool_call_parser": "hermes"}, "text"),
    ("/parse_function_call", {"tools": TOOLS}, "text"),
    ("/separate_reasoning", {"text": "a"}, "reasoning_parser"),
    ("/separate_reasoning", {"text": "a", "reasoning_parser": "x"}, "reasoning_parser"),
])  # fmt: skip
def test_and_what_cannot_be_taken_apart(http: httpx.AsyncClient, path: str, body: Any, param: str) -> None:
    assert error(send(http, "POST", path, json=body), 400)["param"] == param


def test_half_a_character_cannot_be_taken_apart(http: httpx.AsyncClient) -> None:
    body = b'{"text": "\\ud800", "reasoning_parser": "qwen3"}'
    found = send(http, "POST", "/separate_reasoning", content=body, headers={"content-type": "application/json"})
    assert error(found, 400)["param"] == "text"
