"""What a request says of its prompt's pages where one node computes prompts and another one the text after
them. Plain data."""

from __future__ import annotations

import msgspec


class PageSource(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Another node has, or will have, the pages of a request's prompt."""

    host: str
    port: int
    lease: str  # the name under which it keeps them
    waits: bool = False  # it may still be computing them, and not know the name yet


class PageOffer(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The address from which another node gets the pages of a computed prompt."""

    engine: str  # an id that no other engine has had
    host: str
    port: int
    lease: str
    columns: int  # whole pages of the prompt
