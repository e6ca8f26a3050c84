"""The events into which a model's output is parsed. Each endpoint renders them in its own format; nothing
here depends on HTTP.

Nothing is lost: the texts of Content, Reasoning and Layout and the `raw` of each CallEnd, in order, are the
whole output.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class Layout:
    """Text that belongs to the format and to no field of the answer: the tags around the reasoning, blanks
    around calls."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegin:
    """The answer's call number `index`, from 0. `id` is new and unique."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """The next part of the call's arguments, which together are JSON if the model wrote them to their end."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    index: int
    raw: str  # the call as the model wrote it


Event = Content | Reasoning | Layout | CallBegin | Arguments | CallEnd
