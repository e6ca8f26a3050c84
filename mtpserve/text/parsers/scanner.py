"""Reading text that has not all arrived. Parsers are generators that ask for more by `yield`, and so are written as if all were there.

    "…attributed to events │ record: taken, not attributed │ text: arrived, not taken │ not arrived…"

Whatever is taken goes into the record, and every event empties it, so that nothing can be lost. Decisions depend on the text alone,
never on where it was cut: a method that needs more characters in order to decide waits for them, and for nothing else.
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
MAX_BLANKS = 256  # that layout may have in a row: a model that writes nothing else must not cost more and more


class Scanner:
    def __init__(self) -> None:
        self.text = ""
        self.record: list[str] = []
        self.ended = False  # no more text will come
        self.events: list[Event] = []
        self._calls = 0

    # -- events ---------------------------------------------------------------------------------------------------------------

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
        self.events.append(CallBegin(self._calls, id or f"call_{uuid.uuid4().hex[:24]}", name))

    def arguments(self, text: str) -> None:
        if text:
            self.events.append(Arguments(self._calls, text))

    def end(self) -> None:
        """Of the call that was begun."""
        self.events.append(CallEnd(self._calls, self._recorded()))
        self._calls += 1

    # -- text -----------------------------------------------------------------------------------------------------------------

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
        """Takes blanks and the first of `literals` that stands behind them → it; takes nothing and → "" where none does."""
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
        """Whether blanks and one of `literals`, or the end of all text, stand behind `place`. Takes nothing."""
        while True:
            rest = self.text[place:].lstrip(BLANKS)
            if any(rest.startswith(literal) for literal in literals) or (self.ended and not rest):
                return True
            if self.ended or len(self.text) - place - len(rest) > MAX_BLANKS or not any(literal.startswith(rest) for literal in literals):
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
        found = ""
        while (next := (yield from self.peek())) and allowed(next):
            found += self.take(1)
        return found

    def until(self, markers: Sequence[str], passed: Callable[[str], None], hold: str = "", most: int = MAX_BLANKS) -> Reading[str]:
        """Takes text, handing it to `passed` piece by piece, up to the first marker → that marker, or "" at the end of all text.

        The marker is not taken, and neither are characters of `hold` right before it or before the end, `most` at most. No marker may
        contain another: then the one that begins first is also the one that is complete first.
        """
        while True:
            places = [(place, marker) for marker in markers if (place := self.text.find(marker)) >= 0]
            keep = 0 if self.ended or places else max((overlap(self.text, marker) for marker in markers), default=0)
            end, found = min(places) if places else (len(self.text) - keep, "")
            if hold:
                end = max(len(self.text[:end].rstrip(hold)), end - most)
            if end:
                passed(self.take(end))
            if found or self.ended:
                return found
            yield

    # -- JSON -----------------------------------------------------------------------------------------------------------------

    def json_string(self) -> Reading[str | None]:
        """Takes a string whose opening quote comes next → what it spells; None where it has no end or is not JSON."""
        written = self.take(1)
        while (next := (yield from self.peek())) != '"':
            if not next:
                return None
            written += self.take(1)
            if next == "\\" and (yield from self.peek()):
                written += self.take(1)
        written += self.take(1)
        try:
            found = json.loads(written)
            found.encode()  # half a surrogate pair is no character
        except ValueError:
            return None
        return str(found)

    def json_value(self, passed: Callable[[str], None], stop: str = "") -> Reading[bool]:
        """Takes one value, handing it on piece by piece → whether it was closed.

        Brackets are counted and strings are respected, and that is all: what is wrong inside is the client's to see. `stop` outside a
        string ends the value too, as does what closes something around it.
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
            if stop and next == stop[0] and (yield from self._stands(stop)):
                return done(begun and depth == 0)
            if depth == 0 and (next in "]},:" or (begun and next in BLANKS)):
                return done(begun)
            piece += self.take(1)
            begun = True
            inside = next == '"'
            depth += (next in "[{") - (next in "]}")
            if depth == 0 and next in "]}":
                return done(True)

    def _stands(self, literal: str) -> Reading[bool]:
        while len(self.text) < len(literal) and literal.startswith(self.text) and not self.ended:
            yield
        return self.text.startswith(literal)
