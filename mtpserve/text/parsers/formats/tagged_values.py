"""Values written as plain text between tags: the JSON that they mean according to the tool's schema, and
grammar rules for them."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from types import NoneType
from typing import Any

from mtpserve.text.parsers.call_grammar import arguments_json, text, up_to
from mtpserve.text.parsers.tools import NotEnforceable, Schema, Spell

MAX_REFERENCES = 16  # length of a chain of `$ref`s
PYTHON = {"True": "true", "False": "false", "None": "null"}  # as Jinja templates print values
# JSON Schema's names of what `json.loads` gives.
KINDS = {
    NoneType: "null",
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    list: "array",
    dict: "object",
}
ANY: frozenset[str] = frozenset()
# cannot be enforced for strings without quotes and escapes
NOT_IN_TEXT = ("pattern", "minLength", "maxLength")


def property_of(key: str, schema: Schema) -> Any:
    properties = schema.get("properties")
    if isinstance(properties, Mapping) and key in properties:
        return properties[key]
    return schema.get("additionalProperties")


def resolved(schema: Any, root: Schema) -> Any:
    """The schema that its `$ref`s lead to, which are looked up in `root` alone; None if they do not
    resolve."""
    for _ in range(MAX_REFERENCES):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return schema
        schema = root
        for part in reference[2:].split("/"):
            schema = schema.get(part) if isinstance(schema, Mapping) else None
    return None


def types_of(schema: Any, root: Schema) -> frozenset[str]:
    """The types that a value may have; empty: any. Each part is visited once, however often schemas refer to
    it."""
    types: set[str] = set()
    waiting, seen = [schema], set[int]()
    while waiting:
        part = resolved(waiting.pop(), root)
        if not isinstance(part, Mapping):
            return ANY
        if id(part) in seen:
            continue
        seen.add(id(part))
        kinds, choices = part.get("type"), part.get("anyOf") or part.get("oneOf")
        if isinstance(kinds, str | list):
            types |= {
                kind for kind in ([kinds] if isinstance(kinds, str) else kinds) if isinstance(kind, str)
            }
            types |= {"null"} if part.get("nullable") is True else set()
        elif isinstance(part.get("enum"), list):
            types |= {KINDS[type(choice)] for choice in part["enum"]}
        elif "const" in part:
            types.add(KINDS[type(part["const"])])
        elif isinstance(choices, list):
            waiting += choices
        else:
            return ANY
    return frozenset(types)


def as_json(written: str, types: Collection[str] | None) -> str:
    """Text that is JSON of one of the `types` is returned as it is, None: of any; any other text becomes a
    JSON string."""
    bare = written.strip()
    bare = PYTHON.get(bare, bare)
    try:
        kind = KINDS[type(json.loads(bare, parse_constant=refuse))]
    except (ValueError, RecursionError):
        return json.dumps(written, ensure_ascii=False)
    if types is None:
        return bare
    fits = not types or kind in types or (kind == "integer" and "number" in types)
    return bare if fits and kind != "string" else json.dumps(written, ensure_ascii=False)


def refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def inside_string(written: str) -> str:
    """Escapes a piece of a JSON string; without quotes."""
    return json.dumps(written, ensure_ascii=False)[1:-1]


def value_rule(
    name: str,
    key: str,
    root: Schema,
    end: tuple[str, ...],
    spell: Spell,
    before: str = "",
    quoted: bool = False,
) -> str:
    """A rule: a value of property `key`, then `before` and the pieces of `end` (each a marker or text) that
    end it. Raises NotEnforceable.

    `quoted`: strings are JSON where other types are allowed, too."""
    schema = resolved(property_of(key, root), root)
    closing = " ".join(map(spell, (before, *end) if before else end))
    types = types_of(schema, root)
    schema = schema if isinstance(schema, Mapping) else {}
    if types != {"string"} if quoted else types and "string" not in types:
        definitions = {word: root[word] for word in ("$defs", "definitions") if word in root}
        return f"{name}: {arguments_json({**schema, **definitions})} {closing}\n"
    if types == {"string"} and isinstance(
        choices := schema.get("enum", [schema["const"]] if "const" in schema else None), list
    ):
        return f"{name}: ({' | '.join(text(str(choice)) for choice in choices)}) {closing}\n"
    for word in NOT_IN_TEXT:
        if word in schema:
            raise NotEnforceable(
                ("properties", key, word), "this model's tool call format has no grammar for it: leave it out"
            )
    return up_to(name, end[0], spell, *end[1:], before=before)
