"""The tools that a request of the newer APIs offers: functions, and others, which are left out as long as a
function remains.

Others are those that only their vendor's servers run, such as web search, and those that a client runs but
only their vendor's models know. A model may do without any tool that it is offered; a request that has
nothing else, or demands one, is refused. No HTTP and no bodies here.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from mtpserve.server.http.errors import SHORT, Unsupported
from mtpserve.server.schema.base import say_once


@dataclass(slots=True)
class Offer:
    """`functions` are as chat completions have them. The others tell what only the client's own layout
    knows."""

    functions: list[dict[str, Any]] = field(default_factory=list)
    places: dict[str, str] = field(default_factory=dict)  # their places in the body, where those are other
    # the name of one in a namespace → the namespace, its name in there
    members: dict[str, tuple[str, str]] = field(default_factory=dict)
    _left_out: dict[str, str] = field(default_factory=dict)  # type → place
    _names: set[str] = field(default_factory=set)  # names of tools that are left out

    def add(self, function: dict[str, Any], place: str) -> None:
        here = f"tools[{len(self.functions)}]"
        if here != place:
            self.places[here] = place
        self.functions.append({"type": "function", "function": function})

    def leave_out(self, kind: Any, place: str, name: str | None = None) -> None:
        if not isinstance(kind, str):
            raise Unsupported(f"{place}.type must be a string, got {SHORT.repr(kind)}", f"{place}.type")
        self._left_out.setdefault(kind, place)
        self._names |= {kind if name is None else name}

    def check(self, demanded: str | None) -> None:
        """`demanded`: the type or the name that the client's tool_choice has. Raises Unsupported."""
        if demanded is not None and demanded in self._names:
            raise Unsupported(
                f"tool_choice {demanded[:100]!r} is not supported: this server has no tools but functions",
                "tool_choice",
            )
        if self._left_out and not self.functions:
            kind, place = next(iter(self._left_out.items()))
            raise Unsupported(
                f"{place}.type {kind[:50]!r} is not supported, and there is no function beside it",
                f"{place}.type",
            )
        for kind in self._left_out:
            say_once(
                f"tool {kind[:50]!r} (this server runs none itself, and tells the model of functions alone)"
            )
