"""The schemas of tools' parameters: what every one must be, and what can be enforced of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from mtpserve.core.errors import InvalidRequest
from mtpserve.server.http.errors import SHORT
from mtpserve.server.http.warnings import warn
from mtpserve.text.grammars.json_schema import MAX_DEPTH, dotted, parts, without_annotations
from mtpserve.text.grammars.schema_faults import SchemaFault, loosened, schema_fault
from mtpserve.text.parsers.tools import NotEnforceable, Tool

MAX_LOOSENED = 64  # words that one tool may lose


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
    if any(len(path) > MAX_DEPTH for path, _ in parts(schema)):
        raise InvalidRequest(f"{place} is nested deeper than {MAX_DEPTH} levels", place)


def enforceable(tool: Tool, check: Callable[[Tool], object], place: str | None) -> Tool:
    """The tool with a schema that a grammar can enforce. `check` raises NotEnforceable for what the format of
    the calls cannot.

    `place` is where its parameters are in the request. There InvalidRequest names the first word that cannot
    be enforced; without a place the tool loses such words, and the client is warned.
    """
    for _ in range(MAX_LOOSENED):
        tool = replace(tool, parameters=without_annotations(dict(tool.parameters)))
        fault = schema_fault(tool.parameters)
        if fault is None:
            try:
                check(tool)
                return tool
            except NotEnforceable as error:
                fault = SchemaFault(error.path, error.reason)
        if place is not None:
            raise InvalidRequest(
                f"{place}{dotted(fault.path)} cannot be enforced (tool {tool.name!r}): {fault.reason}", place
            )
        warn(f"tool {tool.name!r}: {dotted(fault.path)[1:] or 'parameters'} is not enforced: {fault.reason}")
        looser = loosened(tool.parameters, fault.path)
        if looser == tool.parameters:
            break
        tool = replace(tool, parameters=looser)
    return Tool(tool.name, {"type": "object"})
