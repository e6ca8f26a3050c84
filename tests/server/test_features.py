"""The fields that go to sampling and speculation, and what comes back for them, over a fake engine."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import httpx
import pytest

from mtpserve.core.sampling import GrammarSpec
from mtpserve.server.app import create_app
from mtpserve.server.chat.steps.step_output import StepOutput
from mtpserve.server.openai.usage import Trace
from mtpserve.text.tokenizer import Tokenizer
from tests.server.conftest import events
from tests.server.fake_client import FakeClient
from tests.server.fake_engine import CONTEXT, FIRST_TOKEN

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


def post(http: httpx.AsyncClient, route: str, **fields: Any) -> httpx.Response:
    body = {"prompt": "hello"} if route == COMPLETIONS else {"messages": [{"role": "user", "content": "hello"}]}
    return asyncio.run(http.post(route, json=body | {"model": "fake", "max_tokens": 5} | fields))


@pytest.mark.parametrize("route", [COMPLETIONS, CHAT])
def test_fields_reach_the_engine(http: httpx.AsyncClient, client: FakeClient, tokenizer: Tokenizer, route: str) -> None:
    answer = post(
        http, route, repetition_penalty=1.5, frequency_penalty=0.25, presence_penalty=-0.5, logit_bias={"7": 2, "9": -100.0},
        allowed_token_ids=[3, 7], bad_words=["hello", "no"], min_tokens=2, prompt_logprobs=3, custom_params={"a": [1]},
        speculative={"enabled": True, "num_steps": 1}, prediction={"type": "content", "content": [{"type": "text", "text": "hello"}]},
        regex="a+",
    )  # fmt: skip
    assert answer.status_code == 200, answer.text
    request = client.submitted[0]
    sampling = request.sampling
    assert (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty) == (1.5, 0.25, -0.5)
    assert sampling.logit_bias == {7: 2.0, 9: -100.0} and sampling.allowed_token_ids == (3, 7) and sampling.min_tokens == 2
    assert sampling.prompt_logprobs == 3 and sampling.custom_params == {"a": [1]} and sampling.grammar == GrammarSpec("regex", "a+")
    assert sampling.speculation.depth == 1 and request.prediction == tokenizer.encode("hello", special=False)
    assert tokenizer.encode("hello", special=False) in request.bad_words and tokenizer.encode(" no", special=False) in request.bad_words
    assert post(http, route, speculative={"enabled": False}).status_code == 200
    assert client.submitted[1].sampling.speculation.depth == 0


SCHEMA = {"type": "object"}
OF_SCHEMA = GrammarSpec("json_schema", json.dumps(SCHEMA))
TAG = {"type": "structural_tag", "format": {}}
CONSTRAINTS: list[tuple[dict[str, Any], GrammarSpec | None]] = [
    ({"response_format": {"type": "text", "new": 1}}, None),
    ({"response_format": {"type": "json_object"}}, GrammarSpec("json_object")),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "new": 1}, "newer": 2}}, OF_SCHEMA),
    ({"response_format": TAG}, GrammarSpec("structural_tag", json.dumps(TAG))),
    ({"json_schema": '{"type": "object"}'}, GrammarSpec("json_schema", '{"type": "object"}')),
    ({"ebnf": 'root ::= "a"'}, GrammarSpec("ebnf", 'root ::= "a"')),
    ({"guided_choice": ["a", "b"]}, GrammarSpec("choice", '["a", "b"]')),
    ({"guided_json": SCHEMA}, OF_SCHEMA),
    ({"structured_outputs": {"choice": ["a"]}}, GrammarSpec("choice", '["a"]')),
    ({"structured_outputs": {"json_object": True, "regex": None}}, GrammarSpec("json_object")),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "wanted"), CONSTRAINTS, ids=str)
def test_constraints(http: httpx.AsyncClient, client: FakeClient, fields: dict[str, Any], wanted: GrammarSpec | None) -> None:
    assert post(http, CHAT, **fields).status_code == 200
    assert client.submitted[0].sampling.grammar == wanted


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (COMPLETIONS, {"n": 0}, "n"),
    (COMPLETIONS, {"n": 2, "best_of": 1}, "best_of"),
    (COMPLETIONS, {"best_of": 129}, "best_of"),
    (COMPLETIONS, {"prompt": ["a"] * 9, "best_of": 128}, "best_of"),
    (CHAT, {"n": 2, "best_of": 3}, "best_of"),
    (COMPLETIONS, {"suffix": "x"}, "suffix"),
    (COMPLETIONS, {"max_tokens": 0}, "max_tokens"),
    (COMPLETIONS, {"logprobs": 21}, "logprobs"),
    (COMPLETIONS, {"logit_bias": {"x": 1}}, "logit_bias"),
    (COMPLETIONS, {"logit_bias": {"1": 101}}, "logit_bias"),
    (COMPLETIONS, {"logit_bias": {"300": 1}}, "logit_bias"),
    (COMPLETIONS, {"allowed_token_ids": [999]}, "allowed_token_ids"),
    (COMPLETIONS, {"min_tokens": 6}, "min_tokens"),
    (COMPLETIONS, {"allowed_token_ids": [7], "stop_token_ids": [7], "min_tokens": 1}, "allowed_token_ids"),
    (CHAT, {"allowed_token_ids": [7], "stop_token_ids": [7], "min_tokens": 1}, "allowed_token_ids"),
    (COMPLETIONS, {"repetition_penalty": 0}, "repetition_penalty"),
    (COMPLETIONS, {"frequency_penalty": 3}, "frequency_penalty"),
    (COMPLETIONS, {"bad_words": [""]}, "bad_words"),
    (CHAT, {"top_logprobs": 2}, "top_logprobs"),
    (CHAT, {"speculative": {"num_steps": -1}}, "speculative"),
    (CHAT, {"prediction": {"type": "content"}}, "prediction"),
    (CHAT, {"response_format": {"type": "yaml"}}, "response_format"),
    (CHAT, {"response_format": {"type": "json_object", "schema": {}}}, "response_format"),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}, "schema": {}}}, "response_format"),
    (CHAT, {"response_format": {"type": "json_schema"}}, "response_format"),
    (CHAT, {"response_format": {"type": "json_object"}, "regex": "a"}, "response_format"),
    (CHAT, {"structured_outputs": {"yaml": 1}}, "structured_outputs"),
    (CHAT, {"structured_outputs": {"grammar": ""}}, "structured_outputs"),
    (COMPLETIONS, {"regex": ""}, "regex"),
    (COMPLETIONS, {"guided_choice": []}, "guided_choice"),
    (CHAT, {"json_schema": ""}, "json_schema"),
    (CHAT, {"messages": [{"role": "assistant", "content": "a", "prefix": True}]}, "messages"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("route", "fields", "param"), REFUSED, ids=str)
def test_what_is_wrong_is_named(
    http: httpx.AsyncClient, client: FakeClient, route: str, fields: dict[str, Any], param: str, stream: bool
) -> None:
    answer = post(http, route, stream=stream, **fields)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text
    assert not client.submitted


@pytest.mark.parametrize("route", [COMPLETIONS, CHAT])
def test_a_request_that_excludes_every_token_is_at_fault(http: httpx.AsyncClient, route: str) -> None:
    answer = post(http, route, seed=401)
    assert answer.status_code == 400 and answer.json()["error"]["message"] == "nothing is left that this request allows: bad_words"


@pytest.mark.parametrize("route", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("stop", [None, "IJ"])
def test_logprobs_whole_and_streamed(http: httpx.AsyncClient, tokenizer: Tokenizer, route: str, stop: str | None) -> None:
    asked = {"logprobs": 2} if route == COMPLETIONS else {"logprobs": True, "top_logprobs": 2}
    whole = post(http, route, stop=stop, **asked).json()["choices"][0]["logprobs"]
    chunks = events(post(http, route, stop=stop, stream=True, **asked))[:-1]
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"] is not None]
    text = tokenizer.decode(list(range(FIRST_TOKEN, FIRST_TOKEN + 5)))
    count = 5 if stop is None else text.index(stop) + len(stop)  # the tests' tokens are letters
    if route == CHAT:
        assert [entry for part in parts for entry in part["content"]] == whole["content"] and len(whole["content"]) == count
        first = whole["content"][0]
        assert first["token"] == text[0] and first["bytes"] == list(text[0].encode()) and first["logprob"] == -0.5
        assert [other["logprob"] for other in first["top_logprobs"]] == [-0.5, -2.0]
        return
    for name, values in whole.items():
        assert [value for part in parts for value in part[name]] == values and len(values) == count
    assert whole["tokens"] == list(text[:count]) and whole["text_offset"] == list(range(count))
    assert whole["top_logprobs"][0] == {text[0]: -0.5, tokenizer.token_text(3): -2.0}


def test_echo_puts_the_prompt_in_front(http: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("hello")
    text = tokenizer.decode(prompt) + tokenizer.decode(list(range(FIRST_TOKEN, FIRST_TOKEN + 5)))
    assert post(http, COMPLETIONS, echo=True).json()["choices"][0]["text"] == text
    scored = post(http, COMPLETIONS, echo=True, logprobs=1).json()["choices"][0]
    assert scored["text"] == text and len(scored["logprobs"]["tokens"]) == len(prompt) + 5
    assert scored["logprobs"]["token_logprobs"] == [None] + [-1.0] * (len(prompt) - 1) + [-0.5] * 5
    chunks = events(post(http, COMPLETIONS, echo=True, logprobs=1, stream=True))[:-1]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text
    streamed = [value for chunk in chunks if (found := chunk["choices"][0]["logprobs"]) for value in found["token_logprobs"]]
    assert streamed == scored["logprobs"]["token_logprobs"]
    only = post(http, COMPLETIONS, echo=True, logprobs=1, max_tokens=0).json()
    assert only["choices"][0]["text"] == tokenizer.decode(prompt) and only["usage"]["completion_tokens"] == 0
    assert only["choices"][0]["logprobs"]["token_logprobs"] == [None] + [-1.0] * (len(prompt) - 1)


def test_the_token_of_the_text_is_the_first_of_its_alternatives(http: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("hello")
    found = post(http, COMPLETIONS, echo=True, logprobs=1).json()["choices"][0]["logprobs"]
    for tokens, others in zip(found["tokens"][1:], found["top_logprobs"][1:], strict=True):
        assert next(iter(others)) == tokens
    assert len(found["top_logprobs"][1]) == 2 and found["top_logprobs"][0] is None
    alone = post(http, COMPLETIONS, logprobs=0).json()["choices"][0]["logprobs"]
    assert [list(others) for others in alone["top_logprobs"]] == [[token] for token in alone["tokens"]]
    special = post(http, COMPLETIONS, prompt=prompt, echo=True, max_tokens=0).json()["choices"][0]["text"]
    assert special == tokenizer.decode(prompt, skip_special_tokens=False) != tokenizer.decode(prompt)


def test_a_chats_prompt_logprobs_are_beside_its_choices(http: httpx.AsyncClient) -> None:
    answer = post(http, CHAT, prompt_logprobs=1, n=2).json()
    assert answer["prompt_logprobs"][0] is None and len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"]
    assert not any("prompt_logprobs" in choice for choice in answer["choices"])
    assert post(http, CHAT).json()["prompt_logprobs"] is None


def test_unknown_keys_of_messages_are_left_out(http: httpx.AsyncClient, client: FakeClient) -> None:
    plain = {"role": "user", "content": "a"}
    post(http, CHAT, messages=[plain])
    assert post(http, CHAT, messages=[plain | {"reasoning_details": [{"text": "x"}], "prefix": False}]).status_code == 200
    assert client.submitted[0].prompt == client.submitted[1].prompt


def test_prompt_logprobs_by_id(http: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("hello")
    found = post(http, COMPLETIONS, prompt_logprobs=1).json()["choices"][0]["prompt_logprobs"]
    assert len(found) == len(prompt) and found[0] is None
    assert found[1][str(prompt[1])] == {"logprob": -1.0, "rank": 2, "decoded_token": tokenizer.token_text(prompt[1])}
    assert found[1]["7"]["rank"] == 1


def test_tokens_beside_the_text(http: httpx.AsyncClient, client: FakeClient, tokenizer: Tokenizer) -> None:
    answer = post(http, COMPLETIONS, n=2, return_token_ids=True, logprobs=1, return_tokens_as_token_ids=True).json()
    prompt = tokenizer.encode("hello")
    for choice in answer["choices"]:
        ids = choice["token_ids"]
        assert choice["prompt_token_ids"] == prompt and tokenizer.decode(ids) == choice["text"] and len(ids) > 1
        assert choice["logprobs"]["tokens"] == [f"token_id:{id}" for id in ids]
    whole = post(http, CHAT, return_token_ids=True).json()
    assert whole["prompt_token_ids"] == client.submitted[-1].prompt and "prompt_token_ids" not in whole["choices"][0]
    first, *chunks, _ = events(post(http, CHAT, return_token_ids=True, stream=True))
    assert first["prompt_token_ids"] == whole["prompt_token_ids"] and not any("prompt_token_ids" in chunk for chunk in chunks)
    parts = [chunk["choices"][0].get("token_ids", []) for chunk in chunks]
    assert [id for part in parts for id in part] == whole["choices"][0]["token_ids"]


def test_a_prompt_keeps_its_last_tokens(http: httpx.AsyncClient, client: FakeClient, tokenizer: Tokenizer) -> None:
    whole = [5 + i % 200 for i in range(CONTEXT)]
    assert post(http, COMPLETIONS, prompt=whole, truncate_prompt_tokens=3, echo=True).json()["usage"]["prompt_tokens"] == 3
    assert client.submitted[-1].prompt == whole[-3:]
    post(http, COMPLETIONS, prompt=whole, truncate_prompt_tokens=-1, max_tokens=10)
    assert client.submitted[-1].prompt == whole[10:]
    echoed = post(http, COMPLETIONS, prompt="one two three", truncate_prompt_tokens=1, echo=True, max_tokens=1).json()["choices"][0]["text"]
    assert echoed.startswith(tokenizer.decode(tokenizer.encode("one two three")[-1:])) and not echoed.startswith("one two")
    post(http, CHAT, truncate_prompt_tokens=2)
    assert len(client.submitted[-1].prompt) == 2


def test_several_choices_share_a_prompt(http: httpx.AsyncClient, client: FakeClient) -> None:
    answer = asyncio.run(http.post(COMPLETIONS, json={"model": "fake", "prompt": ["a", "bc"], "n": 3, "max_tokens": 4, "seed": 5})).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert len({r.id for r in client.submitted}) == 6 and len({r.sampling.seed for r in client.submitted}) == 3
    seeds = [r.sampling.seed for r in client.submitted[:3]]
    assert seeds[0] == 5 and [r.sampling.seed for r in client.submitted] == seeds * 2
    prompts = [r.prompt for r in client.submitted]
    assert prompts == [prompts[0]] * 3 + [prompts[3]] * 3 and prompts[0] != prompts[3]
    assert answer["usage"]["prompt_tokens"] == len(prompts[0]) + len(prompts[3]) and answer["usage"]["completion_tokens"] == 24
    client.submitted.clear()
    post(http, COMPLETIONS, n=3, seed=6)  # whoever counts seeds up gets no choice twice
    assert not {r.sampling.seed for r in client.submitted} & set(seeds)


def test_the_best_of_each_prompts_choices(http: httpx.AsyncClient, client: FakeClient) -> None:
    """The engine's tokens differ in nothing but who asked."""
    answer = post(http, COMPLETIONS, prompt=["a", "bc"], n=2, best_of=3).json()
    assert len(client.submitted) == 6 and {request.sampling.logprobs for request in client.submitted} == {0}
    assert [choice["index"] for choice in answer["choices"]] == list(range(4))
    assert all(choice["logprobs"] is None for choice in answer["choices"])
    prompts = len(client.submitted[0].prompt) + len(client.submitted[3].prompt)
    assert answer["usage"]["prompt_tokens"] == prompts and answer["usage"]["completion_tokens"] == 6 * 5
    refused = post(http, COMPLETIONS, n=2, best_of=3, stream=True)
    assert refused.status_code == 400 and "stream" in refused.json()["error"]["message"]
    assert post(http, COMPLETIONS, n=2, best_of=2, stream=True).status_code == 200  # all of them are answered
    assert post(http, CHAT, n=2, best_of=2).status_code == 200


