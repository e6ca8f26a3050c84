"""Rules in a running engine where something goes wrong, and grammars on the demo model's own tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping

import jsonschema
import pytest
from torch import Tensor

from mtpserve import LLM
from mtpserve.core.errors import InvalidRequest
from mtpserve.core.request import Finish, Proposal, Request
from mtpserve.core.sampling import GrammarSpec, SamplingParams
from mtpserve.spec.counts import count_verification, new_stats
from tests.spec.test_trees import tree
from tests.tiny import prompts, run, tiny_engine, tiny_model


class Faulty:
    def __call__(self, tokens: list[int], prompt_len: int, params: Mapping[str, object], logits: Tensor) -> Tensor:
        if params.get("break") and len(tokens) > prompt_len + 4:
            raise RuntimeError("the operator's code is wrong")
        return logits


@pytest.mark.parametrize("shape", [3, tree(2, 2, 4)], ids=["chain", "tree"])
def test_a_processor_that_fails_ends_its_request_alone(shape: object) -> None:
    model, asked = tiny_model(), prompts(4)
    plain = run(tiny_engine(model, 0), asked, SamplingParams(max_tokens=16, temperature=0))
    engine = tiny_engine(model, shape, processors=[Faulty()])  # type: ignore[arg-type]
    for i, prompt in enumerate(asked):
        engine.add(Request(str(i), prompt, SamplingParams(max_tokens=16, temperature=0, custom_params={"break": i == 2})))
    tokens: dict[str, list[int]] = {str(i): [] for i in range(4)}
    ended = {}
    while engine.has_work:
        for event in engine.step():
            tokens[event.id] += event.tokens
            ended[event.id] = event.finish
    engine.check_integrity()
    assert ended == {"0": Finish.LENGTH, "1": Finish.LENGTH, "2": Finish.ERROR, "3": Finish.LENGTH}
    assert all(tokens[str(i)] == plain[i] for i in (0, 1, 3)) and tokens["2"] == plain[2][: len(tokens["2"])]


def test_an_engine_without_a_tokenizer_says_so() -> None:
    with pytest.raises(InvalidRequest, match="tokenizer"):
        tiny_engine(tiny_model(), 3).add(Request("a", [1], SamplingParams(grammar=GrammarSpec("json_object"))))


SCHEMAS = [
    {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}, "n": {"type": "integer", "maximum": 99, "minimum": 0}},
     "required": ["name", "n"], "additionalProperties": False},
    {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 1, "maxItems": 3},
    {"enum": ["yes", "no"]},
]  # fmt: skip
SHAPES = {
    "plain": {"speculative_algorithm": "none"},
    "chain": {"speculative_algorithm": "MTP"},
    "tree": {"speculative_algorithm": "MTP", "speculative_eagle_topk": 3, "speculative_num_draft_tokens": 10},
    "both": {"speculative_algorithm": "MTP+NGRAM"},
}


def test_grammars_on_real_tokens() -> None:
    """The same text under every kind of drafts, valid where it ended; neighbours without a grammar do not notice."""
    params = [
        SamplingParams(max_tokens=60, temperature=1.0 * (i % 2), seed=i, grammar=GrammarSpec("json_schema", json.dumps(SCHEMAS[i % 3])))
        for i in range(6)
    ] + [SamplingParams(max_tokens=20, temperature=0.0)] * 2
    asked = [f"# {i}\nvalue = " for i in range(8)]
    texts = {}
    for name, options in SHAPES.items():
        with LLM("demo", max_total_tokens=4096, max_running_requests=8, **options) as llm:
            found = llm.generate(asked, params)
            texts[name] = [each.text for each in found]
            stats = llm.engine.stats
            assert name == "plain" or stats.accepted_tokens_by_source["grammar"] > 0
            proposed = stats.draft_tokens_total - stats.draft_tokens_by_source["grammar"]
            assert sum(stats.draft_tokens_per_position) == proposed and (name == "plain" or proposed > 0)
            for each, schema in zip(found[:6], SCHEMAS * 2, strict=True):
                assert each.finish_reason == "length" or jsonschema.validate(json.loads(each.text), schema) is None
            assert sum(each.finish_reason == "stop" for each in found[:6]) >= 4
            with pytest.raises(InvalidRequest, match="unclosed"):
                llm.generate("a", SamplingParams(grammar=GrammarSpec("regex", "((")))
    assert texts["plain"] == texts["chain"] == texts["tree"] == texts["both"]


def test_tokens_that_a_grammar_forces_have_no_position() -> None:
    """Two drafts of n-grams, of which one was accepted, after two forced tokens; the first n-gram draft stands beside the forced ones."""
    stats = new_stats(4, 8)
    proposal = Proposal([5, 6, 7, 8], [0, 1, 0, 2], ["grammar", "grammar", "ngram", "ngram"], [1, 2, 4])
    count_verification(stats, proposal, accepted=3, committed=4)
    assert (stats.draft_tokens_per_position, stats.accepted_tokens_per_position) == ([1, 0, 1, 0], [0, 0, 1, 0])
    assert (stats.draft_tokens_total, stats.accepted_tokens_total) == (4, 3)
    assert {name: count for name, count in stats.draft_tokens_by_source.items() if count} == {"grammar": 2, "ngram": 2}
    assert {name: count for name, count in stats.accepted_tokens_by_source.items() if count} == {"grammar": 2, "ngram": 1}
