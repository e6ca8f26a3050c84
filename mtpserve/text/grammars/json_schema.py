"""JSON schemas as grammars take them: their parts, their layout, and what in them says nothing about the
form."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

MAX_DEPTH = 64
JSON_LAYOUT: Any = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
# the formats that llguidance enforces; by the standard, others are annotations (2020-12 validation, 7.2)
FORMATS = frozenset(
    ("date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "unknown", "uri", "uuid")
)
# words whose value is data, and those whose keys are names and no words of the language
DATA = ("enum", "const", "default", "examples", "example")
NAMED = ("properties", "patternProperties", "$defs", "definitions")
# words that say nothing of the form
COMMENTS = frozenset({"title", "description", "$comment"})

Path = tuple[str | int, ...]


def with_layout(schema: Any) -> str:
    """The schema for Lark's `%json`. Raises ValueError."""
    if not isinstance(schema, dict):
        raise ValueError("a tag's schema must be an object")
    return json.dumps({**without_annotations(schema), "x-guidance": JSON_LAYOUT})


def parts(schema: Any) -> Iterator[tuple[Path, Mapping[str, Any]]]:
    """The schema and all those in it, each with its path. Stops below MAX_DEPTH, without recursion."""
    waiting: list[tuple[Path, Any, bool]] = [((), schema, False)]
    while waiting:
        path, value, names = waiting.pop()
        if isinstance(value, Mapping):
            if not names:
                yield path, value
            entries: list[tuple[Path, Any, bool]] = [
                ((*path, str(key)), inner, not names and key in NAMED)
                for key, inner in value.items()
                if names or key not in DATA
            ]
        elif isinstance(value, list):
            entries = [((*path, index), inner, False) for index, inner in enumerate(value)]
        else:
            continue
        if len(path) <= MAX_DEPTH:
            waiting += reversed(entries)


def dotted(path: Path) -> str:
    """The path in words, to be put behind a place."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step[:50]}" for step in path)


def replaced(schema: Any, path: Path, value: Any = None) -> Any:
    """A copy with another value at `path`; None: without what is there."""
    if not path:
        return value
    first, *rest = path
    copy: Any = dict(schema) if isinstance(schema, Mapping) else list(schema)
    if rest or value is not None:
        copy[first] = replaced(copy[first], tuple(rest), value)
    else:
        del copy[first]
    return copy


def without_annotations(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema without the words that only annotate, and that llguidance refuses."""
    annotations = [
        (*path, word)
        for path, part in parts(schema)
        for word in ("format", "propertyNames")
        if word in part and only_annotates(word, part[word])
    ]
    for path in annotations:
        schema = replaced(schema, path)
    return schema


def only_annotates(word: str, value: Any) -> bool:
    """True where the word allows everything: every name is a string."""
    if word == "format":
        return isinstance(value, str) and value not in FORMATS
    if isinstance(value, Mapping):
        said = {name: inner for name, inner in value.items() if name not in COMMENTS}
        return said in ({}, {"type": "string"})
    return value is True
