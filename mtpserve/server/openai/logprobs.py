"""Log-probabilities in the layouts of OpenAI's two endpoints and of vLLM's prompt scores."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from mtpserve.core.request import TokenLogprob
from mtpserve.text.tokenizer import Tokenizer

LEAST = -9999.0  # JSON has no infinity


def finite(value: float) -> float:
    return max(value, LEAST)


class Spelling(Protocol):
    """How tokens are shown; a Tokenizer shows them as their text."""

    def token_text(self, token: int) -> str: ...
    def token_bytes(self, token: int) -> bytes: ...


@dataclass(frozen=True, slots=True)
class ById:
    """As vLLM shows tokens where a request says return_tokens_as_token_ids: no two look alike."""

    tokenizer: Tokenizer

    def token_text(self, token: int) -> str:
        return f"token_id:{token}"

    def token_bytes(self, token: int) -> bytes:
        return self.tokenizer.token_bytes(token)


class Offsets:
    """Where in a choice's text its tokens begin, one after the other; a token inside a character begins where the character does.

    `front` is the text that stands before the output, its tokens being taken first. Special tokens have no place in a text that
    leaves them out.
    """

    def __init__(self, tokenizer: Tokenizer, front: str, skip_special: bool) -> None:
        self._tokenizer, self._front, self._skip_special = tokenizer, front, skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._place = 0

    def take(self, tokens: Sequence[int]) -> list[int]:
        return [self._next(token) for token in tokens]

    def _next(self, token: int) -> int:
        place = self._place
        if token not in self._tokenizer.hidden_ids or self._shown(token):
            self._place += len(self._decoder.decode(self._tokenizer.token_bytes(token)))
        return place

    def _shown(self, token: int) -> bool:
        """The client may have written a special token into its prompt; those that the tokenizer put around it are not in the text."""
        if self._place < len(self._front):
            return self._front.startswith(self._tokenizer.token_text(token), self._place)
        return not self._skip_special


def completion_logprobs(
    tokenizer: Spelling, tokens: Sequence[int], scores: Sequence[TokenLogprob | None], offsets: list[int], top: int
) -> dict[str, Any]:
    """A prompt's first token has no score."""
    return {
        "tokens": [tokenizer.token_text(token) for token in tokens],
        "token_logprobs": [None if score is None else finite(score.logprob) for score in scores],
        "top_logprobs": [
            None if score is None or top == 0 else by_text(tokenizer, token, score, top)
            for token, score in zip(tokens, scores, strict=True)
        ],
        "text_offset": offsets,
    }


def by_text(tokenizer: Spelling, token: int, score: TokenLogprob, top: int) -> dict[str, float]:
    """The likeliest, and always the token that stands in the text. Of tokens with the same text the likeliest counts."""
    found: dict[str, float] = {}
    for id, logprob in [*score.top[:top], (token, score.logprob)]:
        found.setdefault(tokenizer.token_text(id), finite(logprob))
    return found


def chat_logprobs(tokenizer: Spelling, tokens: Sequence[int], scores: Sequence[TokenLogprob], top: int) -> dict[str, Any]:
    def entry(token: int, logprob: float) -> dict[str, Any]:
        return {"token": tokenizer.token_text(token), "logprob": finite(logprob), "bytes": list(tokenizer.token_bytes(token))}

    content = [
        {**entry(token, score.logprob), "top_logprobs": [entry(id, logprob) for id, logprob in score.top[:top]]}
        for token, score in zip(tokens, scores, strict=True)
    ]
    return {"content": content, "refusal": None}


def prompt_scores(tokenizer: Tokenizer, prompt: Sequence[int], scores: Sequence[TokenLogprob], top: int) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: by token id, the prompt's own token among them."""
    found: list[dict[str, Any] | None] = [None]
    for token, score in zip(prompt[1:], scores, strict=True):
        ranked = {id: (logprob, rank) for rank, (id, logprob) in enumerate(score.top[:top], 1)} | {token: (score.logprob, score.rank)}
        found.append(
            {
                str(id): {"logprob": finite(logprob), "rank": rank, "decoded_token": tokenizer.token_text(id)}
                for id, (logprob, rank) in ranked.items()
            }
        )
    return found
