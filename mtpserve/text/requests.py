"""From what a client asked for, in text, to a Request in tokens: for the server and the offline engine alike."""

from __future__ import annotations

from mtpserve.core.request import Request
from mtpserve.core.sampling import SamplingParams
from mtpserve.text.tokenizer import Tokenizer


def request_of(tokenizer: Tokenizer, id: str, prompt: list[int], sampling: SamplingParams, same_prompt_as: str | None = None) -> Request:
    prediction = sampling.speculation.prediction
    return Request(
        id,
        prompt,
        sampling,
        bad_words=spellings(tokenizer, sampling.bad_words),
        prediction=tokenizer.encode(prediction, special=False) if prediction else [],
        same_prompt_as=same_prompt_as,
    )


def spellings(tokenizer: Tokenizer, words: tuple[str, ...]) -> list[list[int]]:
    """A word at the beginning of a line and one behind a space are other tokens: both are meant."""
    found: list[list[int]] = []
    for word in words:
        for text in (word, " " + word.lstrip()):
            ids = tokenizer.encode(text, special=False)
            if ids and ids not in found:
                found.append(ids)
    return found
