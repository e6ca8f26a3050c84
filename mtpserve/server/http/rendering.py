"""What routes answer: Structs that are rendered as they are, and from which the OpenAPI document is made.
Nothing else is rendered, but for what a checkpoint says of its tokenizer, whose fields nobody knows
before."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec
from starlette.responses import JSONResponse

REFERENCE = "#/components/schemas/{name}"
LEAST = -9999.0


def finite(logprob: float) -> float:
    """JSON has no infinity."""
    return max(logprob, LEAST)


class Rendered(msgspec.Struct):
    """An answer, or a part of one. A field that is UNSET is left out; every other field is in every
    answer."""


class JSON(JSONResponse):
    def render(self, content: Rendered | Sequence[Rendered] | dict[str, Any]) -> bytes:
        return msgspec.json.encode(content)


def described(answers: Iterable[tuple[Any, ...]]) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """The schemas of what each route answers, which is one of the types given for it; and those that they
    refer to, by name."""
    route_kinds = list(answers)
    schemas, components = msgspec.json.schema_components(
        [kind for kinds in route_kinds for kind in kinds], ref_template=REFERENCE
    )
    for kind in subclasses(Rendered):
        if kind.__name__ in components:
            components[kind.__name__]["required"] = list(always_there(kind))
    rest = iter(schemas)
    grouped = [[next(rest) for _ in kinds] for kinds in route_kinds]
    return [group[0] if len(group) == 1 else {"anyOf": group} for group in grouped], components


def subclasses(kind: type[Rendered]) -> Iterator[type[Rendered]]:
    for sub in kind.__subclasses__():
        yield sub
        yield from subclasses(sub)


def always_there(kind: type[Rendered]) -> Iterator[str]:
    """The names of fields that no answer leaves out."""
    if (tag := kind.__struct_config__.tag_field) is not None:
        yield tag
    for field in msgspec.structs.fields(kind):
        if field.default is not msgspec.UNSET:
            yield field.encode_name
