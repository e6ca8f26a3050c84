"""Single fields of bodies and answers, each by itself."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from mtpserve.core.request import Finish, Proposal, TokenEvent
from mtpserve.core.sampling import SamplingParams
from mtpserve.server.chat.bodies import ChatRequest, CompletionRequest
from mtpserve.server.chat.steps.step_output import StepOutput, StepReader
from mtpserve.server.openai.logprobs import Offsets
from mtpserve.server.schema.unsupported import same
from mtpserve.text.detokenizer import Detokenizer
from mtpserve.text.requests import spellings
from mtpserve.text.tokenizer import Tokenizer
from tests.server.fake_client import FakeClient
from tests.text import tiny


def test_of_two_limits_of_a_chat_the_newer_name_counts() -> None:
    asked = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 5}
    assert ChatRequest.model_validate(asked).wanted_tokens == 5
    assert ChatRequest.model_validate(asked | {"max_completion_tokens": 7}).wanted_tokens == 7


def test_a_whole_number_may_be_written_with_a_point() -> None:
    body = CompletionRequest.model_validate({"prompt": [1.0, 2], "max_tokens": 7.0, "top_p": 1.0})
    assert (body.prompt, body.max_tokens, body.top_p) == ([1, 2], 7, 1.0)


@pytest.mark.parametrize(
    ("value", "neutral", "equal"), [(True, 1, False), (0, False, False), (1, 1, True), (False, False, True), ([], [], True)]
)
def test_a_switch_is_no_number(value: object, neutral: object, equal: bool) -> None:
    assert same(value, neutral) == equal


def test_a_word_of_blanks_bans_no_single_blank(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode(" ", special=False) not in spellings(tokenizer, ["  "])
    assert tokenizer.encode(" a", special=False) in spellings(tokenizer, ["a"])


@pytest.mark.parametrize(("path", "methods"), [("/v1/responses/resp_1", {"GET", "DELETE"}), ("/v1/spec", {"GET", "POST"})])
def test_a_refused_method_is_told_all_that_its_path_has(http: httpx.AsyncClient, path: str, methods: set[str]) -> None:
    answer = asyncio.run(http.request("PUT", path))
    assert answer.status_code == 405 and methods <= set(answer.headers["allow"].split(", "))


def test_a_health_check_is_drafted_for_as_others_are(http: httpx.AsyncClient, client: FakeClient) -> None:
    assert asyncio.run(http.get("/health_generate")).status_code == 200
    assert [request.sampling.speculation.enabled for request in client.submitted] == [True]


def test_the_log_says_why_a_request_was_refused_and_not_what_it_said(http: httpx.AsyncClient, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "mtpserve"):
        for more in ({"temperature": 1234.5}, {"seed": "a secret"}, {"model": "gpt-9", "user": "a secret"}):
            assert asyncio.run(http.post("/v1/completions", json={"prompt": "a secret", **more})).status_code in (400, 404)
    lines = [record.getMessage() for record in caplog.records if "/v1/completions" in record.getMessage()]
    assert "temperature must be in [0, 100], got 1234.5" in lines[0] and "got a string" in lines[1]
    assert "the model 'gpt-9' does not exist; this server offers 'fake'" in lines[2] and "secret" not in "".join(lines)


def test_drafts_behind_what_completed_a_stop_string_are_not_kept() -> None:
    step = StepOutput("a", [1], proposal=Proposal([1, 2, 3], [0, 1, 2], ["mtp"] * 3, [1, 2, 3]), num_accepted_tokens=3)
    assert step.accepted_nodes == [1]


def test_what_was_held_back_comes_where_the_limit_ends_a_text(tokenizer: Tokenizer) -> None:
    clock: Any = SimpleNamespace(tokens=lambda *_: None, verified=lambda *_: None)
    reader = StepReader(Detokenizer(tokenizer.fast, SamplingParams(stop=("ab!",))), clock)
    steps = reader.read([TokenEvent("a", tokenizer.encode("x ab", special=False), finish=Finish.LENGTH)])
    assert [step.text for step in steps] == ["x ab"] and reader.finish is Finish.LENGTH


def test_a_special_token_of_the_clients_prompt_has_its_place_in_the_echo(tokenizer: Tokenizer) -> None:
    letter = tokenizer.encode("a", special=False)
    assert len(letter) == 1
    assert Offsets(tokenizer, tiny.EOS + "a", True).take([tiny.EOS_ID, *letter]) == [0, len(tiny.EOS)]
    assert Offsets(tokenizer, "a", True).take([tiny.EOS_ID, *letter]) == [0, 0]
