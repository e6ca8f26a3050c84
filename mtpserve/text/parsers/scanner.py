"""Reading streamed text. Parsers are generators that `yield` when they need more text, and are written as if
all of it had arrived.

    "…in events │ record: taken, not in an event yet │ text: arrived, not taken │ not arrived…"

All text that is taken goes into the record, and every event empties the record, so that nothing is lost.
Decisions depend on the text alone, never on how it was cut into pieces: a method that needs more characters
in order to decide waits for exactly those.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Generator, Sequence
from typing import TypeVar

from mtpserve.text.detokenizer import overlap
from mtpserve.text.parsers.events import Arguments, CallBegin, CallEnd, Content, Event, Layout, Reasoning

T = TypeVar("T")
Reading = Generator[None, None, T]  # yields while it waits for more text

BLANKS = " \t\r\n"
CONTROLS = {chr(code): json.dumps(chr(code))[1:-1] for code in range(0x20)}  # as JSON has them in strings
MAX_BLANKS = 256  # blanks in a row that count as layout; bounds the cost of a model that writes only blanks


class Scanner:
    def __init__(self) -> None:
        self.text = ""
        self.record: list[str] = []
        self.ended = False  # no more text will come
        self.events: list[Event] = []
        self._calls = 0
        self._in_string = self._escaped = False  # where the call's arguments have got to

    # -- events ----------------------------------------------------------------------------------------------

    def content(self) -> None:
        self._flush(Content)

    def reasoning(self) -> None:
        self._flush(Reasoning)

    def layout(self) -> None:
        self._flush(Layout)

    def _flush(self, kind: Callable[[str], Event]) -> None:
        if self.record:
            self.events.append(kind(self._recorded()))

    def _recorded(self) -> str:
        text = "".join(self.record)
        self.record = []
        return text

    def begin(self, name: str, id: str | None = None) -> None:
        self._in_string = self._escaped = False
        self.events.append(CallBegin(self._calls, id or f"call_{uuid.uuid4().hex[:24]}", name))

    def arguments(self, text: str) -> None:
        """Control characters in strings, models' commonest mistake in JSON, become escapes."""
        if text:
            self.events.append(Arguments(self._calls, "".join(map(self._as_json, text))))

    def _as_json(self, next: str) -> str:
        if not self._in_string:
            self._in_string = next == '"'
            return next
        # a backslash before a line break is one of the text
        lead = "\\" if self._escaped and next in CONTROLS else ""
        self._in_string = self._escaped or next != '"'
        self._escaped = next == "\\" and not self._escaped
        return lead + CONTROLS.get(next, next)

    def end(self) -> None:
        """Ends the call that was begun."""
        self.events.append(CallEnd(self._calls, self._recorded()))
        self._calls += 1

    # -- text ------------------------------------------------------------------------------------------------

    def take(self, count: int) -> str:
        taken, self.text = self.text[:count], self.text[count:]
        if taken:
            self.record.append(taken)
        return taken

    def peek(self) -> Reading[str]:
        """The next character, "" at the end; it is not taken."""
        while not self.text and not self.ended:
            yield
        return self.text[:1]

    def follows(self, *literals: str) -> Reading[str]:
        """Takes blanks and the first of `literals` that follows them → that literal; if none does, takes
        nothing → ""."""
        while True:
            rest = self.text.lstrip(BLANKS)
            if len(self.text) - len(rest) > MAX_BLANKS:
                return ""
            for literal in literals:
                if rest.startswith(literal):
                    self.take(len(self.text) - len(rest) + len(literal))
                    return literal
                if literal.startswith(rest) and not self.ended:
                    break
            else:
                return ""
            yield

    def ahead(self, place: int, *literals: str) -> Reading[bool]:
        """True if blanks and one of `literals`, or the end of all text, follow at `place`. Takes nothing."""
        while True:
            rest = self.text[place:].lstrip(BLANKS)
            if any(rest.startswith(literal) for literal in literals) or (self.ended and not rest):
                return True
            if (
                self.ended
                or len(self.text) - place - len(rest) > MAX_BLANKS
                or not any(literal.startswith(rest) for literal in literals)
            ):
                return False
            yield

    def blanks(self) -> Reading[None]:
        while True:
            self.take(len(self.text) - len(self.text.lstrip(BLANKS)))
            if self.text or self.ended:
                return
            yield

    def while_in(self, allowed: Callable[[str], bool]) -> Reading[str]:
        """Takes characters as long as they are `allowed`."""
        taken = ""
        while (next := (yield from self.peek())) and allowed(next):
            taken += self.take(1)
        return taken

    def until(
        self,
        markers: Sequence[str],
        passed: Callable[[str], None],
        hold: str = "",
        max_blanks: int = MAX_BLANKS,
    ) -> Reading[str]:
        """Takes text up to the first marker and passes it to `passed` piece by piece → that marker, or "" at
        the end of all text.

        The marker is not taken, and neither are up to `max_blanks` characters of `hold` right before it or
        before the end. No marker may contain another, so that the one that begins first is also complete
        first.
        """
        while True:
            places = [(place, marker) for marker in markers if (place := self.text.find(marker)) >= 0]
            keep = (
                0
                if self.ended or places
                else max((overlap(self.text, marker) for marker in markers), default=0)
            )
            end, marker = min(places) if places else (len(self.text) - keep, "")
            if hold:
                end = max(len(self.text[:end].rstrip(hold)), end - max_blanks)
            if end:
                passed(self.take(end))
            if marker or self.ended:
                return marker
            yield

    # -- JSON ------------------------------------------------------------------------------------------------

    def json_string(self) -> Reading[str | None]:
        """Takes a string whose opening quote comes next → its value; None if it has no end or is not JSON."""
        written = self.take(1)
        while (next := (yield from self.peek())) != '"':
            if not next:
                return None
            written += self.take(1)
            if next == "\\" and (yield from self.peek()):
                written += self.take(1)
        written += self.take(1)
        try:
            value = json.loads(written, strict=False)  # models write line breaks as they are
            value.encode()  # fails for half a surrogate pair, which is not a character
        except ValueError:
            return None
        return str(value)

    def json_value(self, passed: Callable[[str], None], stop: str = "") -> Reading[bool]:
        """Takes one value and passes it on piece by piece → whether it was closed.

        Only brackets are counted, outside of strings; other errors in the JSON are passed on to the client.
        `stop` outside a string ends the value too, and so does a character that cannot continue it (a bracket
        of the enclosing value, a comma, a colon).
        """
        depth, inside, escaped, begun, piece = 0, False, False, False, ""

        def done(closed: bool) -> bool:
            if piece:
                passed(piece)
            return closed

        while True:
            if not self.text:
                if piece:
                    passed(piece)
                    piece = ""
                if not (yield from self.peek()):
                    return begun and depth == 0 and not inside
            next = self.text[0]
            if inside:
                piece += self.take(1)
                inside, escaped = escaped or next != '"', next == "\\" and not escaped
                if not inside and depth == 0:
                    return done(True)
                continue
            if stop and next == stop[0] and (yield from self._next_is(stop)):
                return done(begun and depth == 0)
            if depth == 0 and (next in "]},:" or (begun and next in BLANKS)):
                return done(begun)
            piece += self.take(1)
            begun = True
            inside = next == '"'
            depth += (next in "[{") - (next in "]}")
            if depth == 0 and next in "]}":
                return done(True)

    def _next_is(self, literal: str) -> Reading[bool]:
        while len(self.text) < len(literal) and literal.startswith(self.text) and not self.ended:
            yield
        return self.text.startswith(literal)
