"""A request's texts as tokens, and the Request that the engine gets: for the server and the offline engine
alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mtpserve.core.errors import InvalidRequest
from mtpserve.core.protocols.adapters import LoRARequest
from mtpserve.core.request import Request
from mtpserve.core.sampling import SamplingParams
from mtpserve.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]  # a text, or token ids


@dataclass(frozen=True, slots=True)
class Spelling:
    """The texts in sampling parameters, as tokens. All requests with the same parameters share one: a
    prediction may be long."""

    bad_words: list[list[int]]
    prediction: list[int]


def spelling_of(tokenizer: Tokenizer, sampling: SamplingParams) -> Spelling:
    """Raises InvalidRequest for text that is not valid Unicode."""
    for field, text in sampling.texts():
        check_text(text, field)
    prediction = sampling.used_prediction
    return Spelling(
        bad_words=spellings(tokenizer, sampling.bad_words),
        prediction=tokenizer.encode(prediction, special=False) if prediction else [],
    )


def request_of(
    spelling: Spelling, id: str, prompt: list[int], sampling: SamplingParams, salt: str = "",
    lora: LoRARequest | None = None
) -> Request:  # fmt: skip
    return Request(id, prompt, sampling, spelling.bad_words, spelling.prediction, salt, lora=lora)


def request_from(
    tokenizer: Tokenizer,
    prompt: Prompt,
    sampling: SamplingParams,
    id: str,
    lora: LoRARequest | None = None,
) -> Request:
    """Returns the request of a caller in Python. Raises InvalidRequest."""
    ids = tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
    return request_of(spelling_of(tokenizer, sampling), id, ids, sampling, lora=lora)


def check_text(text: str, field: str) -> None:
    """Raises InvalidRequest: JSON can contain half a surrogate pair, which is not a character and cannot be
    encoded."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(
            f"{field} is not valid Unicode: {text[error.start]!a} at position {error.start}", field
        ) from error


def spellings(tokenizer: Tokenizer, words: Sequence[str]) -> list[list[int]]:
    """Each word encoded with and without a space before it: these are different tokens, and both are banned
    however the client wrote it."""
    encoded: list[list[int]] = []
    for word in words:
        # A blank word is kept as it is: a request that bans a line break, or two spaces, does not ban the
        # single space.
        bare = word.removeprefix(" ") if word.strip() else word
        for text in (bare, " " + bare):
            ids = tokenizer.encode(text, special=False)
            if ids and ids not in encoded:
                encoded.append(ids)
    return encoded
