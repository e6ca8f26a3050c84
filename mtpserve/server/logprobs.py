"""Log-probabilities in the layouts of OpenAI's two endpoints and of vLLM's prompt scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mtpserve.core.request import TokenLogprob
from mtpserve.text.tokenizer import Tokenizer

LEAST = -9999.0  # JSON has no infinity


def finite(value: float) -> float:
    return max(value, LEAST)


def completion_logprobs(tokenizer: Tokenizer, tokens: Sequence[int], scores: Sequence[TokenLogprob | None], offset: int) -> dict[str, Any]:
    """A prompt's first token has no score. `offset`: characters of the choice's text before these tokens."""
    texts = [tokenizer.token_text(token) for token in tokens]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [None if score is None else finite(score.logprob) for score in scores],
        "top_logprobs": [
            None if score is None or not score.top else {tokenizer.token_text(id): finite(logprob) for id, logprob in score.top}
            for score in scores
        ],
        "text_offset": offsets,
    }


def chat_logprobs(tokenizer: Tokenizer, tokens: Sequence[int], scores: Sequence[TokenLogprob]) -> dict[str, Any]:
    def entry(token: int, logprob: float) -> dict[str, Any]:
        return {"token": tokenizer.token_text(token), "logprob": finite(logprob), "bytes": list(tokenizer.token_bytes(token))}

    content = [
        {**entry(token, score.logprob), "top_logprobs": [entry(id, logprob) for id, logprob in score.top]}
        for token, score in zip(tokens, scores, strict=True)
    ]
    return {"content": content, "refusal": None}


def prompt_scores(tokenizer: Tokenizer, prompt: Sequence[int], scores: Sequence[TokenLogprob]) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: by token id, the prompt's own token among them."""
    found: list[dict[str, Any] | None] = [None]
    for token, score in zip(prompt[1:], scores, strict=True):
        ranked = {id: (logprob, rank) for rank, (id, logprob) in enumerate(score.top, 1)} | {token: (score.logprob, score.rank)}
        found.append(
            {
                str(id): {"logprob": finite(logprob), "rank": rank, "decoded_token": tokenizer.token_text(id)}
                for id, (logprob, rank) in ranked.items()
            }
        )
    return found
