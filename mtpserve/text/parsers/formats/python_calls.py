"""Calls as a list of Python's: `[name(key='value', other=[1, None])]`, as Llama 3.2, Llama 4, ToolACE and
LFM2 write them.

Values are literals, read by Python's own parser and never run; one that is none is a string. An argument is
passed on when it is complete. Sources: Meta's prompt formats of Llama 3.2 and 4 (`<|python_start|>`), the
documentation of LFM2's tool use.
"""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from mtpserve.text.parsers.call_grammar import arguments_json, calls_of, text
from mtpserve.text.parsers.formats.json_calls import Object
from mtpserve.text.parsers.formats.tagged_values import property_of, refuse, resolved
from mtpserve.text.parsers.scanner import Reading, Scanner
from mtpserve.text.parsers.tools import CallFormat, NotEnforceable, Schema, Spell, Tool, in_name

NAMES = {"true": True, "false": False, "null": None}  # JSON's, which models mix with Python's
OPENING, CLOSING, QUOTES = "([{", ")]}", "'\""
LINES = {"\n": "\\n", "\r": "\\r"}  # as models write them inside of quotes, where Python has none
MAX_DEPTH = 64  # nested brackets


class Pythonic(CallFormat):
    """A list that begins with one of the tools' names and a bracket, anywhere in the text."""

    START, END = "<|python_start|>", "<|python_end|>"
    markers: tuple[str, ...] = (START, "[")
    example = "[tool_call_name(key='value')]"
    layouts: tuple[str, ...] = ('[tool_call_name(key="value")]',)

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._tool_names = frozenset(tool.name for tool in tools)

    def read(self, scan: Scanner, marker: str) -> Reading[None]:
        if marker == self.START:
            scan.take(len(marker))
        yield from scan.follows("[")
        while (yield from self.call(scan)):
            separator = yield from scan.follows(",", "]", self.END)
            if separator == "]":
                separator = (yield from scan.follows(self.END)) or separator
            if separator in ("]", self.END):
                scan.layout()
            if separator != ",":
                return

    def call(self, scan: Scanner) -> Reading[bool]:
        """Reads one call → whether it was one, to its end."""
        yield from scan.blanks()
        name = yield from scan.while_in(in_name)
        if not self.is_name(name) or (yield from scan.peek()) != "(":
            return False
        scan.take(1)
        scan.begin(name)
        closed = yield from arguments(scan)
        scan.end()
        return closed

    def is_name(self, name: str) -> bool:
        return name in self._tool_names

    def grammar(self, tools: Sequence[Tool], several: bool, spell: Spell) -> str:
        return calls_in(tools, several, text("["), text("]"))


class LFM2(Pythonic):
    """Python calls between tokens of its own. Objects may be JSON there, too, which its system prompt may ask
    for."""

    START, END = "<|tool_call_start|>", "<|tool_call_end|>"
    markers = (START,)
    example = f"{START}[tool_call_name(key='value')]{END}"
    layouts = (f'{START}[tool_call_name(key="value")]{END}',)

    def call(self, scan: Scanner) -> Reading[bool]:
        yield from scan.blanks()
        if (yield from scan.peek()) != "{":
            return (yield from Pythonic.call(self, scan))
        called = yield from Object(scan, stop=self.END).read()
        if called:
            scan.end()
        return called

    def is_name(self, name: str) -> bool:
        return bool(name)

    def grammar(self, tools: Sequence[Tool], several: bool, spell: Spell) -> str:
        return calls_in(tools, several, f"{spell(self.START)} {text('[')}", f"{text(']')} {spell(self.END)}")


def calls_in(tools: Sequence[Tool], several: bool, begin: str, end: str) -> str:
    calls, rules = [], ""
    for number, tool in enumerate(tools):
        calls.append(f"{text(tool.name + '(')} arguments_{number}_0 {text(')')}")
        rules += "".join(argument_rules(tool.parameters, f"arguments_{number}"))
    return calls_of(calls, several, begin=begin, between=text(", "), end=end, rules=rules)


