"""The tools of a request, and the interface of a tool call format."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mtpserve.text.grammars.json_schema import Path, dotted
from mtpserve.text.parsers.scanner import Reading, Scanner

Schema = Mapping[str, Any]
Spell = Callable[[str], str]  # a piece of text → a Lark expression: a token of the vocabulary, or characters

ALL = "tool_call_arguments"
EXAMPLE = f'{{"name": "tool_call_name", "arguments": {ALL}}}'
MORE = "{{additional_tool_calls}}"  # the place of further calls in an example


class NotEnforceable(ValueError):
    """A word of a tool's parameters, at `path`, that a format of calls cannot enforce."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{dotted(path)[1:]} cannot be enforced: {reason}")
        self.path, self.reason = path, reason


@dataclass(frozen=True, slots=True)
class Tool:
    name: str
    parameters: Schema = field(default_factory=dict)  # JSON schema of an object


class CallFormat(ABC):
    """A format in which a family of models writes calls. Its only state is the tools of one request."""

    markers: tuple[str, ...]  # texts with which calls begin; see Scanner.until
    # tokens of their own in the vocabularies of models that write so, where the markers are not
    tokens: tuple[str, ...] = ()
    example: str  # a call of tool_call_name with tool_call_arguments, for the instructions to a model
    layouts: tuple[str, ...] = ()  # the same as other templates of such models write it

    def __init__(self, tools: Sequence[Tool]) -> None:  # noqa: B027
        """Takes the tools, although most formats are read without them."""

    @abstractmethod
    def read(self, scan: Scanner, marker: str) -> Reading[None]:
        """`marker` comes next. Begins and ends calls in `scan`; text that it leaves in the record was not a
        call."""

    @abstractmethod
    def grammar(self, tools: Sequence[Tool], several: bool, spell: Spell) -> str:
        """One call, or `several`, of the given `tools`: a Lark rule `calls` and the rules that it refers to.
        Raises NotEnforceable."""


def instructions(definitions: Sequence[Mapping[str, Any]], example: str) -> str:
    """Returns a system message for a chat template that does not render tools, in the layout of
    DeepSeek-V3.1's model card."""
    functions = [definition["function"] for definition in definitions]
    descriptions = [
        f"### {function['name']}\nDescription: {function.get('description') or ''}\n\n"
        f"Parameters: {json.dumps(function.get('parameters') or {}, ensure_ascii=False)}\n"
        for function in functions
    ]
    return "\n".join(
        [
            "## Tools\nYou have access to the following tools:\n",
            *descriptions,
            f"IMPORTANT: ALWAYS adhere to this exact format for tool use:\n{example}\n",
            "Where:\n",
            "- `tool_call_name` must be an exact match to one of the available tools",
            "- `tool_call_arguments` must be valid JSON that strictly follows the tool's Parameters Schema",
            "- For multiple tool calls, chain them directly without separators or spaces",
        ]
    )


def example_of(example: str, name: str, arguments: Mapping[str, Any]) -> str:
    """A call in the layout of a format's `example`; a JSON object if the example has no single place for the
    arguments."""
    if ALL not in example:
        example = EXAMPLE
    head, tail = example.replace(MORE, "").split(ALL)
    return head.replace("tool_call_name", name) + json.dumps(arguments, ensure_ascii=False) + tail


def in_name(character: str) -> bool:
    """True if a tool's name may contain the character."""
    return character.isascii() and (character.isalnum() or character in "_-.:/")
