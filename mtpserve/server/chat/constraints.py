"""What a body says about the form of the output and the length of its reasoning, in OpenAI's, SGLang's and
vLLM's spellings, as one GrammarSpec.

The engine says whether a schema or a grammar can be compiled; this module checks what is given, and
how often.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mtpserve.core.errors import InvalidRequest
from mtpserve.core.sampling import GrammarKind, GrammarSpec, SamplingParams, ThinkingBudget
from mtpserve.text.parsers.reasoning import Opening, Thinking
from mtpserve.text.requests import check_text
from mtpserve.text.tokenizer import Tokenizer

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
SGLANG_BUDGET = "thinking_budget"  # among `custom_params`
EXPECTED: dict[GrammarKind, tuple[tuple[type, ...], str]] = {
    "json_object": ((bool,), "true or false"),
    "json_schema": ((str, dict), "a schema, as an object or as a string"),
    "structural_tag": ((str, dict), "a structural tag, as an object or as a string"),
    "choice": ((list,), "a list of strings"),
    "regex": ((str,), "a string"),
    "ebnf": ((str,), "a string"),
}


def constraint(fields: dict[str, Any]) -> GrammarSpec | None:
    """`fields`: response_format, structured_outputs and those of NATIVE. Raises InvalidRequest, also where
    there are two."""
    grammars: dict[str, GrammarSpec] = {}
    for name, kind in NATIVE.items():
        if is_set(fields.get(name)):
            grammars[name] = spec(kind, fields[name], name, name)
    if (format := fields.get("response_format")) is not None and (
        grammar := response_format(format)
    ) is not None:
        grammars["response_format"] = grammar
    for name, value in structured(fields.get("structured_outputs")).items():
        grammars[f"structured_outputs.{name}"] = spec(
            STRUCTURED[name], value, "structured_outputs", f"structured_outputs.{name}"
        )
    if len(grammars) > 1:
        raise InvalidRequest(
            f"{' and '.join(grammars)} each constrain the output: give one of them",
            list(grammars)[1].split(".")[0],
        )
    return next(iter(grammars.values()), None)


def is_set(value: Any) -> bool:
    return value is not None and value is not False


def structured(value: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict) or not value.keys() <= STRUCTURED.keys():
        raise InvalidRequest(
            f"structured_outputs must be an object with one of {', '.join(STRUCTURED)}", "structured_outputs"
        )
    return {name: part for name, part in value.items() if is_set(part)}


def spec(kind: GrammarKind, value: object, field: str, place: str) -> GrammarSpec:
    """`place` is the value's place in the body, `field` the body's own field."""
    types, expected = EXPECTED[kind]
    if not isinstance(value, types) or (
        isinstance(value, list) and not all(isinstance(choice, str) for choice in value)
    ):
        raise InvalidRequest(f"{place} must be {expected}, got {type(value).__name__}", field)
    if kind == "json_object":
        return GrammarSpec(kind, field=field)
    if value in ("", []):  # an empty object is a schema: it asks for any JSON
        raise InvalidRequest(f"{place} is empty: it must be {expected}", field)
    try:
        # Spelled out, so that half a surrogate pair is seen here and not first by the engine.
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    except RecursionError as error:
        raise InvalidRequest(f"{place} is nested too deeply", field) from error
    check_text(text, field)
    return GrammarSpec(kind, text, field=field)


def response_format(value: Any) -> GrammarSpec | None:
    kind = value.get("type") if isinstance(value, dict) else None
    match kind:
        case "text":
            refuse_schemas(value, "schema", "json_schema")
            return None
        case "json_object":
            refuse_schemas(value, "schema", "json_schema")
            return GrammarSpec("json_object", field="response_format")
        case "json_schema":
            refuse_schemas(value, "schema")
            wrapped = value.get("json_schema")
            schema = wrapped.get("schema") if isinstance(wrapped, dict) else None
            if not isinstance(schema, dict):
                raise InvalidRequest(
                    "response_format.json_schema.schema must be an object", "response_format"
                )
            return spec("json_schema", schema, "response_format", "response_format.json_schema.schema")
        case "structural_tag":
            return spec("structural_tag", value, "response_format", "response_format")
    types = "text, json_object, json_schema and structural_tag"
    raise InvalidRequest(
        f"response_format.type {str(kind)[:50]!r} is not supported; {types} are", "response_format"
    )


def refuse_schemas(value: dict[str, Any], *fields: str) -> None:
    """A schema beside json_object, as some servers take it, must not be lost in silence. Other fields that
    are unknown mean nothing here."""
    if misplaced := [name for name in fields if value.get(name) is not None]:
        advice = "a schema goes into json_schema.schema, with the type 'json_schema'"
        raise InvalidRequest(f"response_format.{misplaced[0]}: {advice}", "response_format")


def thinking_budget(*values: int | None, custom_params: Mapping[str, object] | None = None) -> int | None:
    """The first of `values` that is set, or the one of SGLang's `custom_params`."""
    custom = (custom_params or {}).get(SGLANG_BUDGET)
    if custom is not None and (isinstance(custom, bool) or not isinstance(custom, int) or custom < 0):
        raise InvalidRequest(
            f"custom_params.{SGLANG_BUDGET} must be an integer of at least 0, got {str(custom)[:50]!r}",
            "custom_params",
        )
    return next((value for value in (*values, custom) if value is not None), None)


def apply_thinking_budget(
    sampling: SamplingParams, thinking: Thinking | None, opening: Opening, tokenizer: Tokenizer
) -> SamplingParams:
    """`sampling` with its budget as a part of the grammar. A model without a reasoning format has nothing to
    limit."""
    num_tokens = sampling.thinking_token_budget
    if num_tokens is None:
        return sampling
    sampling = replace(sampling, thinking_token_budget=None)
    unlimited = sampling.max_tokens is not None and num_tokens >= sampling.max_tokens
    if thinking is None or opening is Opening.NONE or unlimited:
        return sampling
    closing_ids: list[int] = []
    for text in thinking.closing:
        marker = tokenizer.marker_id(text)
        closing_ids += tokenizer.encode(text, special=False) if marker is None else [marker]
    budget = ThinkingBudget(
        num_tokens, thinking.start, thinking.end, tuple(closing_ids), opening is Opening.INSIDE
    )
    return replace(sampling, grammar=replace(sampling.grammar or GrammarSpec("any_text"), thinking=budget))
