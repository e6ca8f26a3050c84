"""Log-probabilities in the layouts of OpenAI's two endpoints and of vLLM's prompt scores."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass

from mtpserve.core.request import TokenLogprob
from mtpserve.server.http.rendering import finite
from mtpserve.server.openai.objects import (
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    ScoredToken,
    TokenScore,
)
from mtpserve.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class ById:
    """Shows tokens by their ids, as vLLM does for return_tokens_as_token_ids: no two look alike."""

    tokenizer: Tokenizer

    def token_text(self, token: int) -> str:
        return f"token_id:{token}"

    def token_bytes(self, token: int) -> bytes:
        return self.tokenizer.token_bytes(token)


TokenNames = Tokenizer | ById  # how tokens are shown; a Tokenizer shows them as their text


class Offsets:
    """The places in a choice's text at which its tokens begin. A token inside a character begins where the
    character does.

    `front` is the text before the output, its tokens being taken first. Special tokens have no place in a
    text that leaves them out.
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
        """The client may have written a special token into its prompt; those that the tokenizer put around it
        are not in the text."""
        if self._place < len(self._front):
            return self._front.startswith(self._tokenizer.token_text(token), self._place)
        return not self._skip_special


def completion_logprobs(
    names: TokenNames,
    tokens: Sequence[int],
    scores: Sequence[TokenLogprob | None],
    offsets: list[int],
    top: int,
) -> CompletionLogprobs:
    """A prompt's first token has no score."""
    scored = list(zip(tokens, scores, strict=True))
    return CompletionLogprobs(
        [names.token_text(token) for token in tokens],
        [None if score is None else finite(score.logprob) for score in scores],
        [None if score is None else by_text(names, token, score, top) for token, score in scored],
        offsets,
    )


def by_text(names: TokenNames, token: int, score: TokenLogprob, top: int) -> dict[str, float]:
    """The token that is in the text, first, and the likeliest. The likeliest of several tokens with the same
    text counts."""
    scores: dict[str, float] = {}
    for id, logprob in [(token, score.logprob), *score.top[:top]]:
        text = names.token_text(id)
        scores[text] = max(finite(logprob), scores.get(text, finite(logprob)))
    return scores


def chat_logprobs(
    names: TokenNames, tokens: Sequence[int], scores: Sequence[TokenLogprob], top: int
) -> ChatLogprobs:
    def score_fields(token: int, logprob: float) -> tuple[str, float, list[int]]:
        return names.token_text(token), finite(logprob), list(names.token_bytes(token))

    return ChatLogprobs(
        [
            ScoredToken(
                *score_fields(token, score.logprob),
                [TokenScore(*score_fields(id, logprob)) for id, logprob in score.top[:top]],
            )
            for token, score in zip(tokens, scores, strict=True)
        ]
    )


def prompt_scores(
    tokenizer: Tokenizer, prompt: Sequence[int], scores: Sequence[TokenLogprob], top: int
) -> PromptLogprobs:
    """vLLM's `prompt_logprobs`: by token id, the prompt's own token among them."""
    listed: PromptLogprobs = [None]
    for token, score in zip(prompt[1:], scores, strict=True):
        ranked = {id: (logprob, rank) for rank, (id, logprob) in enumerate(score.top[:top], 1)} | {
            token: (score.logprob, score.rank)
        }
        listed.append(
            {
                str(id): PromptLogprob(finite(logprob), rank, tokenizer.token_text(id))
                for id, (logprob, rank) in ranked.items()
            }
        )
    return listed
