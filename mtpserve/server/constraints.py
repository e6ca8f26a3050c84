"""What a body says about the form of the output, in OpenAI's, SGLang's and vLLM's spellings, as one GrammarSpec."""

from __future__ import annotations

import json
from typing import Any

from mtpserve.core.errors import InvalidRequest
from mtpserve.core.sampling import GrammarKind, GrammarSpec

# Fields that each hold a constraint by themselves.
NATIVE: dict[str, GrammarKind] = {
    "json_schema": "json_schema",
    "regex": "regex",
    "ebnf": "ebnf",
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "ebnf",
}
STRUCTURED: dict[str, GrammarKind] = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "ebnf",
    "json_object": "json_object",
    "structural_tag": "structural_tag",
}


def constraint(fields: dict[str, Any]) -> GrammarSpec | None:
    """`fields`: response_format, structured_outputs and those of NATIVE. Raises InvalidRequest, also where there are two."""
    found: dict[str, GrammarSpec] = {}
    for name, kind in NATIVE.items():
        if fields.get(name) not in (None, "", [], {}):
            found[name] = spec(kind, fields[name])
    if (format := fields.get("response_format")) is not None and (made := response_format(format)) is not None:
        found["response_format"] = made
    for name, value in structured(fields.get("structured_outputs")).items():
        found[f"structured_outputs.{name}"] = spec(STRUCTURED[name], value)
    if len(found) > 1:
        raise InvalidRequest(f"{' and '.join(found)} both constrain the output: give one of them", list(found)[1])
    return next(iter(found.values()), None)


def structured(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    given = {name: part for name, part in value.items() if part not in (None, False, "", [], {})} if isinstance(value, dict) else None
    if given is None or not given.keys() <= STRUCTURED.keys():
        raise InvalidRequest(f"structured_outputs must be an object with one of {', '.join(STRUCTURED)}", "structured_outputs")
    return given


def spec(kind: GrammarKind, value: Any) -> GrammarSpec:
    if kind == "json_object":
        return GrammarSpec(kind)
    return GrammarSpec(kind, value if isinstance(value, str) else json.dumps(value))


def response_format(value: Any) -> GrammarSpec | None:
    kind = value.get("type") if isinstance(value, dict) else None
    match kind:
        case "text":
            return None
        case "json_object":
            return GrammarSpec("json_object")
        case "json_schema":
            wrapped = value.get("json_schema")
            schema = wrapped.get("schema") if isinstance(wrapped, dict) else None
            if not isinstance(schema, dict):
                raise InvalidRequest("response_format.json_schema.schema must be an object", "response_format")
            return spec("json_schema", schema)
        case "structural_tag":
            return spec("structural_tag", value)
    known = "text, json_object, json_schema and structural_tag"
    raise InvalidRequest(f"response_format.type {str(kind)[:50]!r} is not supported; {known} are", "response_format")
