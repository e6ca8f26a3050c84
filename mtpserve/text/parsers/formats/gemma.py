"""Gemma 4's calls, objects without quotes around keys and with a token around strings, and its reasoning on a
channel:

    <|channel>thought
    reasoning<channel|>answer
    <|tool_call>call:NAME{key:<|"|>text<|"|>,other:[1,true,{key:null}]}<tool_call|>

A string is passed on while it arrives, and has no escapes. Source: the chat template of
google/gemma-4-31B-it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence, Set as AbstractSet
from dataclasses import dataclass
from typing import Any

from mtpserve.text.parsers.call_grammar import arguments_json, calls_of, text, up_to
from mtpserve.text.parsers.formats.tagged_values import (
    NOT_IN_TEXT,
    as_json,
    inside_string,
    resolved,
    types_of,
)
from mtpserve.text.parsers.reasoning import BLANK_LINES, Opening, Thinking
from mtpserve.text.parsers.scanner import Reading, Scanner
from mtpserve.text.parsers.tools import CallFormat, NotEnforceable, Schema, Spell, Tool, in_name

CALL, CALL_END, QUOTE = "<|tool_call>", "<tool_call|>", '<|"|>'
CHANNEL, CHANNEL_END = "<|channel>", "<channel|>"
MAX_DEPTH = 64  # nested brackets
PLAIN = {"number", "integer", "boolean", "null"}  # types whose values are written as in JSON
KEY = r'[^:{}\[\],<"]'  # a character of one
# cannot be enforced here
NOT_IN_LISTS = ("minItems", "maxItems", "uniqueItems", "prefixItems", "contains")
NOT_IN_OBJECTS = ("minProperties", "maxProperties", "patternProperties", "propertyNames")


class Gemma4(CallFormat):
    markers: tuple[str, ...] = (CALL,)
    tokens = (CALL, CALL_END, QUOTE)
    example = f"{CALL}call:tool_call_name{{key:{QUOTE}value{QUOTE}}}{CALL_END}"

    def read(self, scan: Scanner, marker: str) -> Reading[None]:
        scan.take(len(marker))
        if not (yield from scan.follows("call:")):
            return
        yield from scan.blanks()
        name = yield from scan.while_in(in_name)
        if not name or not (yield from scan.follows("{")):
            return
        scan.begin(name)
        if (yield from read_object(scan, 1)):
            yield from scan.follows(CALL_END)
        scan.end()

    def grammar(self, tools: Sequence[Tool], several: bool, spell: Spell) -> str:
        rules = Rules(spell)
        calls = [
            f"{spell(CALL)} {text(f'call:{tool.name}')} {rules.object(tool.parameters, tool.parameters, ())} "
            f"{spell(CALL_END)}"
            for tool in tools
        ]
        return calls_of(calls, several, rules="".join(rules.written))


def read_object(scan: Scanner, depth: int) -> Reading[bool]:
    """Reads an object whose opening bracket was taken → whether it has an end."""
    lead = "{"
    while not (yield from scan.follows("}")):
        if (yield from scan.follows(QUOTE)):
            parts: list[str] = []
            if not (yield from scan.until((QUOTE,), parts.append)):
                return False
            scan.take(len(QUOTE))
            key = "".join(parts)
        else:
            yield from scan.blanks()
            key = (yield from scan.while_in(lambda character: re.match(KEY, character) is not None)).strip()
        if not (yield from scan.follows(":")):
            return False
        scan.arguments(f"{lead}{json.dumps(key, ensure_ascii=False)}: ")
        if not (yield from read_value(scan, depth)):
            return False
        lead = ", "
        yield from scan.follows(",")
    scan.arguments("{}" if lead == "{" else "}")
    return True


def read_value(scan: Scanner, depth: int) -> Reading[bool]:
    opening = yield from scan.follows(QUOTE, "{", "[")
    if opening in ("{", "[") and depth >= MAX_DEPTH:
        return False
    if opening == "{":
        return (yield from read_object(scan, depth + 1))
    if opening == "[":
        return (yield from read_list(scan, depth + 1))
    if not opening:
        written = yield from scan.while_in(lambda character: character not in ",}]")
        if scan.ended and not scan.text:
            return False
        scan.arguments(as_json(written.strip(), None))
        return True
    scan.arguments('"')
    if not (yield from scan.until((QUOTE,), lambda piece: scan.arguments(inside_string(piece)))):
        return False
    scan.take(len(QUOTE))
    scan.arguments('"')
    return True


def read_list(scan: Scanner, depth: int) -> Reading[bool]:
    """Reads a list as `read_object` reads an object."""
    lead = "["
    while not (yield from scan.follows("]")):
        scan.arguments(lead)
        if not (yield from read_value(scan, depth)):
            return False
        lead = ", "
        yield from scan.follows(",")
    scan.arguments("[]" if lead == "[" else "]")
    return True


class Rules:
    """Grammar rules for values, from their schemas, as they are `written`. Numbers, truth values and null are
    JSON; of values that may have several types only these are enforced."""

    def __init__(self, spell: Spell) -> None:
        self.quote, self.written, self._number = spell(QUOTE), [up_to("quoted", QUOTE, spell)], 0
        self.written += [
            "any_value: " + self.of_types({*PLAIN, "string", "array", "object"}) + "\n",
            'any_list: "[" (any_value ("," any_value)*)? "]"\n',
            'any_object: "{" (any_pair ("," any_pair)*)? "}"\n',
            f'any_pair: /{KEY}+/ ":" any_value\n',
        ]

    def new(self, *alternatives: str) -> str:
        """Returns the name of a new rule."""
        self._number += 1
        self.written.append(f"value_{self._number}: {' | '.join(alternatives)}\n")
        return f"value_{self._number}"

    def value(self, schema: Any, root: Schema, path: tuple[str, ...]) -> str:
        """Returns an expression for a value of this schema. Raises NotEnforceable."""
        schema, types = resolved(schema, root), types_of(schema, root)
        schema = schema if isinstance(schema, Mapping) else {}
        if types and types <= PLAIN:
            definitions = {word: root[word] for word in ("$defs", "definitions") if word in root}
            return self.new(arguments_json({**schema, **definitions}))
        match sorted(types):
            case ["string"]:
                return self.string(schema, path)
            case ["object"]:
                return self.object(schema, root, path)
            case ["array"]:
                refuse(schema, NOT_IN_LISTS, path)
                item = self.value(schema.get("items"), root, (*path, "items"))
                return f'"[" ({item} ("," {item})*)? "]"'
        refuse(schema, ("enum", "const"), path)
        return self.of_types(types) if types else "any_value"

    def of_types(self, types: AbstractSet[str]) -> str:
        parts = {"string": f"{self.quote} quoted", "array": "any_list", "object": "any_object"}
        plain = sorted(types & PLAIN)
        json_values = [self.new(arguments_json({"type": plain}))] if plain else []
        return f"({' | '.join([*json_values, *(parts[name] for name in sorted(types - PLAIN))])})"

    def string(self, schema: Schema, path: tuple[str, ...]) -> str:
        choices = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(choices, list):
            return f"{self.quote} ({' | '.join(text(str(choice)) for choice in choices)}) {self.quote}"
        refuse(schema, NOT_IN_TEXT, path)
        return f"{self.quote} quoted"

    def object(self, schema: Schema, root: Schema, path: tuple[str, ...]) -> str:
        """Properties come in the order of the schema. Only an object without any has keys of its own, and the
        arguments of a call have none."""
        if len(path) > MAX_DEPTH:
            raise NotEnforceable(path[:4], "objects are nested too deep, or without an end")
        properties, required = schema.get("properties"), schema.get("required")
        keys = list(properties) if isinstance(properties, Mapping) else []
        needed = required if isinstance(required, list) else []
        keys += [key for key in needed if key not in keys]
        refuse(schema, NOT_IN_OBJECTS, path)
        if not keys and path and schema.get("additionalProperties") is not False:
            return "any_object"
        # what follows where no property was written yet, and where one was
        first = later = text("}")
        for key in reversed(keys):
            here = (*path, "properties", key)
            if re.fullmatch(f"{KEY}+", key) is None:
                raise NotEnforceable(here, "it is no key in this model's tool call format: rename it")
            property = properties.get(key) if isinstance(properties, Mapping) else None
            pair = self.new(f"{text(key + ':')} {self.value(property, root, here)}")
            skipped = ([], []) if key in needed else ([first], [later])
            first, later = (
                self.new(f"{pair} {later}", *skipped[0]),
                self.new(f'"," {pair} {later}', *skipped[1]),
            )
        return f"{text('{')} {first}"


def refuse(schema: Schema, words: Sequence[str], path: tuple[str, ...]) -> None:
    for word in words:
        if word in schema:
            raise NotEnforceable(
                (*path, word), "this model's tool call format has no grammar for it: leave it out"
            )


@dataclass(frozen=True, slots=True)
class Channel(Thinking):
    """Reasoning on a channel, whose name is text after a token."""

    @property
    def tokens(self) -> tuple[str, ...]:
        return CHANNEL, CHANNEL_END

    def front(self, opening: Opening, spell: Spell) -> str:
        if opening is Opening.NONE:
            return ""
        begin = f"{spell(CHANNEL)} {text(self.start.removeprefix(CHANNEL))}"
        whole = f"{begin} thoughts {BLANK_LINES}"
        optional = f"({begin})? thoughts {BLANK_LINES}" if opening is Opening.INSIDE else f"({whole})?"
        return f"front: {optional}\n{up_to('thoughts', self.end, spell)}"


THOUGHT = Channel(always=False, start=f"{CHANNEL}thought", end=CHANNEL_END)
