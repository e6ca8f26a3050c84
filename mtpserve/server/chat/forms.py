"""The forms of what bodies take as objects and read by hand: tools, grammars, predictions, parts of
messages."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mtpserve.core.sampling import MAX_GRAMMAR_BYTES
from mtpserve.server.chat.constraints import EXPECTED, STRUCTURED
from mtpserve.server.chat.tools import CHOICES, MAX_TOOLS, MAX_VALUE, MAX_VARIABLES, NAME
from mtpserve.server.schema.shapes import NULL, TEXT, Schema

OBJECT: Schema = {"type": "object"}
STRING: Schema = {"type": "string"}
NOTHING = [None, False]
BOOLEAN: Schema = {"type": "boolean"}


def closed_object(properties: dict[str, Schema], required: Iterable[str] = ()) -> Schema:
    """An object without other fields than these."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def kind(
    name: str, properties: dict[str, Schema] | None = None, required: Iterable[str] = (), **more: Any
) -> Schema:
    """An object whose `type` is this."""
    return {
        "type": "object",
        "properties": {"type": {"const": name}} | (properties or {}),
        "required": ["type", *required],
        **more,
    }


def or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, NULL]}


# -- the form of the output ----------------------------------------------------------------------------------

GRAMMAR: Schema = TEXT | {"maxLength": MAX_GRAMMAR_BYTES}
AS_TEXT_OR_OBJECT: Schema = {"anyOf": [GRAMMAR, OBJECT]}
OF_TYPE: dict[type, Schema] = {
    bool: BOOLEAN,
    str: GRAMMAR,
    dict: OBJECT,
    list: {"type": "array", "items": STRING, "minItems": 1},
}
GRAMMARS: dict[str, Schema] = {
    "json_schema": AS_TEXT_OR_OBJECT,
    "guided_json": AS_TEXT_OR_OBJECT,
    **dict.fromkeys(("regex", "ebnf", "guided_regex", "guided_grammar"), GRAMMAR),
    "guided_choice": {"minItems": 1},
}
STRUCTURED_OUTPUTS: Schema = {
    "anyOf": [
        closed_object(
            {name: {"enum": NOTHING} for name in STRUCTURED}
            | {one: {"anyOf": [{"enum": NOTHING}, *map(OF_TYPE.__getitem__, types)]}}
        )
        for one, (types, _) in ((name, EXPECTED[grammar]) for name, grammar in STRUCTURED.items())
    ]
}
SCHEMA_FORM = {"name": {}, "description": {}, "schema": OBJECT, "strict": {}}
PLAIN_FORMAT: Schema = {
    "type": "object",
    "properties": {"type": {"enum": ["text", "json_object"]}, "schema": NULL, "json_schema": NULL},
    "required": ["type"],
}
IN_SCHEMA = {"type": "object", "properties": SCHEMA_FORM, "required": ["schema"]}
RESPONSE_FORMAT: Schema = {
    "anyOf": [
        PLAIN_FORMAT,
        kind("json_schema", {"json_schema": IN_SCHEMA, "schema": NULL}, ["json_schema"]),
        kind("structural_tag"),
    ]
}
# The same in responses' `text`, where the schema's fields are beside its type.
TEXT_FORMAT: Schema = {
    "anyOf": [
        PLAIN_FORMAT,
        kind("json_schema", SCHEMA_FORM, ["schema"]),
        kind("structural_tag"),
    ]
}

# -- tools ---------------------------------------------------------------------------------------------------

PARAMETERS: Schema = {
    "type": "object",
    "properties": {
        "type": {"const": "object"},
        "properties": OBJECT,
        "$defs": OBJECT,
        "required": {"type": "array", "items": STRING},
    },
}
FIELDS: dict[str, Schema] = {
    "name": {"type": "string", "pattern": f"^{NAME.pattern.removesuffix(chr(92) + 'Z')}$"},
    "description": or_null(STRING),
    "parameters": or_null(PARAMETERS),
    "strict": or_null(BOOLEAN),
}
FUNCTION: Schema = {"type": "object", "properties": FIELDS, "required": ["name"]}
TOOLS: Schema = {
    "items": {
        "anyOf": [
            {
                "type": "object",
                "properties": {"type": {"const": "function"}, "function": FUNCTION},
                "required": ["function"],
            },
            {
                "type": "object",
                "properties": {"type": {"type": "string", "not": {"const": "function"}}},
                "required": ["type"],
            },
        ]
    },
    "maxItems": MAX_TOOLS,
}
DEMANDED: Schema = {  # a rule: what is demanded has to be there
    "anyOf": [
        {"properties": {"tool_choice": {"enum": [None, "none", "auto"]}}},
        {"required": ["tools"], "properties": {"tools": {"type": "array", "minItems": 1}}},
    ]
}
NAMED: Schema = {"type": "object", "properties": {"name": STRING}, "required": ["name"]}
CHOSEN: Schema = kind("function", {"function": NAMED}, ["function"])
CHOSEN_FLAT: Schema = kind("function", {"name": STRING}, ["name"])  # as responses have it


def allowed(function: Schema) -> dict[str, Schema]:
    """The fields of a choice of several tools."""
    other = OBJECT | {"properties": {"type": {"not": {"const": "function"}}}}
    tools = {"type": "array", "items": {"anyOf": [function, other]}, "contains": function}
    return {"mode": {"enum": ["auto", "required"]}, "tools": tools}


ALLOWED: Schema = {"type": "object", "properties": allowed(CHOSEN), "required": ["mode", "tools"]}
TOOL_CHOICE: Schema = {
    "anyOf": [
        {"enum": list(CHOICES)},
        CHOSEN,
        kind("allowed_tools", {"allowed_tools": ALLOWED}, ["allowed_tools"]),
    ]
}
TOOL_CHOICE_FLAT: Schema = {
    "anyOf": [
        {"enum": list(CHOICES)},
        CHOSEN_FLAT,
        kind("allowed_tools", allowed(CHOSEN_FLAT), ["mode", "tools"]),
    ]
}
VARIABLES: Schema = {
    "maxProperties": MAX_VARIABLES,
    "additionalProperties": {
        "anyOf": [{"type": "string", "maxLength": MAX_VALUE}, {"type": ["number", "boolean", "null"]}]
    },
}

# -- texts ---------------------------------------------------------------------------------------------------

TEXT_PART: Schema = kind("text", {"text": STRING}, ["text"])
CONTENT: Schema = {"anyOf": [STRING, {"type": "array", "items": TEXT_PART}]}


# In what tools and models wrote: a note stands for parts without text.
def other_part(*types: str) -> Schema:
    return {
        "type": "object",
        "properties": {"type": {"type": "string", "not": {"enum": list(types)}}},
        "required": ["type"],
    }


HISTORY: Schema = {"anyOf": [STRING, {"type": "array", "items": {"anyOf": [TEXT_PART, other_part("text")]}}]}
DOCUMENT: Schema = kind("document", {"source": kind("text", {"data": STRING}, ["data"])}, ["source"])
SEARCH_RESULT: Schema = kind("search_result", {"content": CONTENT}, ["content"])
PREDICTION: Schema = kind("content", {"content": CONTENT}, ["content"])
