"""A thinking budget ends the reasoning after as many tokens in every drafting shape, and changes nothing before and after it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mtpserve import LLM
from mtpserve.core.errors import InvalidRequest
from mtpserve.core.sampling import BUDGET_MARGIN, GrammarSpec, SamplingParams, ThinkingBudget
from mtpserve.text.parsers.call_grammar import spelled_by
from mtpserve.text.parsers.reasoning import ALWAYS, Opening
from tests.spec.test_rules import SHAPES

PROMPT = "def add(a, b):\n"
BUDGETS = (0, 1, 5, BUDGET_MARGIN + 9)
SCHEMA = json.dumps({"enum": ["yes", "no"]})


def grammars(llm: LLM, num_tokens: int) -> tuple[GrammarSpec, GrammarSpec]:
    """A budget alone, and one before constrained text."""
    tokenizer = llm.tokenizer
    budget = ThinkingBudget(num_tokens, ALWAYS.start, ALWAYS.end, tuple(tokenizer.encode(ALWAYS.end, special=False)), True)
    front = ALWAYS.front(Opening.INSIDE, spelled_by(tokenizer.marker_id))
    return GrammarSpec("any_text", thinking=budget), GrammarSpec("json_schema", SCHEMA, front=front, thinking=budget)


def outputs(options: dict[str, Any]) -> list[list[int]]:
    cases = [(n, grammar, temperature) for n in BUDGETS for grammar in (0, 1) for temperature in (0.0, 0.8)]
    with LLM(model="demo", device="cpu", dtype="float32", max_total_tokens=6144, **options) as llm:
        params = [
            SamplingParams(
                max_tokens=BUDGET_MARGIN + 30, temperature=temperature, seed=5, ignore_eos=grammar == 0, grammar=grammars(llm, n)[grammar]
            )
            for n, grammar, temperature in cases
        ]
        answers = [[*answer.tokens] for answer in llm.generate([PROMPT] * len(params), params)]
        closing_ids = llm.tokenizer.encode(ALWAYS.end, special=False)
        for (num_tokens, grammar, _), tokens in zip(cases, answers, strict=True):
            assert tokens[num_tokens : num_tokens + len(closing_ids)] == closing_ids, num_tokens
            if grammar == 1:
                assert llm.tokenizer.decode(tokens[num_tokens + len(closing_ids) :]).strip() in ('"yes"', '"no"')
    return answers


def test_reasoning_ends_after_its_budget_in_each_shape() -> None:
    plain = outputs(SHAPES["plain"])
    for shape, options in SHAPES.items():
        assert shape == "plain" or outputs(options) == plain, shape


def test_a_budget_needs_a_reasoning_parser() -> None:
    with (
        LLM(model="demo", device="cpu", max_total_tokens=512) as llm,
        pytest.raises(InvalidRequest, match=r"thinking_token_budget .* got 7"),
    ):
        llm.generate([PROMPT], SamplingParams(max_tokens=4, thinking_token_budget=7))
