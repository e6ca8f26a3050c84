"""Random walks under the masks always end in what the grammar describes; paths leave no trace; bad grammars are named."""

from __future__ import annotations

import json
import random
import re
import resource
import threading
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from mtpserve.config import ModelConfig
from mtpserve.core.errors import EngineBusy, InvalidRequest, LoadError
from mtpserve.core.sampling import GrammarKind, GrammarSpec
from mtpserve.text.grammars import compile_threads, grammar
from mtpserve.text.grammars.grammar import GrammarMatcher, LLGuidanceCompiler
from mtpserve.text.tokenizer import Tokenizer

DEMO = ModelConfig().directory
VOCAB, EOS = 2048, json.loads((DEMO / "config.json").read_text())["eos_token_id"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(DEMO)


@pytest.fixture(scope="module")
def compiler() -> LLGuidanceCompiler:
    return LLGuidanceCompiler(DEMO, VOCAB, [EOS])


def allowed(matcher: GrammarMatcher, path: list[int]) -> list[int] | None:
    row = np.zeros(VOCAB // 32, dtype=np.int32)
    fits = matcher.masks([path], row[None])[0]
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist() if fits else None


def walk(compiler: LLGuidanceCompiler, tokenizer: Tokenizer, spec: GrammarSpec, seed: int) -> str | None:
    """None: not ended after many tokens."""
    dice, matcher, output = random.Random(seed), compiler.compile(spec), list[int]()
    for _ in range(250):
        choices = allowed(matcher, [])
        assert choices, tokenizer.decode(output)
        forced = matcher.forced([], 6)
        for place, token in enumerate(forced):
            assert token in (allowed(matcher, forced[:place]) or []), "a forced token is an allowed one"
        ahead = [[], [dice.choice(choices)], [dice.randrange(VOCAB), dice.choice(choices)], [dice.randrange(VOCAB) for _ in range(3)]]
        rows = np.zeros((len(ahead), VOCAB // 32), dtype=np.int32)
        fit, alone = matcher.masks(ahead, rows), np.zeros(VOCAB // 32, dtype=np.int32)
        assert [matcher.mask(path, alone) for path in ahead] == fit and fit[:2] == [True, True]
        assert allowed(matcher, []) == choices, "paths leave no trace"
        if EOS in choices and dice.random() < 0.5:
            assert matcher.complete
            return tokenizer.decode(output)
        # Ends and closing tokens first: random text alone would go on for ever.
        short = [token for token in choices if token != EOS and len(tokenizer.token_bytes(token)) <= 2] or choices
        token = dice.choice(short)
        if token == EOS:
            return tokenizer.decode(output)
        matcher.commit([token])
        output.append(token)
    return None


OBJECT = {"type": "object", "additionalProperties": False}
NODE = {"properties": {"v": {"enum": [1, 2]}, "next": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}}, "required": ["v", "next"]}
SCHEMAS: list[dict[str, Any]] = [
    {**OBJECT, "properties": {"a": {"type": "integer"}, "b": {"type": "boolean"}}, "required": ["a", "b"]},
    {**OBJECT, "properties": {"s": {"type": "string", "maxLength": 8}}, "required": ["s"]},
    {**OBJECT, "properties": {"s": {"type": "string", "pattern": "^[ab]{2,4}-[0-9]$"}}, "required": ["s"]},
    {"type": "array", "items": {"type": "number"}, "minItems": 1, "maxItems": 3},
    {"enum": ["red", "green", 3, None]},
    {"anyOf": [{"type": "null"}, {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}]},
    {**OBJECT, "properties": {"o": {**OBJECT, "properties": {"p": {"type": "integer"}}, "required": ["p"]}}, "required": ["o"]},
    {"$defs": {"n": {**OBJECT, **NODE}}, "$ref": "#/$defs/n"},
    {"type": "string", "minLength": 2, "maxLength": 5},
    {"type": "integer", "minimum": -3, "maximum": 12},
    {"type": "number", "minimum": 0, "maximum": 1},
    {"prefixItems": [{"type": "boolean"}, {"const": "é"}], "items": False, "minItems": 2},
    {"oneOf": [{"type": "null"}, {"type": "array", "items": {"enum": ["a", 1]}, "minItems": 2, "maxItems": 2}]},
    {**OBJECT, "patternProperties": {"^[ab]$": {"type": "boolean"}}, "maxProperties": 2},
    {"allOf": [{"type": "integer", "minimum": 5}, {"type": "integer", "maximum": 9}]},
]  # fmt: skip


@pytest.mark.parametrize("schema", SCHEMAS, ids=json.dumps)
def test_json_under_a_schema_validates(compiler: LLGuidanceCompiler, tokenizer: Tokenizer, schema: dict[str, Any]) -> None:
    ended = [walk(compiler, tokenizer, GrammarSpec("json_schema", json.dumps(schema)), seed) for seed in range(8)]
    found = [text for text in ended if text is not None]
    assert len(found) >= 4
    for text in found:
        jsonschema.validate(json.loads(text), schema)


@pytest.mark.parametrize("expression", ["[a-c]{3}-\\d{2}", "(foo|bar)+", "x?y*z", "[0-9]{4}/[0-9]{2}"])
def test_regular_expressions(compiler: LLGuidanceCompiler, tokenizer: Tokenizer, expression: str) -> None:
    for seed in range(6):
        text = walk(compiler, tokenizer, GrammarSpec("regex", expression), seed)
        assert text is None or re.fullmatch(expression, text, re.ASCII), text


@pytest.mark.parametrize(
    ("kind", "text", "wanted"),
    [
        ("choice", '["yes", "no", "may\\"be"]', 'yes|no|may"be'),
        ("choice", json.dumps(["a/b", "é😀", "\x00\x7f", "c\\d", "e\nf", "(.*)"]), "a/b|é😀|\x00\x7f|c\\\\d|e\nf|\\(\\.\\*\\)"),
        ("json_object", "", "\\{.*\\}"),
        ("ebnf", 'root ::= "x" [0-9]+ ("," [0-9]+)*', "x[0-9]+(,[0-9]+)*"),
        ("ebnf", 'start: "a" /b{1,3}/', "ab{1,3}"),
        ("structural_tag", json.dumps({"format": {"type": "sequence", "elements": [
            {"type": "const_string", "value": "hi "},
            {"type": "tag", "begin": "<t>", "content": {"type": "json_schema", "json_schema": {"type": "boolean"}}, "end": "</t>"},
        ]}}), "hi <t>(true|false)</t>"),
    ],
)  # fmt: skip
def test_other_kinds(compiler: LLGuidanceCompiler, tokenizer: Tokenizer, kind: GrammarKind, text: str, wanted: str) -> None:
    ended = [walk(compiler, tokenizer, GrammarSpec(kind, text), seed) for seed in range(6)]
    assert any(found is not None for found in ended)
    assert all(found is None or re.fullmatch(wanted, found) for found in ended), ended


def test_tags_follow_their_triggers(compiler: LLGuidanceCompiler, tokenizer: Tokenizer) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
    older = {"structures": [{"begin": "<f=x>", "schema": schema, "end": "</f>"}], "triggers": ["<f="]}
    newer = {"format": {"type": "triggered_tags", "triggers": ["<f="], "tags": [
        {"begin": "<f=x>", "content": {"type": "json_schema", "json_schema": schema}, "end": "</f>"}]}}  # fmt: skip
    for body in (older, newer):
        matcher = compiler.compile(GrammarSpec("structural_tag", json.dumps(body)))
        matcher.commit(tokenizer.encode("some text <f=", special=False))
        rest = tokenizer.encode('x>{"a": true}</f> more', special=False)
        assert matcher._take(rest) is not None
        matcher._matcher.rollback(len(rest))
        assert matcher._take(tokenizer.encode("y>", special=False)) is None


def test_paths_leave_no_trace(compiler: LLGuidanceCompiler, tokenizer: Tokenizer) -> None:
    matcher = compiler.compile(GrammarSpec("json_schema", json.dumps(SCHEMAS[0])))
    matcher.commit(tokenizer.encode('{"a', special=False))
    before = allowed(matcher, [])
    good, bad = tokenizer.encode('": 1, "', special=False), tokenizer.encode('": true', special=False)
    assert allowed(matcher, bad) is None and allowed(matcher, [EOS]) is None
    inside = allowed(matcher, good)
    assert inside and allowed(matcher, good) == inside and allowed(matcher, []) == before
    rows = np.zeros((3, VOCAB // 32), dtype=np.int32)
    assert matcher.masks([[], good, bad], rows) == [True, True, False] and (rows[2] == -1).all()
    assert matcher.forced(good, 4) and matcher.forced(bad, 4) == [] and allowed(matcher, []) == before
    other = compiler.compile(GrammarSpec("json_schema", json.dumps(SCHEMAS[0])))
    assert allowed(other, []) != before, "another request of the same grammar is somewhere else"


def test_the_end(compiler: LLGuidanceCompiler, tokenizer: Tokenizer) -> None:
    matcher = compiler.compile(GrammarSpec("choice", '["ab", "abc"]'))
    assert not matcher.complete and EOS not in (allowed(matcher, []) or [])
    matcher.commit(tokenizer.encode("ab", special=False))
    assert matcher.complete and EOS in (allowed(matcher, []) or []) and matcher.forced([], 3) == []
    assert allowed(matcher, [EOS]) == [EOS] and allowed(matcher, [EOS, EOS]) == [EOS]
    matcher.commit([EOS])
    assert allowed(matcher, []) == [EOS] and matcher.complete
    with pytest.raises(ValueError, match="does not allow"):
        matcher.commit([5])


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", '{"$ref":"#"}'),
        ("json_schema", '{"$defs":{"a":{"$ref":"#/$defs/b"},"b":{"$ref":"#/$defs/a"}},"$ref":"#/$defs/a"}'),
        ("json_schema", '{"allOf":[{"$ref":"#"}]}'), ("json_schema", '{"$ref":"http://127.0.0.1:9/x"}'), ("json_schema", '{"$ref":"file:///a"}'),
        ("json_schema", "{"), ("json_schema", "3"), ("json_schema", '{"type":"nonsense"}'), ("json_schema", '{"$ref":"#/definitions/x"}'),
        ("json_schema", '{"$ref":"#/a","a":{"$ref":"#/b"},"b":{"allOf":[{"$ref":"#/a"}]}}'),
        ("json_schema", '{"type":"string","pattern":"("}'), ("json_schema", '{"allOf":[{"type":"string"},{"type":"integer"}]}'),
        ("json_schema", '{"type":"object","propertyNames":{"pattern":"a"}}'), ("regex", "(("), ("regex", ""), ("choice", "[]"),
        ("choice", '["a",""]'), ("choice", '["\\ud800"]'), ("choice", '{"a":1}'), ("json_schema", "false"), ("ebnf", 'start ::= "a"'),
        ("json_schema", '{"type":"integer","minimum":5,"maximum":1}'), ("ebnf", "root ::= a\na ::= b\nb ::= a"), ("regex", "(?=a)b"),
        ("ebnf", "zzz"), ("ebnf", 'root ::= "a" b'), ("structural_tag", "{}"), ("structural_tag", "[]"),
        ("structural_tag", '{"format":{"type":"yaml"}}'),
        ("structural_tag", '{"structures":[{"begin":"<a>","schema":{}}],"triggers":["<b"]}'),
    ],
)  # fmt: skip
def test_bad_grammars_are_the_requests_fault(compiler: LLGuidanceCompiler, kind: GrammarKind, text: str) -> None:
    with pytest.raises(InvalidRequest, match=kind) as error:
        compiler.compile(GrammarSpec(kind, text))
    field = "response_format" if kind in ("json_object", "json_schema", "structural_tag") else kind
    assert error.value.param == field and not re.search(r"\n|backtrace|NoExtension", str(error.value))


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", json.dumps({"$ref": "#/d/0", "d": {**{str(i): {"$ref": f"#/d/{i + 1}"} for i in range(8000)}, "8000": {}}})),
        ("ebnf", "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(4000)) + 'r4000: "a"'),
        ("ebnf", "start: " + "(" * 5000 + '"a"' + ")" * 5000),
        ("regex", "(" * 5000 + "a" + ")" * 5000),
        ("regex", "a" * 70_000),
        ("json_schema", '{"items":' * 20_000 + "{}" + "}" * 20_000),
    ],
    ids=["refs", "rules", "lark", "regex", "long", "nested"],
)
def test_deep_grammars_end_no_process(compiler: LLGuidanceCompiler, kind: GrammarKind, text: str) -> None:
    try:
        matcher = compiler.compile(GrammarSpec(kind, text))
    except InvalidRequest as error:
        refused = str(error)
    else:
        refused = ""
        assert allowed(matcher, [])
    assert len(refused) < 700


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", '{"type":"integer","multipleOf":9999991}'),
        ("json_schema", '{"type":"integer","multipleOf":99.9991}'),
        ("json_schema", '{"properties":{"a":{"allOf":[{"multipleOf":997},{"multipleOf":9.91}]}}}'),
        ("json_schema", json.dumps({"anyOf": [{"type": "integer", "multipleOf": 9973, "minimum": i} for i in range(30)]})),
        (
            "json_schema",
            json.dumps({"$defs": {"m": {"multipleOf": 9973}}, "anyOf": [{"$ref": "#/$defs/m", "minimum": i} for i in range(30)]}),
        ),
        ("ebnf", 'start: %json {"type": "integer", "multipleOf": 9999991}'),
        ("ebnf", 'start: %json {"type": "integer", "\\u006dultipleOf"\n\t:\n9999991}'),
        ("structural_tag", json.dumps({"format": {"type": "json_schema", "json_schema": {"type": "integer", "multipleOf": 9999991}}})),
    ],
)
def test_numbers_that_would_fill_the_memory_are_refused_at_once(
    compiler: LLGuidanceCompiler, monkeypatch: pytest.MonkeyPatch, kind: GrammarKind, text: str
) -> None:
    """A state for each remainder, in a thread that no deadline ends: gigabytes a minute."""
    monkeypatch.setattr(grammar, "LLMatcher", lambda *_, **__: pytest.fail("it was compiled"))
    with pytest.raises(InvalidRequest, match="too many remainders"):
        compiler.compile(GrammarSpec(kind, text))


@pytest.mark.parametrize("step", [5, 0.01, 86400, 10**6, 1e-7])
def test_multiples_that_people_ask_for(compiler: LLGuidanceCompiler, step: float) -> None:
    fields = {name: {"type": "number", "multipleOf": step} for name in "ab"}
    assert allowed(compiler.compile(GrammarSpec("json_schema", json.dumps({"type": "object", "properties": fields}))), [])


def resident() -> int:
    """In bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_a_thousand_grammars_leave_nothing_behind(compiler: LLGuidanceCompiler) -> None:
    """No cache, and so none that grows; kept, they would take a hundred megabytes."""
    start = 0
    for number in range(1100):
        names = [f"f{number}_{i}" for i in range(12)]
        schema = {**OBJECT, "properties": {name: {"type": ["string", "integer", "boolean"]} for name in names}, "required": names}
        compiler.compile(GrammarSpec("json_schema", json.dumps(schema)))
        start = resident() if number == 100 else start
    assert resident() - start < 40 << 20


def test_a_grammar_that_compiles_too_long_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(compile_threads, "COMPILE_SECONDS", 0.05)
    monkeypatch.setattr(LLGuidanceCompiler, "_matcher", lambda self, spec: release.wait(30) and "given up")
    compiler = LLGuidanceCompiler(DEMO, VOCAB, [EOS])
    for _ in range(compile_threads.MAX_ABANDONED):
        with pytest.raises(InvalidRequest, match="longer than"):
            compiler.compile(GrammarSpec("regex", "a"))
    with pytest.raises(EngineBusy):
        compiler.compile(GrammarSpec("regex", "a"))
    release.set()
    for thread in compiler._threads.abandoned:
        thread.join(10)
    with pytest.raises(InvalidRequest, match="given up"):
        compiler.compile(GrammarSpec("regex", "a"))


def test_a_grammar_beyond_the_limits_ends_its_text_and_raises_nothing(compiler: LLGuidanceCompiler) -> None:
    spec = GrammarSpec("regex", "((a{1,1000}){1,1000}){1,1000}")
    matcher, other, token = compiler.compile(spec), compiler.compile(spec), 0
    for _ in range(200):
        token = max(choice for choice in allowed(matcher, []) or [])
        if matcher.failure:
            break
        matcher.commit([token])
    assert matcher.failure and "\n" not in matcher.failure and not matcher.complete
    assert allowed(matcher, []) == [EOS] and allowed(matcher, [5]) is None and matcher.forced([], 4) == []
    matcher.commit([5])
    matcher.commit([EOS])
    assert other.failure is None and len(allowed(other, []) or []) >= 1, "limits are each request's own"


def test_many_choices(compiler: LLGuidanceCompiler, tokenizer: Tokenizer) -> None:
    matcher = compiler.compile(GrammarSpec("choice", json.dumps([f"w{i} word" for i in range(5000)])))
    matcher.commit(tokenizer.encode("w4321 word", special=False))
    assert matcher.complete and allowed(matcher, []) == [EOS]


def test_ids_behind_the_tokenizers_are_never_allowed() -> None:
    wide, row = LLGuidanceCompiler(DEMO, VOCAB + 70, [EOS, 0]), np.full(67, -1, dtype=np.int32)
    matcher = wide.compile(GrammarSpec("regex", "(.|\n)*"))
    assert matcher.mask([], row)
    found = set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())
    assert max(found) < VOCAB and {EOS, 0} <= found
    with pytest.raises(LoadError, match=r"tokenizer\.json"):
        LLGuidanceCompiler(DEMO / "nowhere", VOCAB, [EOS])


def test_grammar_needs_no_torch() -> None:
    import subprocess
    import sys

    code = "import sys, mtpserve.text.grammars.grammar; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
