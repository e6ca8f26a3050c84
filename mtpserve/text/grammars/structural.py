"""Structural tags: free text in which certain beginnings must be followed by JSON of a certain schema, as
tool calls are written.

Both layouts that clients of SGLang and vLLM use are accepted: the older `structures` with `triggers`, and
`format` with `triggered_tags`, `tag`, `json_schema`, `const_string`, `any_text`, `sequence` and `or`. Other
kinds are refused by name.
"""

from __future__ import annotations

import json
from typing import Any

from llguidance import StructTag

from mtpserve.text.grammars.json_schema import with_layout

ANY_TEXT = r"/(.|\n)*/"


def structural_grammar(body: Any) -> str:
    """→ a grammar in Lark. Raises ValueError."""
    if not isinstance(body, dict):
        raise ValueError("a structural tag is an object")
    if "structures" in body:
        tags = [
            (structure.get("begin", ""), structure.get("schema", {}), structure.get("end", ""))
            for structure in listed(body, "structures")
        ]
        return triggered(tags, [str(trigger) for trigger in listed(body, "triggers")])
    if isinstance(body.get("format"), dict):
        format = body["format"]
        if format.get("type") == "triggered_tags":
            tags = [
                (tag.get("begin", ""), schema_of(tag.get("content")), tag.get("end", ""))
                for tag in listed(format, "tags")
            ]
            return triggered(tags, [str(trigger) for trigger in listed(format, "triggers")])
        return "%llguidance {}\nstart: " + element(format)
    raise ValueError("a structural tag has `structures` and `triggers`, or a `format`")


def listed(body: dict[str, Any], name: str) -> list[Any]:
    value = body.get(name)
    if not isinstance(value, list) or not value:
        raise ValueError(f"{name} must be a list with at least one element")
    return value


def triggered(tags: list[tuple[str, Any, str]], triggers: list[str]) -> str:
    """Free text, in which each trigger must continue as one of the tags that begin with it."""
    parts = []
    for begin, schema, end in tags:
        trigger = next((trigger for trigger in triggers if trigger and str(begin).startswith(trigger)), None)
        if trigger is None:
            raise ValueError(f"the tag {begin!r} begins with none of the triggers {triggers}")
        parts.append(StructTag(trigger=trigger, begin=begin, grammar=with_layout(schema), end=end))
    return StructTag.to_grammar(parts, assume_special=False)


def schema_of(content: Any) -> Any:
    if not isinstance(content, dict) or content.get("type") != "json_schema" or "json_schema" not in content:
        raise ValueError("a tag's content must be of type json_schema")
    return content["json_schema"]


def element(format: Any) -> str:
    """One part of a `format`, as a Lark expression."""
    kind = format.get("type") if isinstance(format, dict) else None
    if kind == "const_string":
        return json.dumps(str(format.get("value", format.get("text", ""))), ensure_ascii=False)
    if kind == "json_schema":
        return "%json " + with_layout(format.get("json_schema"))
    if kind == "any_text":
        return ANY_TEXT
    if kind == "sequence":
        return " ".join(f"({element(part)})" for part in listed(format, "elements"))
    if kind == "or":
        return "(" + " | ".join(element(part) for part in listed(format, "elements")) + ")"
    if kind == "tag":
        begin, end = json.dumps(str(format.get("begin", ""))), json.dumps(str(format.get("end", "")))
        return f"{begin} ({element(format.get('content'))}) {end}"
    raise ValueError(f"a structural tag of type {kind!r} is not supported")
