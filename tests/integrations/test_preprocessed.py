"""Dynamo's requests and chunks: what is handed on, what is refused. The requests are as its frontend 1.6.1 sent them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mtpserve.core.errors import InvalidRequest
from mtpserve.core.request import Finish, Request, TokenLogprob
from mtpserve.core.sampling import GrammarSpec, SamplingParams, Speculation
from mtpserve.integrations.preprocessed import body_of, chunk_of, last_of
from mtpserve.server.chat.generation import Choice
from mtpserve.server.chat.steps.step_output import StepOutput
from mtpserve.server.openai.usage import Usage
from mtpserve.text.tokenizer import Tokenizer
from tests.server.conftest import checkpoint, tokenizer

__all__ = ["checkpoint", "tokenizer"]

# A request in which everything is set that the frontend hands on; what clients left out is null.
WHOLE: dict[str, Any] = {
    "model": "demo",
    "token_ids": [5, 6, 7],
    "stop_conditions": {
        "max_tokens": 3, "stop": ["zz"], "stop_token_ids": [7], "stop_token_ids_visible": None, "stop_token_ids_hidden": [1, 7],
        "min_tokens": 2, "ignore_eos": True, "max_thinking_tokens": None,
    },
    "sampling_options": {
        "n": 1, "best_of": None, "presence_penalty": 0.25, "frequency_penalty": 0.5, "repetition_penalty": 1.100000023841858,
        "temperature": 0.5, "top_p": 0.8999999761581421, "top_k": 5, "min_p": 0.10000000149011612, "use_beam_search": None,
        "length_penalty": None, "seed": 4, "include_stop_str_in_output": None, "guided_decoding": {"regex": "[0-9]+", "backend": "x"},
    },
    "output_options": {"logprobs": 2, "prompt_logprobs": 1, "skip_special_tokens": None, "formatted_prompt": None},
    "eos_token_ids": [1],
    "annotations": [],
    "routing": {"cache_salt": "s", "priority_jump": 3.0, "priority": 3},
    "extra_args": {"nvext": {"extra_fields": ["engine_data"], "cache_salt": "s"}},
}  # fmt: skip
BARE: dict[str, Any] = {"token_ids": [5], "stop_conditions": {}, "sampling_options": {}, "output_options": {}, "routing": {}}
HEADER = (
    '{"logit_bias": {"9": -1.5}, "allowed_token_ids": [9, 10], "bad_words": ["ab"], "speculative": {"num_steps": 1}, "temperature": 2,'
    ' "prediction": {"type": "content", "content": "abc"}}'
)


def asked(request: dict[str, Any], metadata: str | None = None, priorities: bool = True) -> SamplingParams:
    body = body_of(request, metadata, has_priorities=priorities)
    body.check()
    return body.sampling({"top_p": 0.5}, body.max_tokens)


def with_part(part: str, **values: Any) -> dict[str, Any]:
    return BARE | {part: values}


def test_everything_that_the_frontend_hands_on() -> None:
    body = body_of(WHOLE, None, has_priorities=True)
    assert (body.prompts, body.cache_salt) == ([[5, 6, 7]], "s")
    assert asked(WHOLE) == SamplingParams(
        max_tokens=3, min_tokens=2, ignore_eos=True, stop_token_ids=(7, 1), temperature=0.5, top_p=0.9, top_k=5, min_p=0.1, seed=4,
        presence_penalty=0.25, frequency_penalty=0.5, repetition_penalty=1.1, logprobs=2, prompt_logprobs=1, priority=-3,
        grammar=GrammarSpec("regex", "[0-9]+"),
    )  # fmt: skip
    assert asked(WHOLE, priorities=False).priority == 0


def test_what_nobody_sets_is_the_models_default() -> None:
    assert asked(BARE) == SamplingParams(top_p=0.5)


def test_fields_that_dynamo_does_not_hand_on_come_in_a_header() -> None:
    found = asked(WHOLE, HEADER)
    expected = {"logit_bias": {9: -1.5}, "allowed_token_ids": (9, 10), "bad_words": ("ab",)}
    assert found == replace(asked(WHOLE), **expected, speculation=Speculation(num_steps=1, prediction="abc"))  # type: ignore[arg-type]
    assert found.temperature == 0.5, "what Dynamo hands on goes before it"


def test_a_frontend_of_ones_own_may_hand_them_on_itself() -> None:
    assert asked(BARE | {"extra_args": {"sampling_options": {"logit_bias": {"9": 2}}}}).logit_bias == {9: 2}


@pytest.mark.parametrize(
    ("guided", "kind", "text"),
    [
        ({"json": {"type": "object"}}, "json_schema", '{"type": "object"}'),
        ({"choice": ["a", "b"]}, "choice", '["a", "b"]'),
        ({"grammar": "root ::= 'a'"}, "ebnf", "root ::= 'a'"),
    ],
)
def test_grammars(guided: dict[str, Any], kind: str, text: str) -> None:
    assert asked(with_part("sampling_options", guided_decoding=guided | {"backend": None})).grammar == GrammarSpec(kind, text)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("request_", "metadata", "told"),
    [
        (with_part("sampling_options", n=2), None, "n must be 1 behind Dynamo"),
        (with_part("sampling_options", use_beam_search=True), None, "use_beam_search is not supported, got True"),
        (with_part("sampling_options", guided_decoding={"regex": "a", "whitespace_pattern": " "}), None, "white space is the engine's"),
        (with_part("stop_conditions", max_thinking_tokens=5), None, "max_thinking_tokens is not supported, got 5"),
        (with_part("sampling_options", temperature=-1.0), None, "temperature must be in [0, 100], got -1.0"),
        (BARE, "7", "x-dynamo-meta-mtpserve must be a JSON object with fields of completions, got '7'"),
        (BARE, "{", "x-dynamo-meta-mtpserve must be a JSON object"),
        (BARE, '{"logit_bias": 7}', "logit_bias: Input should be a valid dictionary, got 7"),
        (BARE, '{"regex": "a"}', "regex belongs in the body, not in x-dynamo-meta-mtpserve"),
        (BARE, '{"n": 2}', "n must be 1 behind Dynamo"),
        (BARE, '{"best_of": 2}', "best_of must be 1 behind Dynamo"),
    ],
)  # fmt: skip
def test_what_is_refused(request_: dict[str, Any], metadata: str | None, told: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        asked(request_, metadata)
    assert told in str(refused.value)


def test_chunks(tokenizer: Tokenizer) -> None:
    scores = [TokenLogprob(-0.5, 1, [(40, -0.5), (3, -2.0)]), TokenLogprob(-1.5, 3, [(41, -0.25), (3, -0.75)])]
    step = StepOutput("ab", [40, 41], None, scores)
    assert chunk_of(0, step, tokenizer, None) == {"token_ids": [40, 41], "index": 0}
    assert chunk_of(0, step, tokenizer, 0) == {"token_ids": [40, 41], "index": 0, "log_probs": [-0.5, -1.5]}
    first, _ = chunk_of(0, step, tokenizer, 2)["top_logprobs"]
    spelled = tokenizer.token_bytes(40)
    assert first[0] == {"rank": 1, "token_id": 40, "token": spelled.decode(), "logprob": -0.5, "bytes": list(spelled)}
    assert [each["token_id"] for each in first] == [40, 3]
    for finish, named in ((Finish.STOP, "stop"), (Finish.LENGTH, "length"), (Finish.ABORT, "cancelled")):
        assert chunk_of(0, StepOutput("", [], finish), tokenizer, None)["finish_reason"] == named


def test_the_last_chunk(tokenizer: Tokenizer) -> None:
    request = Request("r", [5, 6], SamplingParams())
    usage = Usage([Choice(None, request, cached_tokens=1)], 1)  # type: ignore[arg-type]
    usage.add(StepOutput("ab", [40, 41]))
    last = last_of(usage, [5, 6], [], tokenizer)
    counted = {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4, "prompt_tokens_details": {"cached_tokens": 1}}
    assert last["completion_usage"] == counted
    (whole,) = last["engine_data"].values()
    assert whole | counted == whole and whole["speculative"] == {"steps": 1, "draft_tokens": 0, "accepted_tokens": 0}
    data = last_of(usage, [5, 6], [TokenLogprob(-1.0, 2, [(7, -0.25)])], tokenizer)["engine_data"]
    first, second = data["prompt_logprobs"]
    assert first is None and second["6"] | {"decoded_token": ""} == {"logprob": -1.0, "rank": 2, "decoded_token": ""}
    assert second["7"]["rank"] == 1
