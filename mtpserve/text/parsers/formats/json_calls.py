"""Calls as JSON objects {"name": …, "arguments": {…}}: Hermes and Qwen, Llama 3, Mistral, and the plain list
where no format is named.

The formats differ in the text around the objects. Sources: the chat templates of Qwen2.5, Qwen3 and Granite
4.0 (Hermes' format), of Llama-3.1-Instruct, of Mistral-7B-Instruct-v0.3 (lists) and Mistral-Small-3.2
(`[TOOL_CALLS]name[ARGS]{…}`).
"""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Sequence

from mtpserve.text.parsers.call_grammar import arguments_json, calls_of, text
from mtpserve.text.parsers.scanner import Reading, Scanner
from mtpserve.text.parsers.tools import EXAMPLE, CallFormat, Spell, Tool, in_name

ARGUMENTS = ("arguments", "parameters")
# keys that may come before the name in a call without a marker
HEAD = ("name", "type", "id", "function", *ARGUMENTS)


class Object:
    """Reads one object. `names`: without a marker before it, the object is a call only if it has one of these
    names."""

    def __init__(
        self, scan: Scanner, *, stop: str = "", names: frozenset[str] | None = None, id: str | None = None
    ) -> None:
        self._scan, self._stop, self._tool_names, self._id = scan, stop, names, id
        self._name: str | None = None
        self._held: list[str] | None = None  # arguments that came before the name
        self._begun = False

    def read(self) -> Reading[bool]:
        """→ whether it was a call. If so its CallBegin was emitted and its CallEnd was not."""
        closed = yield from self._members()
        if not self._begun and self._name is not None and closed:
            self._begin()
            self._scan.arguments("{}" if self._held is None else "".join(self._held))
        return self._begun

    def _members(self) -> Reading[bool]:
        """Reads an object → whether it was well-formed to its end."""
        if not (yield from self._scan.follows("{")):
            return False
        while (yield from self._member()):
            separator = yield from self._scan.follows(",", "}")
            if separator != ",":
                return separator == "}"
        return False

    def _member(self) -> Reading[bool]:
        """Reads one key and its value → whether they were well-formed."""
        scan = self._scan
        yield from scan.blanks()
        if (yield from scan.peek()) != '"':
            return False
        key = yield from scan.json_string()
        if key is None or (self._tool_names is not None and self._name is None and key not in HEAD):
            return False
        if not (yield from scan.follows(":")):
            return False
        yield from scan.blanks()
        first = yield from scan.peek()
        if key == "name" and self._name is None:
            self._name = (yield from scan.json_string()) if first == '"' else None
            return bool(self._name) and (self._tool_names is None or self._name in self._tool_names)
        if key == "function" and self._name is None and first == "{":  # OpenAI's layout of a call
            return (yield from self._members())
        if key in ARGUMENTS and not self._begun and self._held is None and first != "n":  # null: no arguments
            return (yield from self._arguments(first))
        return (yield from scan.json_value(lambda _: None, self._stop))

    def _arguments(self, first: str) -> Reading[bool]:
        if first == '"':
            written = yield from self._scan.json_string()
            self._held = None if written is None or not is_object(written) else [written]
            return self._held is not None
        if first != "{":
            return False
        if self._name is not None:
            self._begin()
            return (yield from self._scan.json_value(self._scan.arguments, self._stop))
        self._held = []
        return (yield from self._scan.json_value(self._held.append, self._stop))

    def _begin(self) -> None:
        assert self._name is not None
        self._scan.begin(self._name, self._id)
        self._begun = True


def is_object(written: str) -> bool:
    try:
        return isinstance(json.loads(written, strict=False), dict)
    except (ValueError, RecursionError):
        return False


def object_grammar(tool: Tool, arguments: str) -> str:
    head = text('{"name": "' + tool.name + '", "' + arguments + '": ')
    return f"{head} {arguments_json(tool.parameters)} {text('}')}"


