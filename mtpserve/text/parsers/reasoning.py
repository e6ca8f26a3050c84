"""Reasoning before the answer: where it begins and ends, and the rule that allows it before an answer
constrained by a grammar."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from mtpserve.text.parsers.call_grammar import text, up_to
from mtpserve.text.parsers.scanner import BLANKS, Reading, Scanner
from mtpserve.text.parsers.tools import CallFormat, Spell

MAX_TAIL = 64  # characters at a prompt's end that are searched for tags
# after these DeepSeek's turn is the answer, or opens reasoning
AFTER_RESULTS = ("<｜tool▁outputs▁end｜>", "<｜tool▁output▁end｜>")


class Opening(Enum):
    INSIDE = "inside"  # the output begins inside the reasoning
    MAYBE = "maybe"  # the output may begin with the start tag
    NONE = "none"  # there is no reasoning: the prompt has closed it


@dataclass(frozen=True, slots=True)
class Thinking:
    """Text between two tags. `always`: the output begins inside, with or without a start tag, unless the
    prompt has closed it.

    `answer`: tags around the answer that follows, where models write them. `turn`: where reasoning may come
    again, what precedes its start tag then. `calls`: the only format of calls, by its name, that goes with
    this one.
    """

    always: bool
    start: str = "<think>"
    end: str = "</think>"
    answer: tuple[str, str] | None = None
    turn: str | None = None
    calls: str | None = None

    @property
    def tokens(self) -> tuple[str, ...]:
        """Texts that are tokens of their own in many vocabularies, without which an output cannot be read."""
        return self.start, self.end, *(self.answer or ())

    @property
    def closing(self) -> tuple[str, ...]:
        """What ends the reasoning where a budget does; markers apart from other text."""
        return (self.end,)

    def opening(self, prompt: str) -> Opening:
        """Reads the end of the rendered prompt: templates open the reasoning, or switch it off by closing it
        at once."""
        tail = prompt[-MAX_TAIL:].rstrip()
        if tail.endswith(self.end):
            return Opening.NONE
        if tail.endswith(AFTER_RESULTS):
            return Opening.MAYBE
        return Opening.INSIDE if self.always or tail.endswith(self.start) else Opening.MAYBE

    def goes_on(self, begun: str) -> Opening:
        """Reads the beginning of an answer that is continued: reasoning follows only if its last tag is a
        start tag."""
        return Opening.INSIDE if begun.rfind(self.start) > begun.rfind(self.end) else Opening.NONE

    def read(
        self,
        scan: Scanner,
        opening: Opening,
        separate: bool,
        calls: CallFormat | None,
        ends_in_calls: Callable[[], Reading[bool]],
    ) -> Reading[str]:
        """Takes the reasoning and the blanks after it → the tag that ends the answer, "" for none. Not
        `separate`: all of it is content, tags included.

        At a marker of `calls` after which `ends_in_calls`, the reasoning ends without its end tag.
        """
        reasoning, layout = (scan.reasoning, scan.layout) if separate else (scan.content, scan.content)
        begin, end = self.answer or ("", "")
        if opening is Opening.NONE:
            return end
        if not (yield from scan.follows(self.start)) and opening is Opening.MAYBE:
            return ""
        yield from scan.blanks()
        layout()
        tags = [marker for marker in (calls.markers if calls else ()) if len(marker) > 1]
        while (tag := (yield from scan.until((self.end, *tags), lambda _: reasoning(), hold=BLANKS))) in tags:
            if (yield from ends_in_calls()):
                return ""
            scan.take(scan.text.index(tag) + len(tag))
            reasoning()
        yield from scan.blanks()
        scan.take(len(tag))
        wrapped = bool(begin) and separate and bool((yield from scan.follows(begin)))
        yield from scan.blanks()
        layout()
        return end if wrapped else ""

    def front(self, opening: Opening, spell: Spell) -> str:
        """What may come before an answer that a grammar constrains: Lark with a rule `front`, "" for
        nothing."""
        if opening is Opening.NONE:
            return ""
        begin = spell(self.start)
        whole = (
            f"({begin})? thoughts {BLANK_LINES}"
            if opening is Opening.INSIDE
            else f"({begin} thoughts {BLANK_LINES})?"
        )
        return f"front: {whole}\n{up_to('thoughts', self.end, spell)}"

    def lead(self, opening: Opening, spell: Spell) -> str:
        """What comes between `front` and a constrained answer that is no call, as an expression in Lark; ""
        for nothing."""
        return (
            ""
            if self.answer is None or opening is Opening.NONE
            else f"({spell(self.answer[0])} {text(chr(10))})?"
        )


BLANK_LINES = f"({text(chr(10))} | {text(chr(10) * 2)})?"


class ReasoningCount:
    """Counts an output's reasoning tokens, including the tags."""

    def __init__(self, thinking: Thinking, opening: Opening) -> None:
        self._thinking, self._opening = thinking, opening
        self._text = ""  # text of the last tokens
        self._waiting = 0  # tokens of a possible start tag

    def add(self, written: str) -> int:
        """The text of one more token → how many more tokens are now known to be reasoning."""
        if self._opening is Opening.NONE and self._thinking.turn is None:
            return 0
        self._text = self._text[-MAX_TAIL:] + written
        self._waiting += 1
        if self._opening is Opening.MAYBE:
            rest = self._text.lstrip(BLANKS)
            starts = (self._thinking.start, (self._thinking.turn or "") + self._thinking.start)
            if not rest.startswith(starts):
                self._opening = (
                    Opening.MAYBE if any(start.startswith(rest) for start in starts) else Opening.NONE
                )
                return 0
            self._opening = Opening.INSIDE
        ended, counts = self._thinking.end in self._text, self._opening is Opening.INSIDE
        if ended:
            self._opening = Opening.NONE if self._thinking.turn is None else Opening.MAYBE
            self._text = ""
        count = self._waiting if counts else 0
        self._waiting = 0 if counts or ended else self._waiting
        return count


# DeepSeek-R1, Qwen3-Thinking: models that always reason.
ALWAYS = Thinking(always=True)
# Qwen3, GLM-4.5, DeepSeek-V3.1, MiMo-7B: models whose template switches reasoning on and off, or that write
# the start tag.
SOMETIMES = Thinking(always=False)
# LongCat-Flash-Thinking: as SOMETIMES, with tags of its own.
LONGCAT = Thinking(always=False, start="<longcat_think>", end="</longcat_think>")
# Ernie 4.5, whose thinking models write the answer between tags, too.
ERNIE = Thinking(always=False, answer=("<response>", "</response>"))
