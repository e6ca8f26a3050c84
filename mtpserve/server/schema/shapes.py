"""The way from a body's class to its schema in the OpenAPI document: it adds what the types do not say, with
the numbers that the checks have.

A class says in `shapes` what its fields may be beyond their types, and in `rules` how they depend on each
other. No bodies here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from mtpserve.core.sampling import (
    MAX_BAD_WORDS,
    MAX_BIAS,
    MAX_BIASED,
    MAX_STOP_IDS,
    MAX_STOP_LENGTH,
    MAX_STOP_STRINGS,
    RANGES,
    Range,
)
from mtpserve.server.schema.texts import EXAMPLES, NOT_SUPPORTED, TEXTS
from mtpserve.server.schema.unsupported import REFUSED

Schema = dict[str, Any]
SERVER = "x-server"  # in its place is put what only a server knows: its model's context, vocabulary, names
# Keywords of JSON Schema by the types that they say something of.
KEYWORDS = {
    "string": ("minLength", "maxLength", "pattern", "enum", SERVER),
    "integer": ("minimum", "maximum", "exclusiveMinimum", "not", "enum", SERVER),
    "number": ("minimum", "maximum", "exclusiveMinimum"),
    "boolean": ("enum",),
    "array": ("minItems", "maxItems", "items", "contains"),
    "object": (
        "properties",
        "required",
        "additionalProperties",
        "propertyNames",
        "minProperties",
        "maxProperties",
    ),
}
NULL: Schema = {"type": "null"}
TEXT: Schema = {"type": "string", "minLength": 1}
TOKEN: Schema = {"type": "integer", "minimum": 0, SERVER: "token"}
PROMPT: Schema = {"type": "array", "items": TOKEN, "minItems": 1}


def bounds(range: Range) -> Schema:
    limits: Schema = {"exclusiveMinimum" if range.open else "minimum": range.low}
    return limits if range.high == math.inf else limits | {"maximum": range.high}


# Schemas of fields that mean the same in every body.
SAMPLING: dict[str, Schema] = {name: bounds(range) for name, range in RANGES.items()} | {
    "priority": bounds(RANGES["priority"]) | {SERVER: "priority"},
    **{name: bounds(RANGES[name]) | {SERVER: "alternatives"} for name in ("logprobs", "prompt_logprobs")},
    "max_tokens": bounds(RANGES["max_tokens"]) | {SERVER: "length"},
    "stop": {
        "minLength": 1,
        "maxLength": MAX_STOP_LENGTH,
        "items": TEXT | {"maxLength": MAX_STOP_LENGTH},
        "maxItems": MAX_STOP_STRINGS,
    },
    "bad_words": {"items": TEXT | {"maxLength": MAX_STOP_LENGTH}, "maxItems": MAX_BAD_WORDS},
    "stop_token_ids": {"items": TOKEN, "maxItems": MAX_STOP_IDS},
    "allowed_token_ids": {"items": TOKEN},
    "logit_bias": {
        "propertyNames": {"pattern": "^[0-9]{1,20}$"},
        "additionalProperties": {"type": "number", "minimum": -MAX_BIAS, "maximum": MAX_BIAS},
        "maxProperties": MAX_BIASED,
    },
    "model": {SERVER: "model"},
}
# of chats and responses, where a server may lower it to what is left of the context
CLAMPED_TOKENS: Schema = bounds(RANGES["max_tokens"]) | {SERVER: "clamped"}


# -- how fields depend on each other: a field that is null is one that is not given --------------------------


def absent(*names: str) -> Schema:
    return {"properties": dict.fromkeys(names, NULL)}


def present(name: str) -> Schema:
    return {"required": [name], "properties": {name: {"not": NULL}}}


def being(name: str, value: object) -> Schema:
    return {"required": [name], "properties": {name: {"const": value}}}


def one_of(*fields: str) -> Schema:
    """Exactly one of them is given."""
    return {
        "anyOf": [
            present(name) | {"properties": present(name)["properties"] | absent(*others)["properties"]}
            for name in fields
            for others in [[other for other in fields if other != name]]
        ]
    }


def not_both(one: str, other: str) -> Schema:
    return {"anyOf": [absent(one), absent(other)]}


def needs(name: str, flag: str, unless: Schema = NULL) -> Schema:
    """`name` is given only where `flag` is true, `unless` it is a value that asks for nothing."""
    return {"anyOf": [{"properties": {name: unless}}, being(flag, True)]}


# -- a class and its schema ----------------------------------------------------------------------------------


def described(schema: Schema, cls: type[Any]) -> None:
    """Adds bounds and texts to `schema`, which pydantic made of the class's types: its
    `json_schema_extra`."""
    shapes: dict[str, Schema] = {
        name: value for part in inherited(cls, "shapes") for name, value in part.items()
    }
    properties: dict[str, Schema] = schema.setdefault("properties", {})
    for name, field in properties.items():
        field.pop("title", None)
        add(field, SAMPLING.get(name, {}) if name not in shapes else shapes[name])
        if name in TEXTS:
            field.setdefault("description", TEXTS[name])
    if (column := getattr(cls, "column", None)) is not None:
        for name, values in REFUSED[column].items():
            properties[name] = {"enum": list(values), "description": NOT_SUPPORTED}
    if rules := [rule for part in inherited(cls, "rules") for rule in part]:
        schema["allOf"] = rules
    if cls.__name__ in EXAMPLES:
        schema["examples"] = [EXAMPLES[cls.__name__]]


def inherited(cls: type[Any], name: str) -> Iterator[Any]:
    return (vars(base)[name] for base in reversed(cls.__mro__) if name in vars(base))


def add(field: Schema, shape: Schema) -> None:
    """What `shape` says of each type goes to the branch of that type; other forms of the field replace all
    but null."""
    branches: list[Schema] = field.get("anyOf", [field])
    if "anyOf" in shape:
        rest = [branch for branch in branches if branch == NULL]
        field.pop("type", None)
        field.pop("items", None)
        field.pop("additionalProperties", None)
        field["anyOf"] = [*shape["anyOf"], *rest]
        return
    for branch in branches:
        branch |= {
            key: value
            for key, value in shape.items()
            if key in KEYWORDS.get(branch.get("type", ""), ()) or key == "description"
        }
