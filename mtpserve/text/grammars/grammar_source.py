"""Translates the grammars that clients send into llguidance's language. Errors in them may show only when
they are compiled."""

from __future__ import annotations

import json
import math
import re
from decimal import Decimal
from typing import Any

from llguidance import LLMatcher, regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark

from mtpserve.core.sampling import GrammarSpec
from mtpserve.text.grammars.json_schema import JSON_LAYOUT, without_annotations
from mtpserve.text.grammars.structural import structural_grammar

BLANK = r"(?:\s|\\+[nrt])*"  # in a JSON string inside JSON, line breaks are escaped
MULTIPLE = re.compile(rf'multipleOf\\*"{BLANK}:{BLANK}([0-9][0-9.eE+-]*)')
ESCAPE = re.compile(r"\\u([0-9a-fA-F]{4})")
MAX_REMAINDERS = 200_000  # compile in about two seconds and a hundred megabytes
IS_GBNF = re.compile(r"^\s*[\w-]+\s*::=", re.MULTILINE)  # Lark's rules have one colon


def source(spec: GrammarSpec) -> str:
    """Raises ValueError, and any error of llguidance's converters."""
    grammar = around(spec, body(spec)) if spec.front or spec.instead or spec.lead else body(spec)
    check_multiples(grammar)
    return grammar


def check_multiples(grammar: str) -> None:
    """Raises ValueError for `multipleOf` numbers that need too many states. llguidance makes one state per
    remainder; for several numbers, one per remainder of their least common multiple; and these again for each
    `$ref`. Its own limits do not bound them. Trailing zeros add no states."""
    plain = ESCAPE.sub(lambda match: chr(int(match[1], 16)), grammar)
    multiples = MULTIPLE.findall(plain)
    together, places = 1, len(multiples) + plain.count("$ref")
    for number in multiples:
        together = math.lcm(together, int("".join(map(str, Decimal(number).normalize().as_tuple().digits))))
        if together * places > MAX_REMAINDERS:
            raise ValueError(f"multipleOf {number} leaves too many remainders, alone or together with others")


def around(spec: GrammarSpec, grammar: str) -> str:
    """The grammar with the spec's `front` and `lead` before it, and its `instead` as an alternative to it."""
    first, *others = (
        json.loads(grammar)["grammars"] if grammar.startswith("{") else [{"lark_grammar": grammar}]
    )
    start = (
        f"start: {'front' if spec.front else ''} ({'calls | ' if spec.instead else ''}{spec.lead} "
        f"@body)\n{spec.front}{spec.instead}"
    )
    return json.dumps(
        {"grammars": [{"lark_grammar": start}, {**first, "name": "body"}, *others]}, ensure_ascii=False
    )


def body(spec: GrammarSpec) -> str:
    if spec.kind == "tool_calls":
        return LLMatcher.grammar_from_lark(f"start: calls\n{spec.text}")
    if spec.kind == "json_object":
        return json_grammar({"type": "object"})
    if spec.kind == "json_schema":
        schema = json.loads(spec.text)
        if not isinstance(schema, dict | bool):
            raise ValueError(f"a schema is an object, got {spec.text[:50]}")
        if schema is False:
            raise ValueError("nothing fits it")
        return json_grammar(schema if isinstance(schema, dict) else {})
    if spec.kind == "choice":
        choices = json.loads(spec.text)
        if (
            not isinstance(choices, list)
            or not choices
            or not all(isinstance(choice, str) and choice for choice in choices)
        ):
            raise ValueError("choices are a list of strings, none of them empty, at least one")
        # One terminal, not one rule per choice: two thousand rules exceed the parser's limits. Escaped for
        # Lark and for the regex.
        return LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: /" + "|".join(map(literal, choices)) + "/")
    if spec.kind == "structural_tag":
        return structural_grammar(json.loads(spec.text))
    if not spec.text.strip():
        raise ValueError("it is empty")
    if spec.kind == "regex":
        # \d is an ASCII digit, as clients expect.
        return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(spec.text, use_ascii='d')}/")
    return LLMatcher.grammar_from_lark(gbnf_to_lark(spec.text) if IS_GBNF.search(spec.text) else spec.text)


def literal(text: str) -> str:
    """A regular expression that matches `text`."""
    return "".join(
        letter if letter.isascii() and letter.isalnum() else f"\\x{{{ord(letter):x}}}" for letter in text
    )


def json_grammar(schema: dict[str, Any]) -> str:
    return LLMatcher.grammar_from_json_schema(without_annotations(schema), overrides=JSON_LAYOUT)
