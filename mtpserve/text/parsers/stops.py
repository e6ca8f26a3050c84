"""Stop strings of an output that is parsed. They count in the answer's text alone: reasoning and calls may
contain them."""

from __future__ import annotations

from collections.abc import Sequence

from mtpserve.text.detokenizer import StopStrings
from mtpserve.text.parsers.events import Arguments, CallBegin, CallEnd, Content, Event
from mtpserve.text.parsers.output import OutputParser
from mtpserve.text.parsers.scanner import BLANKS


class AnswerStops:
    """text.detokenizer.Stops. A parser says which text is the answer's.

        released │ answer that may become a stop string │ text about which the parser has not decided
                 └────────── self._strings ─────────────┘ └─────────────── self._text ──────────────┘

    A stop string is met late, by some tokens, where the parser waits for what may begin a call.
    """

    def __init__(
        self, parser: OutputParser, stops: Sequence[str], include: bool, *, begins_with_answer: bool
    ) -> None:
        """`begins_with_answer`: nothing can come before the answer's text but calls."""
        self._parser, self._stops = parser, stops
        self._strings = StopStrings(stops, include)
        self._text = ""
        self._ahead = 0  # characters that were released before the parser decided
        self._in_call, self._in_answer = False, begins_with_answer
        self.matched: str | None = None

    def may_match(self, text: str) -> bool:
        return self._strings.may_match(self._text + text)

    def feed(self, text: str) -> str:
        self._text += text
        shown = self._shown(self._parser.feed(text))
        if self.matched is not None:
            return shown
        if self._in_call:
            self._ahead += len(self._text)
            shown, self._text = shown + self._text, ""
        elif self._in_answer and not self._text.strip(BLANKS) and self._strings.may_match(self._text):
            shown += self._blanks()  # the parser waits for what follows them
        return shown

    def finish(self) -> str:
        shown = self._shown(self._parser.finish())
        return shown if self.matched is not None else shown + self._strings.finish()

    def _shown(self, events: Sequence[Event]) -> str:
        shown = ""
        for event in events:
            match event:
                case CallBegin():
                    self._in_call = True
                    shown += self._left()
                case Arguments():
                    pass
                case CallEnd():
                    self._in_call = False
                    shown += self._decided(event.raw)
                case Content(text):
                    self._in_answer = True
                    shown += self._answer(self._decided(text))
                case _:
                    shown += self._left()
                    shown += "" if self.matched is not None else self._decided(event.text)
            if self.matched is not None:
                break
        return shown

    def _answer(self, text: str) -> str:
        shown = self._strings.feed(text)
        self.matched = self._strings.matched
        return shown

    def _left(self) -> str:
        """Something else than the answer's text comes. Blanks before it still count as the answer's."""
        shown = self._blanks() if self._in_answer else ""
        self._in_answer = False
        return shown if self.matched is not None else shown + self._strings.finish()

    def _blanks(self) -> str:
        blanks = self._text[: len(self._text) - len(self._text.lstrip(BLANKS))]
        self._text = self._text[len(blanks) :]
        self._ahead += len(blanks)
        return self._answer(blanks)

    def _decided(self, text: str) -> str:
        """Takes a text that the parser has decided about. Returns what of it is not released."""
        early = min(self._ahead, len(text))
        self._ahead -= early
        self._text = self._text[len(text) - early :]
        return text[early:]
