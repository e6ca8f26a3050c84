"""Parses one output while it is streamed: reasoning, content and tool calls. Each endpoint renders the events
in its own format."""

from __future__ import annotations

from mtpserve.text.parsers.events import CallBegin, Content, Event
from mtpserve.text.parsers.reasoning import Opening, Thinking
from mtpserve.text.parsers.scanner import BLANKS, Reading, Scanner
from mtpserve.text.parsers.tools import CallFormat

SLICE = 256  # characters read at a time: the scanner copies its unread text with every `take`


class OutputParser:
    """Never raises, whatever the text. How the text is cut into pieces changes only how the events are cut
    into pieces.

    `thinking` None: reasoning is not parsed. `calls` None: calls are not parsed.
    """

    def __init__(
        self,
        thinking: Thinking | None = None,
        opening: Opening = Opening.MAYBE,
        calls: CallFormat | None = None,
        *,
        separate_reasoning: bool = True,
    ) -> None:
        self._scan = Scanner()
        self._calls = calls
        self._reading = self._read(thinking, opening, separate_reasoning)
        next(self._reading, None)

    def feed(self, text: str) -> list[Event]:
        for place in range(0, len(text), SLICE):
            self._scan.text += text[place : place + SLICE]
            next(self._reading, None)
        return self._new_events()

    def finish(self) -> list[Event]:
        """No more text comes. An incomplete call ends here, with the arguments that arrived."""
        self._scan.ended = True
        next(self._reading, None)
        return self._new_events()

    def _new_events(self) -> list[Event]:
        events, self._scan.events = self._scan.events, []
        return events

    def _read(self, thinking: Thinking | None, opening: Opening, separate: bool) -> Reading[None]:
        end = ""
        if thinking is not None:
            end = yield from thinking.read(self._scan, opening, separate, self._calls, self._ends_in_calls)
        if self._calls is not None or end:
            yield from self._answer(self._calls, end)
        yield from self._scan.until((), lambda _: self._scan.content())

    def _ends_in_calls(self) -> Reading[bool]:
        """True if all the remaining text is calls: models sometimes do not end their reasoning before them.
        Takes nothing."""
        trial, seen, called = OutputParser(calls=self._calls), 0, False
        while True:
            ended = self._scan.ended
            events = trial.feed(self._scan.text[seen:]) + (trial.finish() if ended else [])
            seen = len(self._scan.text)
            if any(isinstance(event, Content) for event in events):
                return False
            called = called or any(isinstance(event, CallBegin) for event in events)
            if ended:
                return called
            yield

    def _answer(self, calls: CallFormat | None, end: str) -> Reading[None]:
        """Content and calls. Blanks around a call are layout; between two texts they are content. `end`: the
        tag that ends the content, "" for none; elsewhere it is content."""
        scan, after_call = self._scan, False
        markers = calls.markers if calls is not None else ()

        def content() -> None:
            nonlocal after_call
            after_call = False
            scan.content()

        while marker := (
            yield from scan.until((*markers, *([end] if end else [])), lambda _: content(), hold=BLANKS)
        ):
            yield from scan.blanks()
            if calls is None or marker == end:
                ends = yield from scan.ahead(len(end), *markers)
                scan.take(len(end))
                if ends:
                    scan.layout()
            else:
                yield from calls.read(scan, marker)
            after_call = True
            if scan.record:  # it was not a call
                content()
        yield from scan.blanks()
        (scan.layout if after_call else scan.content)()
