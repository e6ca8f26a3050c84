"""The schemas of tools' parameters: what every one must be, and what can be enforced of them. Compiling is
the engine's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mtpserve.core.errors import InvalidRequest
from mtpserve.server.http.errors import SHORT

MAX_DEPTH = 64
# What llguidance refuses. Other words are enforced, or say nothing about the form.
NOT_ENFORCED = frozenset(
    {
        "not", "if", "then", "else", "contains", "minContains", "maxContains", "uniqueItems", "propertyNames",
        "dependencies",
        "dependentRequired", "dependentSchemas", "unevaluatedProperties", "unevaluatedItems",
    }
)  # fmt: skip
# their keys are names, not words of the language
NAMED = ("properties", "patternProperties", "$defs", "definitions")
DATA = ("enum", "const", "default", "examples", "example")


def check_parameters(schema: Any, place: str) -> None:
    """Raises InvalidRequest unless it is a schema of an object."""
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{place} must be an object, got {type(schema).__name__}", place)
    if schema.get("type", "object") != "object":
        raise InvalidRequest(f"{place}.type must be 'object', got {SHORT.repr(schema['type'])}", place)
    for word, kind in (("properties", dict), ("required", list), ("$defs", dict)):
        if word in schema and not isinstance(schema[word], kind):
            raise InvalidRequest(f"{place}.{word} must be {'an object' if kind is dict else 'a list'}", place)
    if not all(isinstance(name, str) for name in schema.get("required", [])):
        raise InvalidRequest(f"{place}.required must be a list of strings", place)
    deep = next((path for path, _, depth in parts(schema) if depth > MAX_DEPTH), None)
    if deep is not None:
        raise InvalidRequest(f"{place} is nested deeper than {MAX_DEPTH} levels", place)


def check_enforceable(schema: Mapping[str, Any], place: str) -> None:
    """Raises InvalidRequest that names the first word which no grammar can enforce."""
    for path, part, _ in parts(schema):
        for word in sorted(part.keys() & NOT_ENFORCED):
            if part[word] is not False:
                raise InvalidRequest(f"{place}{path}.{word} cannot be enforced: leave it out", place)


def parts(schema: Any) -> Iterator[tuple[str, Mapping[str, Any], int]]:
    """The schema and all those in it, each with its path and depth. Stops below MAX_DEPTH, without
    recursion."""
    waiting: list[tuple[str, Any, int, bool]] = [("", schema, 0, False)]
    while waiting:
        path, value, depth, names = waiting.pop()
        if isinstance(value, Mapping):
            if not names:
                yield path, value, depth
            entries = [
                (f"{path}.{str(key)[:50]}", inner, not names and key in NAMED)
                for key, inner in value.items()
                if names or key not in DATA
            ]
        elif isinstance(value, list):
            entries = [(f"{path}[{index}]", inner, False) for index, inner in enumerate(value)]
        else:
            continue
        if depth <= MAX_DEPTH:
            waiting += [
                (inner_path, inner, depth + 1, inner_names)
                for inner_path, inner, inner_names in reversed(entries)
            ]
