"""Forced calls: every format's grammar takes what the format writes, with markers as tokens of their own or not, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mtpserve.core.errors import InvalidRequest
from mtpserve.core.sampling import GrammarKind, GrammarSpec
from mtpserve.text.grammar import GrammarMatcher, LLGuidanceCompiler
from mtpserve.text.parsers.deepseek import CALL, CALL_END, SECTION, SECTION_END, SEPARATOR
from mtpserve.text.parsers.grammar import spelled_by
from mtpserve.text.parsers.json_calls import Listed
from mtpserve.text.parsers.reasoning import ALWAYS, SOMETIMES, Opening
from mtpserve.text.parsers.registry import TOOL_CALLS
from mtpserve.text.tokenizer import Tokenizer
from tests.text import tiny
from tests.text.calls import TOOLS
from tests.text.test_parsers import CITY, CODER, ENTRY, GLM, HERMES, LLAMA, MIMO, V3_CALL, V31_CALL

MARKERS = [
    "<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
    SECTION, SECTION_END, CALL, CALL_END, SEPARATOR,
]  # fmt: skip


class Vocabulary:
    def __init__(self, directory: Path, markers: list[str]) -> None:
        tiny.write(directory)
        file = directory / "tokenizer.json"
        content = json.loads(file.read_text())
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        for index, marker in enumerate(markers):
            content["added_tokens"].append({"id": tiny.VOCAB + index, "content": marker, "special": index % 2 == 0, **flags})
        file.write_text(json.dumps(content))
        self.tokenizer = Tokenizer(directory)
        self.compiler = LLGuidanceCompiler(directory, tiny.VOCAB + len(markers), [tiny.EOS_ID])
        self.spell = spelled_by(self.tokenizer.marker_id)

    def takes(self, matcher: GrammarMatcher, text: str) -> bool:
        try:
            matcher.commit(self.tokenizer.encode(text, special=False))
        except ValueError:
            return False
        return matcher.complete


@pytest.fixture(scope="module", params=["tokens", "characters"])
def vocabulary(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    return Vocabulary(tmp_path_factory.mktemp("grammars"), MARKERS if request.param == "tokens" else [])


LISTED = f"[{ENTRY}]"
# format, one call, two calls
WRITTEN = [
    ("hermes", HERMES, f"{HERMES}\n{HERMES}"),
    ("glm45", GLM, f"{GLM}\n{GLM}"),
    ("glm47", GLM.replace("\n", ""), (GLM * 2).replace("\n", "")),
    ("qwen3_coder", CODER, f"{CODER}\n{CODER}"),
    ("mimo", MIMO, f"{MIMO}\n{MIMO}"),
    ("deepseek_v3", f"{SECTION}{V3_CALL}{SECTION_END}", f"{SECTION}{V3_CALL}\n{V3_CALL}{SECTION_END}"),
    ("deepseek_v31", f"{SECTION}{V31_CALL}{SECTION_END}", f"{SECTION}{V31_CALL}{V31_CALL}{SECTION_END}"),
    ("llama3_json", LLAMA, f"{LLAMA}; {LLAMA}"),
    ("mistral", f"[TOOL_CALLS]{LISTED}", f"[TOOL_CALLS][{ENTRY}, {ENTRY}]"),
    (None, LISTED, f"[{ENTRY}, {ENTRY}]"),
]


@pytest.mark.parametrize(("format", "one", "two"), WRITTEN, ids=lambda value: str(value)[:12])
def test_what_a_forced_call_may_be(vocabulary: Vocabulary, format: str | None, one: str, two: str) -> None:
    made = TOOL_CALLS.get(format)(TOOLS) if format else Listed(TOOLS)

    def takes(text: str, several: bool = True, front: str = "", tools: tuple[int, ...] = (0, 1, 2)) -> bool:
        grammar = made.grammar([TOOLS[index] for index in tools], several, vocabulary.spell)
        return vocabulary.takes(vocabulary.compiler.compile(GrammarSpec("tool_calls", grammar, front)), text)

    assert takes(one) and takes(one, several=False) and takes(two) and not takes(two, several=False)
    assert not takes(one, tools=(1, 2)) and not takes(one[:-1]) and not takes(f"Sure: {one}")
    assert not takes(one.replace("2", "two")), "days is an integer"
    assert not takes(one.replace("city", "town").replace("days", "city")), "city is required"
    thoughts = SOMETIMES.front(Opening.MAYBE, vocabulary.spell)
    assert takes(one, front=thoughts) and takes(f"<think>\na < b\n</think>\n\n{one}", front=thoughts)
    assert not takes(f"a</think>{one}", front=thoughts) and not takes(f"<think>{one}", front=thoughts)
    inside = ALWAYS.front(Opening.INSIDE, vocabulary.spell)
    assert takes(f"a\n</think>{one}", front=inside) and takes(f"<think>a</think>{one}", front=inside) and not takes(one, front=inside)


BODIES: list[tuple[GrammarKind, str, str]] = [
    ("json_object", "", '{"a": 1}'),
    ("json_schema", '{"type": "object", "required": ["a"]}', '{"a": 1}'),
    ("regex", "a+", "aa"),
    ("choice", '["yes", "no"]', "no"),
    ("ebnf", 'root ::= "x" | "y"', "y"),
    ("ebnf", "start: X\nX: /x+/", "xx"),
    ("structural_tag", '{"format": {"type": "const_string", "value": "tag"}}', "tag"),
    ("structural_tag", '{"structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": ["<a"]}', "text <a>1</a>"),
]


@pytest.mark.parametrize(("kind", "text", "output"), BODIES, ids=str)
def test_every_kind_of_grammar_stands_behind_reasoning(vocabulary: Vocabulary, kind: GrammarKind, text: str, output: str) -> None:
    front = ALWAYS.front(Opening.INSIDE, vocabulary.spell)
    for written, good in (
        (f"so\n</think>\n\n{output}", True),
        (output, False),
        ("so</think>?" + output, kind == "structural_tag" and " " in output),
    ):
        matcher = vocabulary.compiler.compile(GrammarSpec(kind, text, front))
        assert vocabulary.takes(matcher, written) is good, written


@pytest.mark.parametrize(("kind", "text", "output"), BODIES[:6], ids=str)
def test_calls_may_stand_in_the_place_of_a_constrained_answer(vocabulary: Vocabulary, kind: GrammarKind, text: str, output: str) -> None:
    calls = TOOL_CALLS.get("hermes")(TOOLS).grammar(TOOLS, True, vocabulary.spell)
    for front in ("", SOMETIMES.front(Opening.MAYBE, vocabulary.spell)):
        for written, good in (
            (output, True),
            (HERMES, True),
            (output + HERMES, False),
            ("other", False),
            (HERMES.replace("2", "two"), False),
        ):
            matcher = vocabulary.compiler.compile(GrammarSpec(kind, text, front, calls))
            assert vocabulary.takes(matcher, written) is good, written


def test_a_vocabulary_with_args_is_one_of_a_model_that_names_the_call_first(tmp_path: Path) -> None:
    vocabulary = Vocabulary(tmp_path, ["[TOOL_CALLS]", "[ARGS]"])
    grammar = TOOL_CALLS.get("mistral")(TOOLS).grammar(TOOLS, True, vocabulary.spell)
    matcher = vocabulary.compiler.compile(GrammarSpec("tool_calls", grammar))
    assert vocabulary.takes(matcher, f"[TOOL_CALLS]get_weather[ARGS]{CITY}" * 2)


def test_a_schema_that_does_not_compile_is_a_fault_of_the_tools(vocabulary: Vocabulary) -> None:
    with pytest.raises(InvalidRequest, match="colour") as caught:
        vocabulary.compiler.compile(GrammarSpec("tool_calls", 'calls: %json {"type": "string", "format": "colour"}'))
    assert caught.value.param == "tools"
    with pytest.raises(InvalidRequest, match="at most") as caught:
        vocabulary.compiler.compile(GrammarSpec("regex", "a", instead="calls: " + " " * (256 << 10)))
    assert caught.value.param == "tools"
