"""Forced calls: every format's grammar takes what the format writes, with markers as tokens of their own or not, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mtpserve.core.errors import InvalidRequest
from mtpserve.core.sampling import GrammarKind, GrammarSpec
from mtpserve.text.grammars.grammar import GrammarMatcher, LLGuidanceCompiler
from mtpserve.text.parsers.call_grammar import spelled_by
from mtpserve.text.parsers.formats.deepseek import CALL, CALL_END, SECTION, SECTION_END, SEPARATOR
from mtpserve.text.parsers.formats.gemma import THOUGHT
from mtpserve.text.parsers.formats.harmony import CHANNELS
from mtpserve.text.parsers.formats.json_calls import Listed
from mtpserve.text.parsers.reasoning import ALWAYS, ERNIE, SOMETIMES, Opening
from mtpserve.text.parsers.registry import TOOL_CALLS
from mtpserve.text.parsers.tools import Tool
from mtpserve.text.tokenizer import Tokenizer
from tests.text import tiny
from tests.text.calls import TOOLS, longcat
from tests.text.test_parsers import (
    CALLS,
    CALLS_END,
    CITY,
    CODER,
    DSML,
    ENTRY,
    GEMMA,
    GLM,
    HARMONY,
    HERMES,
    INVOKE,
    LLAMA,
    MIMO,
    MINIMAX,
    MINIMAX_END,
    TURN,
    V3_CALL,
    V31_CALL,
)

MARKERS = [
    "<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
    SECTION, SECTION_END, CALL, CALL_END, SEPARATOR, "｜DSML｜", "<|start|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>",
    "<|tool_call_start|>", "<|tool_call_end|>", "<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>",
    "<longcat_tool_call>", "</longcat_tool_call>", "<longcat_arg_key>", MINIMAX, MINIMAX_END,
]  # fmt: skip


class Vocabulary:
    def __init__(self, directory: Path, markers: list[str], ends: tuple[str, ...] = (tiny.EOS,)) -> None:
        tiny.write(directory)
        file = directory / "tokenizer.json"
        content = json.loads(file.read_text())
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        for index, marker in enumerate(markers):
            content["added_tokens"].append({"id": tiny.VOCAB + index, "content": marker, "special": index % 2 == 0, **flags})
        file.write_text(json.dumps(content))
        self.tokenizer = Tokenizer(directory)
        ids = [id for end in ends if (id := self.tokenizer.marker_id(end)) is not None]
        self.compiler = LLGuidanceCompiler(directory, tiny.VOCAB + len(markers), ids)
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
JSON_ARGUMENTS = '[get_weather(city="Ulm", days=2)]'
LFM2_CALL = "<|tool_call_start|>{}<|tool_call_end|>"
# format, one call, two calls
WRITTEN = [
    ("hermes", HERMES, f"{HERMES}\n{HERMES}"),
    ("glm45", GLM, f"{GLM}\n{GLM}"),
    ("glm47", GLM.replace("\n", ""), (GLM * 2).replace("\n", "")),
    ("longcat", longcat(HERMES), longcat(HERMES) * 2),
    ("longcat_xml", longcat(GLM), longcat(f"{GLM}\n{GLM}")),
    ("qwen3_coder", CODER, f"{CODER}\n{CODER}"),
    ("mimo", MIMO, f"{MIMO}\n{MIMO}"),
    ("minimax_m2", f"{MINIMAX}\n{INVOKE}\n{MINIMAX_END}", f"{MINIMAX}\n{INVOKE}\n{INVOKE}\n{MINIMAX_END}"),
    ("deepseek_v3", f"{SECTION}{V3_CALL}{SECTION_END}", f"{SECTION}{V3_CALL}\n{V3_CALL}{SECTION_END}"),
    ("deepseek_v31", f"{SECTION}{V31_CALL}{SECTION_END}", f"{SECTION}{V31_CALL}{V31_CALL}{SECTION_END}"),
    ("deepseek_v32", f"{CALLS}\n{DSML}\n{CALLS_END}", f"{CALLS}\n{DSML}\n{DSML}\n{CALLS_END}"),
    ("deepseek_v4", f"<｜DSML｜tool_calls>\n{DSML}\n</｜DSML｜tool_calls>", f"<｜DSML｜tool_calls>\n{DSML}\n{DSML}\n</｜DSML｜tool_calls>"),
    ("openai", HARMONY, f"{HARMONY}<|call|>{TURN}{HARMONY}"),
    ("llama3_json", LLAMA, f"{LLAMA}; {LLAMA}"),
    ("pythonic", JSON_ARGUMENTS, f"{JSON_ARGUMENTS[:-1]}, {JSON_ARGUMENTS[1:]}"),
    ("lfm2", LFM2_CALL.format(JSON_ARGUMENTS), LFM2_CALL.format(f"{JSON_ARGUMENTS[:-1]}, {JSON_ARGUMENTS[1:]}")),
    ("gemma4", GEMMA, GEMMA * 2),
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


def test_arguments_of_python_have_their_commas_whichever_are_left_out(vocabulary: Vocabulary) -> None:
    grammar = TOOL_CALLS.get("pythonic")(TOOLS).grammar(TOOLS, False, vocabulary.spell)
    for text, good in (
        ("[now()]", True),
        ('[get_weather(city="a")]', True),
        ('[get_weather(city="a", wind=true)]', True),
        ('[get_weather(city="a", days=1, wind=true)]', True),
        ('[get_weather(city="a", wind=true, days=1)]', False),
        ('[get_weather(city="a",)]', False),
        ("[get_weather(days=1)]", False),
        ('[save(text="", tags=["a"], limit=null, place={"x": 1})]', True),
        ('[save(text="", tags=["a"], place={})]', False),
        ("[other()]", False),
    ):
        matcher = vocabulary.compiler.compile(GrammarSpec("tool_calls", grammar))
        assert vocabulary.takes(matcher, text) is good, text
    with pytest.raises(ValueError, match=r"properties\.a b cannot be"):
        TOOL_CALLS.get("lfm2")(()).grammar([Tool("f", {"properties": {"a b": {}}})], False, vocabulary.spell)


def test_what_a_gemma_must_write(vocabulary: Vocabulary) -> None:
    kinds = {"type": "object", "properties": {"kind": {"enum": ["a", "b"]}, "any": {}, "either": {"type": ["string", "null"]}}}
    tools = [*TOOLS, Tool("f", kinds)]
    grammar = TOOL_CALLS.get("gemma4")(tools).grammar(tools, False, vocabulary.spell)
    thoughts = THOUGHT.front(Opening.MAYBE, vocabulary.spell)
    quoted = '<|"|>a "b" {<|"|>'
    for text, good in (
        ("call:now{}", True),
        (f"call:get_weather{{city:{quoted}}}", True),
        (f"call:get_weather{{city:{quoted},wind:true}}", True),
        (f"call:get_weather{{city:{quoted},}}", False),
        ("call:get_weather{city:Ulm}", False),
        ("call:get_weather{days:1}", False),
        (f"call:save{{text:{quoted},tags:[{quoted},{quoted}],limit:null,place:{{x:1}}}}", True),
        (f"call:save{{text:{quoted},tags:[{quoted},1]}}", False),
        (f"call:save{{text:{quoted},tags:[],place:{{}}}}", False),
        ('call:f{kind:<|"|>b<|"|>}', True),
        ('call:f{kind:<|"|>c<|"|>}', False),
        (f"call:f{{any:{{k:[1,{quoted},{{}}]}},either:null}}", True),
        ("call:f{either:1}", False),
        ("call:other{}", False),
    ):
        for front in ("", "<|channel>thought\na < b\n<channel|>"):
            matcher = vocabulary.compiler.compile(GrammarSpec("tool_calls", grammar, thoughts))
            assert vocabulary.takes(matcher, f"{front}<|tool_call>{text}<tool_call|>") is good, text
    node = {"type": "object", "properties": {"next": {"$ref": "#/$defs/a"}}}
    recursive = node | {"$defs": {"a": node}}
    for wrong, message in (
        ({"properties": {"a:b": {}}}, r"properties\.a:b cannot be"),
        ({"properties": {"a": {"type": "string", "pattern": "x"}}}, r"properties\.a\.pattern cannot be"),
        ({"properties": {"a": {"type": "array", "minItems": 1}}}, r"properties\.a\.minItems cannot be"),
        ({"properties": {"a": {"enum": [1, "x"]}}}, r"properties\.a\.enum cannot be"),
        (recursive, "without an end"),
    ):
        with pytest.raises(ValueError, match=message):
            TOOL_CALLS.get("gemma4")(()).grammar([Tool("f", wrong)], False, vocabulary.spell)


def test_values_of_dsml_are_text_where_they_can_only_be_strings(vocabulary: Vocabulary) -> None:
    grammar = TOOL_CALLS.get("deepseek_v32")(TOOLS).grammar(TOOLS, False, vocabulary.spell)

    def takes(*values: tuple[str, str, str]) -> bool:
        tags = [f'<｜DSML｜parameter name="{key}" string="{string}">{value}</｜DSML｜parameter>\n' for key, string, value in values]
        text = f'{CALLS}\n<｜DSML｜invoke name="save">\n{"".join(tags)}</｜DSML｜invoke>\n{CALLS_END}'
        return vocabulary.takes(vocabulary.compiler.compile(GrammarSpec("tool_calls", grammar)), text)

    text, tags = ("text", "true", 'say "hi"\n</b> </'), ("tags", "false", '["a"]')
    assert takes(text, tags) and takes(text, tags, ("limit", "false", "null"), ("place", "false", '{"x": 1}'))
    assert not takes(tags) and not takes(text, ("tags", "true", '["a"]')) and not takes(text, ("tags", "false", "[1]"))


@pytest.mark.parametrize("ends", [(tiny.BOS,), (tiny.BOS, "<|call|>")])  # <|end|> is tiny's end of text
def test_what_gpt_oss_must_write(tmp_path: Path, ends: tuple[str, ...]) -> None:
    vocabulary = Vocabulary(tmp_path, MARKERS, ends)
    calls = TOOL_CALLS.get("openai")(TOOLS).grammar(TOOLS, True, vocabulary.spell)

    def takes(text: str, opening: Opening, schema: str = "", instead: str = "") -> bool:
        front, lead = CHANNELS.front(opening, vocabulary.spell), CHANNELS.lead(opening, vocabulary.spell)
        answer = GrammarSpec("json_schema", schema, front, instead, lead) if schema else GrammarSpec("tool_calls", calls, front)
        return vocabulary.takes(vocabulary.compiler.compile(answer), text)

    thoughts, final = f"so\n<|end|>{TURN}", "<|channel|>final<|message|>"
    whole = f"<|channel|>analysis<|message|>{thoughts}"
    assert takes(whole + HARMONY, Opening.MAYBE) and takes(HARMONY, Opening.MAYBE) and takes(thoughts + HARMONY, Opening.INSIDE)
    assert takes(HARMONY + "<|call|>", Opening.MAYBE) is ("<|call|>" in ends)
    assert not takes(f"{final}no", Opening.MAYBE) and not takes(HARMONY, Opening.INSIDE)
    number = '{"type": "integer"}'
    assert takes(f"{whole}{final}7", Opening.MAYBE, number) and takes(f"{final}7", Opening.MAYBE, number)
    assert takes("7", Opening.NONE, number) and not takes("7", Opening.MAYBE, number) and not takes(whole + "7", Opening.MAYBE, number)
    assert takes(whole + HARMONY, Opening.MAYBE, number, calls) and takes(f"{whole}{final}7", Opening.MAYBE, number, calls)
    assert not takes(final + HARMONY, Opening.MAYBE, number, calls)


def test_an_answer_may_stand_in_tags_behind_reasoning(vocabulary: Vocabulary) -> None:
    front, lead = ERNIE.front(Opening.INSIDE, vocabulary.spell), ERNIE.lead(Opening.INSIDE, vocabulary.spell)
    for text, good in (
        ("so</think>\n\n<response>\n7", True),
        ("so</think>7", True),
        ("<response>\n7", False),
        ("so</think><response>7", False),
    ):
        matcher = vocabulary.compiler.compile(GrammarSpec("regex", "[0-9]", front, lead=lead))
        assert vocabulary.takes(matcher, text) is good


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
