"""One choice of an answer while it grows: pieces in, OpenAI's fields out. What differs between the endpoints is the Shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from mtpserve.core.errors import RequestFailed
from mtpserve.core.request import TokenLogprob
from mtpserve.core.sequence import Finish
from mtpserve.server.openai.logprobs import Offsets, TokenNames, prompt_scores
from mtpserve.server.openai.objects import ChatLogprobs, CompletionLogprobs
from mtpserve.server.openai.usage import Trace
from mtpserve.server.service import MATCHED_TOKENS, Piece
from mtpserve.text.tokenizer import Tokenizer


class Voice(Protocol):
    """One choice's text on its way into fields. Told all of the text once, piece by piece or whole."""

    def count(self, tokens: Sequence[int]) -> int:
        """Those of the output's next tokens that are reasoning."""
        ...

    def deltas(self, text: str, last: bool) -> list[dict[str, Any]]:
        """What the text adds, in parts that each become a chunk."""
        ...

    def silent(self) -> dict[str, Any]:
        """The part for a chunk without text."""
        ...

    def whole(self, text: str) -> dict[str, Any]: ...
    def finish(self, finish: Finish | None) -> str | None: ...


class Shape(Protocol):
    """How one endpoint spells a choice."""

    id_prefix: str
    object: Any
    chunk_object: Any
    choice: Any
    whole: Any
    one_prompt: bool  # whose tokens stand beside the choices, if they are asked for, not in them

    def voice(self) -> Voice: ...
    def opening(self) -> dict[str, Any] | None:
        """What a choice's first chunk holds before any text."""
        ...

    def logprobs(
        self, tokenizer: TokenNames, tokens: Sequence[int], scores: Sequence[TokenLogprob | None], offsets: list[int], top: int
    ) -> CompletionLogprobs | ChatLogprobs: ...


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the body asks for beside the text. Of the log-probabilities: how many alternatives, None for none at all."""

    logprobs: int | None
    prompt_logprobs: int | None
    trace: bool
    token_ids: bool = False


@dataclass(slots=True)
class Choice:
    """`delta` gives what came since the last one, `whole` all of it; a choice is asked for one of the two.

    `echo` is the prompt's text where it goes in front of the output, with the prompt's scores if log-probabilities are wanted.
    """

    shape: Shape
    tokenizer: Tokenizer
    prompt: list[int]
    wanted: Wanted
    offsets: Offsets
    spelling: TokenNames  # of the tokens beside their log-probabilities
    stopped: Callable[[Sequence[int]], dict[str, Any]]  # of the last tokens: what ended the text
    echo: str | None = None
    opened: bool = False
    voice: Voice = field(init=False)
    _pieces: list[Piece] = field(default_factory=list)  # not shown yet
    _scored: list[TokenLogprob] = field(default_factory=list)  # the prompt's tokens from the second on
    _last: list[int] = field(default_factory=list)
    _begun: bool = False  # the prompt's part was shown
    _trace: Trace = field(init=False)

    def __post_init__(self) -> None:
        self._trace = Trace(self.tokenizer)
        self.voice = self.shape.voice()

    def add(self, piece: Piece) -> int:
        """→ how many of its tokens are reasoning."""
        self._pieces.append(piece)
        self._last = [*self._last, *piece.tokens][-MATCHED_TOKENS:]
        self._scored += piece.prompt_logprobs or []
        return self.voice.count(piece.tokens)

    def deltas(self) -> list[dict[str, Any]]:
        """The chunks' contents, the last one with the finish_reason. Empty while there is nothing to show: scores of the prompt alone,
        tokens that end inside a character, or text that may become something else than text."""
        finish = next((piece.finish for piece in self._pieces if piece.finish is not None), None)
        scored = any(piece.logprobs for piece in self._pieces)
        told = (self.wanted.trace or self.wanted.token_ids) and any(piece.tokens for piece in self._pieces)
        fronted = self._begins() and (self.echo is not None or self.wanted.prompt_logprobs is not None)
        if not (finish or scored or told or fronted or any(piece.text for piece in self._pieces)):
            return []
        text, beside = self._take()
        parts = self.voice.deltas(text, finish is not None)
        if not parts and (finish or beside):
            parts = [self.voice.silent()]
        if parts:
            parts[0] |= beside
            parts[-1] |= {"finish_reason": self.voice.finish(finish)} | (self._ended(finish) if finish is not None else {})
        return parts

    def whole(self) -> dict[str, Any]:
        finish = self._pieces[-1].finish if self._pieces else None
        text, beside = self._take()
        return {**self.voice.whole(text), **beside, "finish_reason": self.voice.finish(finish), **self._ended(finish)}

    def _ended(self, finish: Finish | None) -> dict[str, Any]:
        return self.stopped(self._last if finish is Finish.STOP else ())

    def _begins(self) -> bool:
        """The prompt's part goes with the first tokens: its scores are complete by then."""
        return not self._begun and any(piece.tokens or piece.finish is not None for piece in self._pieces)

    def _take(self) -> tuple[str, dict[str, Any]]:
        begins = self._begins()
        pieces, self._pieces = self._pieces, []
        self._begun = self._begun or begins
        text = "".join(piece.text for piece in pieces)
        beside: dict[str, Any] = {}
        if self.wanted.logprobs is not None:
            tokens = [token for piece in pieces for token in piece.tokens]
            scores: list[TokenLogprob | None] = [score for piece in pieces for score in piece.logprobs or []]
            if begins and self.echo is not None:
                tokens, scores = [*self.prompt, *tokens], [None, *self._prompt_scored(), *scores]
            if tokens:
                places = self.offsets.take(tokens)
                beside["logprobs"] = self.shape.logprobs(self.spelling, tokens, scores, places, self.wanted.logprobs)
        if self.wanted.prompt_logprobs is not None and begins:
            beside["prompt_logprobs"] = prompt_scores(self.tokenizer, self.prompt, self._prompt_scored(), self.wanted.prompt_logprobs)
        if self.wanted.token_ids:
            beside["token_ids"] = [token for piece in pieces for token in piece.tokens]
            if begins and not self.shape.one_prompt:
                beside["prompt_token_ids"] = self.prompt
        if self.wanted.trace:
            beside["spec_trace"] = [self._trace.step(piece) for piece in pieces if piece.tokens]
        return (self.echo or "") + text if begins else text, beside

    def _prompt_scored(self) -> list[TokenLogprob]:
        if len(self._scored) != len(self.prompt) - 1:
            raise RequestFailed(f"the engine scored {len(self._scored)} of {len(self.prompt) - 1} tokens of the prompt")
        return self._scored
