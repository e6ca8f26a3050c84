"""Constraints that exclude each other: refused where that is seen at once, and otherwise the request's own end, with its reason."""

from __future__ import annotations

from typing import Any

import pytest

from mtpserve import LLM, SamplingParams
from mtpserve.core.errors import InvalidRequest
from mtpserve.core.sampling import GrammarSpec

END, SELF = 1, 315  # the demo's end of text, and " self"


@pytest.fixture(scope="module", params=["none", "NEXTN"])
def llm(request: pytest.FixtureRequest) -> Any:
    with LLM(model="demo", speculative_algorithm=request.param) as made:
        yield made


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_that_excludes_every_token_says_so(llm: LLM, temperature: float) -> None:
    encode, decode = llm.tokenizer.encode, llm.tokenizer.decode
    token = next(token for token in range(300, 2000) if encode(decode([token] * 2), special=False) == [token] * 2)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"allowed_token_ids": (token,), "bad_words": (decode([token] * 2),)}, "allowed_token_ids, bad_words"),
        ({"grammar": GrammarSpec("ebnf", 'start: "x" <|end_of_text|> "y"')}, "grammar"),
    ]
    for fields, named in cases:
        output = llm.generate(["x"], SamplingParams(max_tokens=5, temperature=temperature, **fields))[0]
        assert (output.finish_reason, len(output.tokens)) == ("error", 1)
        assert output.error == f"nothing is left that this request allows: {named}"
    assert llm.engine.stats.failed_requests_total == 0, "the model has not failed"


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"allowed_token_ids": (SELF,), "bad_words": ("self",)}, "allowed_token_ids and bad_words"),
        ({"allowed_token_ids": (END,), "min_tokens": 3}, "allowed_token_ids and min_tokens"),
        ({"allowed_token_ids": (7,), "stop_token_ids": (7,), "min_tokens": 1}, "allowed_token_ids and min_tokens"),
        ({"allowed_token_ids": (END, SELF), "bad_words": ("self",), "min_tokens": 1}, "allowed_token_ids and bad_words and min_tokens"),
    ],
)
def test_what_admission_sees_is_refused_by_both_names(llm: LLM, fields: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        llm.generate(["x"], SamplingParams(max_tokens=5, **fields))
    assert named in str(error.value) and error.value.param == "allowed_token_ids"


def test_constraints_that_leave_something_are_served(llm: LLM) -> None:
    for fields in (
        {"allowed_token_ids": (END,), "min_tokens": 3, "ignore_eos": True},
        {"allowed_token_ids": (END, 7), "min_tokens": 3},
        {"allowed_token_ids": (SELF,), "bad_words": ("self",), "grammar": GrammarSpec("choice", '["ab"]')},
    ):
        output = llm.generate(["x"], SamplingParams(max_tokens=5, temperature=0, **fields))[0]  # type: ignore[arg-type]
        assert output.error is None and output.tokens
