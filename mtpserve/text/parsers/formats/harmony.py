"""Harmony, in which gpt-oss writes: an output is messages, each on a channel, and calls are messages to
functions.

    <|channel|>analysis<|message|>reasoning<|end|>
    <|start|>assistant<|channel|>final<|message|>answer<|return|>
    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>

The recipient may also come before the channel, as in gpt-oss's chat template. Messages on `analysis` are
reasoning, all others are content. A call ends the turn: <|call|> and <|return|> are end-of-text tokens, and
so are not in the text. Source: https://github.com/openai/harmony/blob/main/docs/format.md
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mtpserve.text.parsers.call_grammar import arguments_json, calls_of, text, up_to
from mtpserve.text.parsers.reasoning import MAX_TAIL, Opening, Thinking
from mtpserve.text.parsers.scanner import BLANKS, Reading, Scanner
from mtpserve.text.parsers.tools import CallFormat, Spell, Tool

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
AFTER_TEXT = (END, CALL, RETURN, START, CHANNEL)  # the last two where a message has no end
TURN = f"{START}assistant"
ON_ANALYSIS = re.compile(re.escape(CHANNEL) + r"\s*analysis\b")
RECIPIENT = re.compile(r"\bto=(functions\.)?([\w.:/-]+)")
MAX_HEADER = 256  # characters


def header_of(scan: Scanner) -> Reading[str]:
    """Takes a message's header up to its text → the header; takes nothing, "" if there is none."""
    if not (yield from scan.ahead(0, START, CHANNEL, "to=")):
        return ""
    while (place := scan.text.find(MESSAGE)) < 0 and len(scan.text) < MAX_HEADER and not scan.ended:
        yield
    return scan.take(place + len(MESSAGE)) if 0 <= place <= MAX_HEADER - len(MESSAGE) else ""


def text_of(scan: Scanner, passed: Callable[[str], None], hold: str = "") -> Reading[bool]:
    """Takes a message's text and passes it on → whether the message has an end, which comes next and is not
    taken."""
    return (yield from scan.until(AFTER_TEXT, passed, hold)) in (END, CALL, RETURN)


class Harmony(CallFormat):
    markers: tuple[str, ...] = (START, CHANNEL)
    example = f"{TURN} to=functions.tool_call_name{CHANNEL}commentary json{MESSAGE}tool_call_arguments{CALL}"
    layouts = (
        f"{TURN}{CHANNEL}commentary to=functions.tool_call_name "
        f"{CONSTRAIN}json{MESSAGE}tool_call_arguments{CALL}",
    )

    def __init__(self, tools: Sequence[Tool]) -> None:
        self._names = frozenset(tool.name for tool in tools)

    def called(self, header: str) -> str:
        """The name of the function that a message with this header calls, "" for none."""
        match = RECIPIENT.search(header)
        return match[2] if match is not None and (match[1] or match[2] in self._names) else ""

    def read(self, scan: Scanner, marker: str) -> Reading[None]:
        header = yield from header_of(scan)
        if name := self.called(header):
            yield from self.call(scan, name)
        elif not header:
            scan.take(len(marker))

    def call(self, scan: Scanner, name: str) -> Reading[None]:
        """Reads the rest of a call whose header was taken."""
        written = False

        def passed(piece: str) -> None:
            nonlocal written
            written = True
            scan.arguments(piece)

        scan.begin(name)
        yield from scan.blanks()
        ended = yield from text_of(scan, passed, BLANKS)
        if not written:
            scan.arguments("{}")
        yield from scan.blanks()
        if ended:
            yield from scan.follows(END, CALL, RETURN)
        scan.end()

    def grammar(self, tools: Sequence[Tool], several: bool, spell: Spell) -> str:
        head, tail = f"{spell(CHANNEL)} ", f" {spell(CONSTRAIN)} {text('json')} {spell(MESSAGE)} "
        calls = [
            head + text(f"commentary to=functions.{tool.name} ") + tail + arguments_json(tool.parameters)
            for tool in tools
        ]
        return calls_of(calls, several, between=f"{spell(CALL)} {spell(START)} {text('assistant')}")


@dataclass(frozen=True, slots=True)
class Channels(Thinking):
    """Reads all messages of an output, and their calls if these are Harmony's."""

    @property
    def tokens(self) -> tuple[str, ...]:
        return START, CHANNEL, CONSTRAIN, MESSAGE, END

    @property
    def closing(self) -> tuple[str, ...]:
        return END, START, "assistant", CHANNEL, "final", MESSAGE

    def opening(self, prompt: str) -> Opening:
        tail = prompt[-MAX_TAIL:]
        return (
            Opening.INSIDE
            if tail.endswith(self.start)
            else Opening.NONE
            if tail.endswith(MESSAGE)
            else Opening.MAYBE
        )

    def read(
        self,
        scan: Scanner,
        opening: Opening,
        separate: bool,
        calls: CallFormat | None,
        ends_in_calls: Callable[[], Reading[bool]],
    ) -> Reading[str]:
        reasoning, layout = (scan.reasoning, scan.layout) if separate else (scan.content, scan.content)
        tools = calls if isinstance(calls, Harmony) else Harmony(())
        if opening is not Opening.MAYBE:  # the first message's header is in the prompt
            yield from self._text(scan, reasoning if opening is Opening.INSIDE else scan.content, layout)
        while (yield from scan.peek()):
            header = yield from header_of(scan)
            if calls is not None and (name := tools.called(header)):
                yield from tools.call(scan, name)
                continue
            emit = reasoning if ON_ANALYSIS.search(header) else scan.content
            if header:
                layout()
            else:  # text without a header, of which at least a marker is taken
                scan.take(1)
                emit()
            yield from self._text(scan, emit, layout)
        return ""

    def _text(self, scan: Scanner, emit: Callable[[], None], layout: Callable[[], None]) -> Reading[None]:
        if (yield from text_of(scan, lambda _: emit())):
            yield from scan.follows(END, CALL, RETURN)
            yield from scan.blanks()
            layout()

    def front(self, opening: Opening, spell: Spell) -> str:
        if opening is Opening.NONE:
            return ""
        head = f"{spell(CHANNEL)} {text('analysis')} {spell(MESSAGE)}"
        whole = "thoughts" if opening is Opening.INSIDE else f"({head} thoughts)?"
        return f"front: {whole}\n{up_to('thoughts', END, spell, START, 'assistant')}"

    def lead(self, opening: Opening, spell: Spell) -> str:
        return "" if opening is Opening.NONE else f"{spell(CHANNEL)} {text('final')} {spell(MESSAGE)}"


CHANNELS = Channels(always=False, start=f"{CHANNEL}analysis{MESSAGE}", end=END, turn=TURN, calls="openai")