def argument_rules(schema: Schema, name: str) -> list[str]:
    """Rules `name`_i: the properties from i on, in their order, where none was written yet; `name`_i_more:
    where one was. Values are JSON, which the reader takes."""
    properties, required = schema.get("properties"), schema.get("required")
    keys = list(properties) if isinstance(properties, Mapping) else []
    needed = required if isinstance(required, list) else []
    keys += [key for key in needed if key not in keys]
    definitions = {word: schema[word] for word in ("$defs", "definitions") if word in schema}
    rules = [f'{name}_{len(keys)}: ""\n', f'{name}_{len(keys)}_more: ""\n']
    for place, key in enumerate(keys):
        if not all(map(in_key, key)) or not key:
            raise NotEnforceable(
                ("properties", key), "it is no argument's name in this model's tool call format: rename it"
            )
        value = resolved(property_of(key, schema), schema)
        value = {**value, **definitions} if isinstance(value, Mapping) else {}
        rest, skipped = f"{name}_{place + 1}_more", "" if key in needed else f" | {name}_{place + 1}"
        rules.append(f"{name}_{place}_value: {text(key + '=')} {arguments_json(value)} {rest}\n")
        rules.append(f"{name}_{place}: {name}_{place}_value{skipped}\n")
        rules.append(
            f"{name}_{place}_more: {text(', ')} {name}_{place}_value{'' if key in needed else f' | {rest}'}\n"
        )
    return rules


def in_key(character: str) -> bool:
    return character.isalnum() or character in "_-.$:/@"


def arguments(scan: Scanner) -> Reading[bool]:
    """`key=value` pairs up to the closing bracket, which is taken → whether there was one. What comes before
    an error is passed on."""
    lead = "{"
    while not (yield from scan.follows(")")):
        yield from scan.blanks()
        key = yield from scan.while_in(in_key)
        if not key or not (yield from scan.follows("=")):
            return False
        written = yield from literal(scan)
        if written is None:
            return False
        scan.arguments(f"{lead}{json.dumps(key, ensure_ascii=False)}: {as_json(written)}")
        lead = ", "
        yield from scan.follows(",")
    scan.arguments("{}" if lead == "{" else "}")
    return True


def literal(scan: Scanner) -> Reading[str | None]:
    """Takes the text of a value up to the comma or bracket after it, with line breaks inside of quotes
    escaped; None: it has no end."""
    written, open = "", ""
    while next := (yield from scan.peek()):
        if not open and next in ",)":
            return written.strip() or None
        if next in QUOTES:
            quoted = yield from string(scan)
            if quoted is None:
                return None
            written += quoted
            continue
        if next in OPENING:
            open += CLOSING[OPENING.index(next)]
        elif next in CLOSING:
            if not open.endswith(next):
                return None
            open = open[:-1]
        if len(open) > MAX_DEPTH:
            return None
        written += scan.take(1)
    return None


def string(scan: Scanner) -> Reading[str | None]:
    """Takes a string whose opening quote comes next, of one quote or three → as Python writes it; None: it
    has no end."""
    quote = scan.take(1)
    if (yield from scan.peek()) == quote:
        scan.take(1)
        if (yield from scan.peek()) != quote:
            return quote * 2
        scan.take(1)
        quote *= 3
    written, closing = quote, 0  # how many quotes came in a row
    while next := (yield from scan.peek()):
        scan.take(1)
        if next == "\\":
            following = yield from scan.peek()
            written += next + scan.take(1) if following not in LINES else "\\\\"
            closing = 0
            continue
        written += next if len(quote) == 3 else LINES.get(next, next)
        closing = closing + 1 if next == quote[0] else 0
        if closing == len(quote):
            return written
    return None


def as_json(written: str) -> str:
    """JSON stays as it is, a Python literal becomes JSON, and what is neither a string."""
    try:
        json.loads(written, parse_constant=refuse)
    except (ValueError, RecursionError):
        return from_python(written)
    return written


def from_python(written: str) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # escapes that Python does not know stay as they are
            parsed = ast.parse(written, mode="eval")
        value = json.dumps(plain(parsed.body), ensure_ascii=False, allow_nan=False)
        value.encode()  # fails for half a surrogate pair, which is not a character
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        value = json.dumps(written, ensure_ascii=False)
    return value


def plain(node: ast.expr) -> Any:
    """The value of a literal's syntax tree. Raises ValueError for anything else."""
    match node:
        case ast.Constant(value=str() | int() | float() | None as value):
            return value
        case ast.Name(id=name) if name in NAMES:
            return NAMES[name]
        case ast.List(elts=parts) | ast.Tuple(elts=parts) | ast.Set(elts=parts):
            return [plain(part) for part in parts]
        case ast.Dict(keys=keys, values=values):
            return {named(key): plain(value) for key, value in zip(keys, values, strict=True)}
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.UnaryOp(op=ast.UAdd(), operand=ast.Constant(value=int() | float() as value)):
            return value
        case _:
            raise ValueError("no literal")


def named(key: ast.expr | None) -> str:
    """JSON's objects have texts as keys; one that is not is written as JSON."""
    value = plain(key) if key is not None else None
    if key is None or isinstance(value, list | dict):
        raise ValueError("no key")
    return value if isinstance(value, str) else json.dumps(value)
