"""One output taken apart while it arrives: reasoning, content and tool calls. Endpoints turn the events into their own layouts."""

from __future__ import annotations

from mtpserve.text.parsers.events import CallBegin, Content, Event
from mtpserve.text.parsers.reasoning import Opening, Thinking
from mtpserve.text.parsers.scanner import BLANKS, Reading, Scanner
from mtpserve.text.parsers.tools import CallFormat

SLICE = 256  # characters read at a time: a scanner copies what it has not taken yet


class OutputParser:
    """Never raises, whatever the text is, and gives the same events but for where they are cut, wherever the text is cut.

    `thinking` None: no reasoning is looked for. `calls` None: no calls are.
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
        return self._told()

    def finish(self) -> list[Event]:
        """No more text comes. A call that is not complete ends here, with the arguments as far as they came."""
        self._scan.ended = True
        next(self._reading, None)
        return self._told()

    def _told(self) -> list[Event]:
        told, self._scan.events = self._scan.events, []
        return told

    def _read(self, thinking: Thinking | None, opening: Opening, separate: bool) -> Reading[None]:
        if thinking is not None:
            yield from thinking.read(self._scan, opening, separate, self._calls.markers if self._calls else (), self._ends_in_calls)
        if self._calls is not None:
            yield from self._answer(self._calls)
        yield from self._scan.until((), lambda _: self._scan.content())

    def _ends_in_calls(self) -> Reading[bool]:
        """Whether all text that is to come is calls: models forget to end their reasoning in front of them. Takes nothing."""
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

    def _answer(self, calls: CallFormat) -> Reading[None]:
        """Content, and calls among it. Blanks around a call are layout; between two texts they are content."""
        scan, after_call = self._scan, False

        def content() -> None:
            nonlocal after_call
            after_call = False
            scan.content()

        while marker := (yield from scan.until(calls.markers, lambda _: content(), hold=BLANKS)):
            yield from scan.blanks()
            yield from calls.read(scan, marker)
            after_call = True
            if scan.record:  # it was no call after all
                content()
        yield from scan.blanks()
        (scan.layout if after_call else scan.content)()
