"""Reasoning before the answer: where it begins and ends, and the rule that allows it before an answer constrained by a grammar."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from mtpserve.text.parsers.grammar import text, up_to
from mtpserve.text.parsers.scanner import BLANKS, Reading, Scanner
from mtpserve.text.parsers.tools import Spell

MAX_TAIL = 64  # characters at a prompt's end that are searched for tags
AFTER_RESULTS = ("<｜tool▁outputs▁end｜>", "<｜tool▁output▁end｜>")  # after these DeepSeek's turn is the answer, or opens reasoning


class Opening(Enum):
    INSIDE = "inside"  # the output begins inside the reasoning
    MAYBE = "maybe"  # the output may begin with the start tag
    NONE = "none"  # there is no reasoning: the prompt has closed it


@dataclass(frozen=True, slots=True)
class Thinking:
    """Text between two tags. `always`: the output begins inside, with or without a start tag, unless the prompt has closed it."""

    always: bool
    start: str = "<think>"
    end: str = "</think>"

    def opening(self, prompt: str) -> Opening:
        """From the end of the rendered prompt: templates open the reasoning, or switch it off by closing it at once."""
        tail = prompt[-MAX_TAIL:].rstrip()
        if tail.endswith(self.end):
            return Opening.NONE
        if tail.endswith(AFTER_RESULTS):
            return Opening.MAYBE
        return Opening.INSIDE if self.always or tail.endswith(self.start) else Opening.MAYBE

    def goes_on(self, begun: str) -> Opening:
        """From the given beginning of an answer that is continued: reasoning follows only if its last tag is a start tag."""
        return Opening.INSIDE if begun.rfind(self.start) > begun.rfind(self.end) else Opening.NONE

    def read(
        self, scan: Scanner, opening: Opening, separate: bool, markers: Sequence[str], ends_in_calls: Callable[[], Reading[bool]]
    ) -> Reading[None]:
        """Takes the reasoning and the blanks after it. Not `separate`: all of it is content, tags included.

        `markers` begin calls; at a marker after which `ends_in_calls`, the reasoning ends without its end tag.
        """
        reasoning, layout = (scan.reasoning, scan.layout) if separate else (scan.content, scan.content)
        if opening is Opening.NONE:
            return
        if not (yield from scan.follows(self.start)) and opening is Opening.MAYBE:
            return
        yield from scan.blanks()
        layout()
        tags = [marker for marker in markers if len(marker) > 1]
        while (tag := (yield from scan.until((self.end, *tags), lambda _: reasoning(), hold=BLANKS))) in tags:
            if (yield from ends_in_calls()):
                return
            scan.take(scan.text.index(tag) + len(tag))
            reasoning()
        yield from scan.blanks()
        scan.take(len(tag))
        yield from scan.blanks()
        layout()

    def front(self, opening: Opening, spell: Spell) -> str:
        """What may come before an answer that a grammar constrains: Lark with a rule `front`, "" for nothing."""
        if opening is Opening.NONE:
            return ""
        begin = spell(self.start)
        whole = f"({begin})? thoughts {BLANK_LINES}" if opening is Opening.INSIDE else f"({begin} thoughts {BLANK_LINES})?"
        return f"front: {whole}\n{up_to('thoughts', self.end, spell)}"


BLANK_LINES = f"({text(chr(10))} | {text(chr(10) * 2)})?"


class ReasoningCount:
    """Counts an output's reasoning tokens, including the tags."""

    def __init__(self, thinking: Thinking, opening: Opening) -> None:
        self._thinking, self._opening = thinking, opening
        self._text = ""  # text of the last tokens
        self._waiting = 0  # tokens of a possible start tag

    def add(self, written: str) -> int:
        """The text of one more token → how many more tokens are now known to be reasoning."""
        if self._opening is Opening.NONE:
            return 0
        self._text = self._text[-MAX_TAIL:] + written
        self._waiting += 1
        if self._opening is Opening.MAYBE:
            rest = self._text.lstrip(BLANKS)
            if not rest.startswith(self._thinking.start):
                self._opening = Opening.MAYBE if self._thinking.start.startswith(rest) else Opening.NONE
                return 0
            self._opening = Opening.INSIDE
        if self._thinking.end in self._text:
            self._opening = Opening.NONE
        count, self._waiting = self._waiting, 0
        return count


# DeepSeek-R1, Qwen3-Thinking: models that always reason.
ALWAYS = Thinking(always=True)
# Qwen3, GLM-4.5, DeepSeek-V3.1, MiMo-7B: models whose template switches reasoning on and off, or that write the start tag.
SOMETIMES = Thinking(always=False)
