"""What all request bodies share: strict types, refusals by name, and the types of common fields."""

from __future__ import annotations

import json
import logging
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ModelWrapValidatorHandler, ValidationError, model_validator

from mtpserve.server.schema.shapes import Schema, described
from mtpserve.server.schema.unsupported import Column, refuse

log = logging.getLogger(__name__)

MAX_PROMPTS = 128
MAX_CHOICES = 128
MAX_SEQUENCES = 1024  # prompts times choices
MAX_DEPTH = 8  # levels in which numbers are searched
MAX_SAID = 256  # clients choose the words

Tokens = Annotated[list[int], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
Label = Annotated[str, Field(max_length=512)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Metadata = Annotated[dict[Annotated[str, Field(max_length=64)], Label], Field(max_length=16)]
Timeout = Annotated[float, Field(gt=0, le=86400)]  # seconds; the server's own limit may be shorter
RequestId = Annotated[str, Field(pattern=r"^[A-Za-z0-9._:-]{1,128}$")]


def whole(value: Any, depth: int = 0) -> Any:
    """Returns the value with integers in place of whole floats; the same object if there are none."""
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    if depth > MAX_DEPTH or not isinstance(value, dict | list):
        return value
    keys = value.keys() if isinstance(value, dict) else range(len(value))
    changed = {key: result for key in keys if (result := whole(value[key], depth + 1)) is not value[key]}
    if not changed:
        return value
    return (
        value | changed
        if isinstance(value, dict)
        else [changed.get(index, item) for index, item in enumerate(value)]
    )


class Strict(BaseModel):
    """Types as given: no text that looks like a number. Unknown fields are left out, with a line in the debug
    log."""

    model_config = ConfigDict(extra="ignore", strict=True, json_schema_extra=described)
    column: ClassVar[Column | None] = None  # the column in the table of unsupported fields
    # what fields may be beyond their types, for the OpenAPI document
    shapes: ClassVar[dict[str, Schema]] = {}
    rules: ClassVar[tuple[Schema, ...]] = ()  # how they depend on each other

    @model_validator(mode="wrap")
    @classmethod
    def whole_numbers(cls, body: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Takes 7.0 as the integer 7: JSON makes no difference, and some clients have one type of number."""
        try:
            return handler(body)
        except ValidationError:
            if (result := whole(body)) is body:
                raise
            return handler(result)

    @model_validator(mode="before")
    @classmethod
    def known_fields(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        if cls.column is not None:
            body = refuse(body, cls.column)
        if log.isEnabledFor(logging.DEBUG) and (unknown := body.keys() - cls.model_fields.keys()):
            log.debug(
                "%s: ignored fields: %s",
                cls.__name__,
                ", ".join(ascii(name[:50]) for name in sorted(unknown)[:20]),
            )
        return body


class Salted(Strict):
    """The fields that say whose pages a request may find in the prefix cache: those of requests with the same
    two values. `extra_key` is SGLang's."""

    cache_salt: Annotated[str, Field(min_length=1, max_length=512)] | None = None
    extra_key: Annotated[str, Field(max_length=512)] | None = None

    @property
    def salt(self) -> str:
        """The salt of both values. No two pairs give the same one: a gateway may set one of the values, and
        leave the other to its clients."""
        salts = (self.cache_salt, self.extra_key or None)
        return json.dumps(salts) if any(salts) else ""


SAID: set[str] = set()


def say_once(what: str) -> None:
    """Logs once what is left out of requests. Clients send it with every request, or it only allows
    something: without it no answer is wrong."""
    if what not in SAID and len(SAID) < MAX_SAID:
        SAID.add(what)
        log.info("fields of requests that are ignored: %s", ascii(what)[1:-1])