class Hermes(CallFormat):
    markers: tuple[str, ...] = ("<tool_call>",)
    END = "</tool_call>"
    BETWEEN = "\n"  # two calls
    example = f"<tool_call>\n{EXAMPLE}\n</tool_call>"

    def read(self, scan: Scanner, marker: str) -> Reading[None]:
        """One object, or several, in a list or not."""
        scan.take(len(marker))
        yield from scan.follows("[")
        while (yield from Object(scan, stop=self.END).read()):
            yield from scan.follows(",", "]", "}")  # models sometimes write one "}" too many
            ended = yield from scan.follows(self.END)
            scan.end()
            if ended:
                return

    def grammar(self, tools: Sequence[Tool], several: bool, spell: Spell) -> str:
        begin, end, line = spell(self.markers[0]), spell(self.END), text("\n")
        calls = [f"{begin} {line} {object_grammar(tool, 'arguments')} {line} {end}" for tool in tools]
        return calls_of(calls, several, between=text(self.BETWEEN))


class Longcat(Hermes):
    """LongCat-Flash's: the tags have other names (the model card's *ToolCall*)."""

    markers = ("<longcat_tool_call>",)
    END = "</longcat_tool_call>"
    BETWEEN = ""
    example = f"<longcat_tool_call>\n{EXAMPLE}\n</longcat_tool_call>"


class Llama3(CallFormat):
    """An object with a tool's name, anywhere in the text; several are separated by semicolons, or are a
    list."""

    TAG = "<|python_tag|>"
    markers: tuple[str, ...] = (TAG, "{", "[")
    example = EXAMPLE.replace("arguments", "parameters", 1)

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._tool_names = frozenset(tool.name for tool in tools)

    def read(self, scan: Scanner, marker: str) -> Reading[None]:
        if marker == self.TAG:
            scan.take(len(marker))
        listed = bool((yield from scan.follows("[")))
        while (yield from Object(scan, names=self._tool_names).read()):
            scan.end()
            separator = yield from scan.follows(";", ",", *(["]"] if listed else []))
            if separator == "]":
                scan.layout()
            if separator in ("]", ""):
                return

    def grammar(self, tools: Sequence[Tool], several: bool, spell: Spell) -> str:
        return calls_of([object_grammar(tool, "parameters") for tool in tools], several, between=text("; "))


class Listed(CallFormat):
    """A list of objects and nothing else: the format that is asked of a model when none is configured."""

    markers: tuple[str, ...] = ("[",)
    example = f"[{EXAMPLE}]"

    def new_id(self) -> str | None:
        return None

    def read(self, scan: Scanner, marker: str) -> Reading[None]:
        scan.take(len(marker))
        yield from self.read_list(scan)

    def read_list(self, scan: Scanner) -> Reading[None]:
        """Called after the opening bracket was taken."""
        while (yield from Object(scan, id=self.new_id()).read()):
            scan.end()
            separator = yield from scan.follows(",", "]")
            if separator == "]":
                scan.layout()
            if separator != ",":
                return

    def grammar(self, tools: Sequence[Tool], several: bool, spell: Spell) -> str:
        calls = [object_grammar(tool, "arguments") for tool in tools]
        return calls_of(calls, several, begin=text("["), between=text(", "), end=text("]"))


class Mistral(Listed):
    TAG, ARGS, ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
    markers = (TAG,)
    example = f"{TAG}[{EXAMPLE}]"

    def new_id(self) -> str:
        """Nine letters and digits, which Mistral's chat templates require."""
        return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))

    def read(self, scan: Scanner, marker: str) -> Reading[None]:
        scan.take(len(marker))
        if (yield from scan.follows("[")):
            yield from self.read_list(scan)
            return
        yield from scan.blanks()
        if (yield from scan.peek()) == "{":
            if (yield from Object(scan, id=self.new_id()).read()):
                scan.end()
            return
        name = yield from scan.while_in(in_name)
        if (yield from scan.follows(self.ID)):
            yield from scan.while_in(str.isalnum)
        yield from scan.follows(self.ARGS)
        yield from scan.blanks()
        if name and (yield from scan.peek()) == "{":
            scan.begin(name, self.new_id())
            yield from scan.json_value(scan.arguments, self.TAG)
            scan.end()

    def grammar(self, tools: Sequence[Tool], several: bool, spell: Spell) -> str:
        tag, args = spell(self.TAG), spell(self.ARGS)
        if args == text(self.ARGS):  # a model whose vocabulary lacks this token writes lists
            calls = [object_grammar(tool, "arguments") for tool in tools]
            return calls_of(calls, several, begin=f"{tag} {text('[')}", between=text(", "), end=text("]"))
        return calls_of(
            [f"{tag} {text(tool.name)} {args} {arguments_json(tool.parameters)}" for tool in tools], several
        )
