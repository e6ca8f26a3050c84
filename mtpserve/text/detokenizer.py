"""Tokens to text while they arrive. Decides where stop strings and stop tokens end the text; independent of
HTTP.

A step of the engine yields a list of tokens, and a stop string may end in the middle of it. Each token is
therefore decoded by itself, and tokens after the one that completes a stop string are neither shown nor
counted.

    "…text that was returned" │ "text that may become a stop string" │ tokens that end inside a character
                              └────── held back: self._stops ───────┘ └──── held back: self._pending ────┘
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from tokenizers import Tokenizer as FastTokenizer

from mtpserve.core.sampling import SamplingParams

REPLACEMENT = "\ufffd"  # what an incomplete or broken UTF-8 sequence decodes to
# tokens; a character has at most four bytes, so this many tokens without a whole character are broken output
MAX_PENDING = 16
CONTEXT = 4  # earlier tokens that can change how a token decodes
# tokens; it grows up to so many, and is then cut to the last CONTEXT, which costs a decoding of its own
MAX_CONTEXT = 8


class TextDelta(NamedTuple):
    text: str
    tokens_used: int  # how many of the pushed tokens count: all, or those up to the one that stopped
    stopped: bool  # a stop string or a stop token was met: the text is complete, push no more


class Stops(Protocol):
    """Finds where stop strings end a text. `matched`: the one that did."""

    matched: str | None

    def may_match(self, text: str) -> bool:
        """False only if no stop string can end in this next text."""
        ...

    def feed(self, text: str) -> str:
        """Returns what can be shown by now: up to a stop string, and without what may become one."""
        ...

    def finish(self) -> str:
        """Returns the rest. No more text comes."""
        ...


class StopStrings:
    """Stops, in all of the text. The stop string that ends first is met; of several that end together, the
    one that begins first. `include`: the text has the stop string."""

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops, self._include = stops, include
        self._held = ""  # it may become a stop string
        self.matched: str | None = None

    def may_match(self, text: str) -> bool:
        held = self._held + text if self._held else text
        return any(stop in held for stop in self._stops)

    def feed(self, text: str) -> str:
        if not self._stops:
            return text
        held, self._held = self._held + text, ""
        matches = [
            (place + len(stop), place, stop) for stop in self._stops if (place := held.find(stop)) >= 0
        ]
        if matches:
            end, place, self.matched = min(matches)
            return held[: end if self._include else place]
        end = len(held) - max(overlap(held, stop) for stop in self._stops)
        self._held = held[end:]
        return held[:end]

    def finish(self) -> str:
        held, self._held = self._held, ""
        return held


class DecodedContext(NamedTuple):
    """The last tokens whose text is complete, and that text."""

    tokens: list[int]
    text: str


class Detokenizer:
    """One request's output. `eos_ids` are the model's; the request's own stop tokens and strings come with
    `sampling`.

    The last tokens of `prompt` are decoded with the output and cut off again: some tokenizers drop a space
    before the very first token. `stops`: where stop strings count; None: in all of the text.
    """

    def __init__(
        self,
        tokenizer: FastTokenizer,
        sampling: SamplingParams,
        eos_ids: Iterable[int] = (),
        prompt: Sequence[int] = (),
        stops: Stops | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._sampling = sampling
        self._stop_ids = frozenset(sampling.stop_token_ids) | (
            frozenset() if sampling.ignore_eos else frozenset(eos_ids)
        )
        self._skip_special = sampling.skip_special_tokens
        self._stops = stops or StopStrings(sampling.stop, sampling.include_stop)
        self.matched: int | str | None = None  # the token or the stop string that ended the text
        self._context = self._context_of(list(prompt[-CONTEXT:]))
        if self._context.text.endswith(REPLACEMENT):
            self._context = DecodedContext([], "")
        self._pending: list[int] = []  # tokens after the context's
        self._stopped = False

    def push(self, tokens: list[int]) -> TextDelta:
        if self._stop_ids.isdisjoint(tokens) and not self._stopped:
            text = self._take(tokens)
            if text is not None:
                return TextDelta(self._show(text), len(tokens), False)
        used = 0
        out: list[str] = []
        for token in tokens:
            if self._stopped:
                break
            used += 1
            out.append(self._last(token) if token in self._stop_ids else self._show(self._decode(token)))
        return TextDelta("".join(out), used, self._stopped)

    def finish(self) -> str:
        """Returns the text that was held back; the request ended for another reason than a stop. A stop
        string may still be in it: see `matched`."""
        return "" if self._stopped else self._rest()

    # -- tokens to characters --------------------------------------------------------------------------------

    def _take(self, tokens: list[int]) -> str | None:
        """The text of all of them, decoded together; None if that takes a look at each: where they end inside
        a character, or may complete a stop string."""
        context = self._context
        pending = self._pending + tokens if self._pending else tokens
        text = self._tokenizer.decode(context.tokens + pending, skip_special_tokens=self._skip_special)[
            len(context.text) :
        ]
        if text.endswith(REPLACEMENT) or self._stops.may_match(text):
            return None
        self._complete(pending, text)
        return text

    def _decode(self, token: int) -> str:
        """The text that this token completes, "" while it ends inside a character."""
        self._pending.append(token)
        text = self._between(self._context, self._pending)
        if text.endswith(REPLACEMENT):
            return self._give_up_on_some(text) if len(self._pending) >= MAX_PENDING else ""
        self._complete(self._pending, text)
        return text

    def _complete(self, tokens: list[int], text: str) -> None:
        """They end with a whole character: no later one changes their text."""
        self._pending = []
        # tokens without text (special ones) are no context: a space after them would be dropped as the text's
        # first
        if not text:
            return
        self._context = DecodedContext(self._context.tokens + tokens, self._context.text + text)
        if len(self._context.tokens) > MAX_CONTEXT:
            short = self._context_of(self._context.tokens[-CONTEXT:])
            self._context = short if short.text else self._context

    def _plain(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=self._skip_special))

    def _context_of(self, tokens: list[int]) -> DecodedContext:
        return DecodedContext(tokens, self._plain(tokens) if tokens else "")

    def _between(self, context: DecodedContext, tokens: list[int]) -> str:
        """What `tokens` add to the text of `context`; decoded alone they may give another text."""
        return self._plain(context.tokens + tokens)[len(context.text) :]

    def _flush(self) -> str:
        text = self._between(self._context, self._pending) if self._pending else ""
        self._pending = []
        return text

    def _give_up_on_some(self, whole: str) -> str:
        """Broken output never completes a character and must not be decoded again with every token. Returns
        the text of all but the last tokens, cut between two characters: where the two parts decode to the
        same text alone as together."""
        for cut in range(len(self._pending) - 1, len(self._pending) - 5, -1):
            head = self._between(self._context, self._pending[:cut])
            if head + self._plain(self._pending[cut:]) == whole:
                self._context, self._pending = DecodedContext([], ""), self._pending[cut:]
                return head
        return ""

    # -- stopping --------------------------------------------------------------------------------------------

    def _show(self, text: str) -> str:
        shown = self._stops.feed(text)
        if self._stops.matched is not None:
            self.matched, self._stopped = self._stops.matched, True
        return shown

    def _rest(self) -> str:
        text = self._show(self._flush())
        if not self._stopped:
            text += self._stops.finish()
            self.matched, self._stopped = self._stops.matched, True
        return text

    def _last(self, token: int) -> str:
        """The text that is still held back when a stop token ends the request; with the token's own text if
        `include_stop`."""
        text = self._rest()
        if self.matched is None:
            self.matched = token
            if self._sampling.include_stop:
                text += self._between(self._context, [token])
        return text


def overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a prefix of `stop`."""
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while start >= 0:
        if stop.startswith(text[start:]):
            return len(text) - start
        start = text.find(stop[0], start + 1)
    return 0