def test_usage_counts_predictions_and_drafts(http: httpx.AsyncClient) -> None:
    usage = post(http, CHAT, max_tokens=4).json()["usage"]
    assert usage["speculative"] == {"steps": 2, "draft_tokens": 4, "accepted_tokens": 2}
    assert usage["completion_tokens_details"] == {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 2, "reasoning_tokens": 0}
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(post(http, CHAT, max_tokens=4, cache_salt="another", stream=True, stream_options=options))[:-1]
    assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == sorted(chunk["usage"]["completion_tokens"] for chunk in chunks)
    assert chunks[-1]["usage"] == usage
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant" and chunks[0]["usage"]["completion_tokens"] == 0
    options["include_usage"] = False
    assert not any(chunk.get("usage") for chunk in events(post(http, CHAT, max_tokens=4, stream=True, stream_options=options))[:-1])


def test_the_trace_says_who_proposed_what(http: httpx.AsyncClient, tokenizer: Tokenizer) -> None:
    whole = post(http, COMPLETIONS, max_tokens=4, return_spec_trace=True).json()["choices"][0]["spec_trace"]
    assert whole[0] == {
        "tokens": [FIRST_TOKEN, FIRST_TOKEN + 1],
        "texts": [tokenizer.token_text(FIRST_TOKEN), tokenizer.token_text(FIRST_TOKEN + 1)],
        "proposed": [
            {"token": FIRST_TOKEN, "text": tokenizer.token_text(FIRST_TOKEN), "parent": 0, "source": "mtp", "accepted": True},
            {"token": 5, "text": tokenizer.token_text(5), "parent": 1, "source": "prediction", "accepted": False},
        ],
    }
    chunks = events(post(http, COMPLETIONS, max_tokens=4, return_spec_trace=True, stream=True))[:-1]
    assert [step for chunk in chunks for step in chunk["choices"][0]["spec_trace"]] == whole


def test_a_trace_gives_a_character_to_the_token_that_completes_it(tokenizer: Tokenizer) -> None:
    trace, tokens = Trace(tokenizer), tokenizer.encode("a€", special=False)
    steps = [trace.step(StepOutput("", [token])).texts for token in tokens]
    assert len(tokens) > 2  # the sign of the euro is several tokens
    assert steps == [["a"], *([[""]] * (len(tokens) - 2)), ["€"]]


def test_a_pool_that_is_smaller_than_the_context_is_named(tokenizer: Tokenizer, client: FakeClient) -> None:
    client.card = replace(client.card, wanted_context=9 * CONTEXT)
    http = httpx.AsyncClient(transport=httpx.ASGITransport(create_app(client, tokenizer)), base_url="http://test")
    for fields in ({"prompt": [5] * CONTEXT}, {"max_tokens": CONTEXT}, {"prompt": [5] * 9, "max_tokens": CONTEXT - 1}):
        error = post(http, COMPLETIONS, **fields).json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert f"the KV pool holds no more of the context of {9 * CONTEXT}" in error["message"]
