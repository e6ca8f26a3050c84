"""From what a client asked for, in text, to a Request in tokens: for the server and the offline engine alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mtpserve.core.errors import InvalidRequest
from mtpserve.core.request import Request
from mtpserve.core.sampling import SamplingParams
from mtpserve.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Spelling:
    """What sampling parameters say in text, in tokens. All requests with the same parameters share one: a prediction may be long."""

    bad_words: list[list[int]]
    prediction: list[int]


def spelling_of(tokenizer: Tokenizer, sampling: SamplingParams) -> Spelling:
    """Raises InvalidRequest for text that is no Unicode."""
    speculation = sampling.speculation
    for word in sampling.bad_words:
        check_text(word, "bad_words")
    check_text(speculation.prediction, "prediction")
    drafts = bool(speculation.prediction) and speculation.depth != 0
    return Spelling(
        bad_words=spellings(tokenizer, sampling.bad_words),
        prediction=tokenizer.encode(speculation.prediction, special=False) if drafts else [],
    )


def request_of(spelling: Spelling, id: str, prompt: list[int], sampling: SamplingParams, same_prompt_as: str | None = None) -> Request:
    return Request(id, prompt, sampling, spelling.bad_words, spelling.prediction, same_prompt_as)


def check_text(text: str, field: str) -> None:
    """JSON can spell half a surrogate pair, which is no character and has no bytes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{field} is not valid Unicode: {text[error.start]!a} at position {error.start}", field) from error


def spellings(tokenizer: Tokenizer, words: Sequence[str]) -> list[list[int]]:
    """A word at the beginning of a line and one behind a space are other tokens: both are meant, however the client wrote it."""
    found: list[list[int]] = []
    for word in words:
        # Of blank words nothing is taken off: who bans a line break, or two spaces, does not ban the single space.
        bare = word.removeprefix(" ") if word.strip() else word
        for text in (bare, " " + bare):
            ids = tokenizer.encode(text, special=False)
            if ids and ids not in found:
                found.append(ids)
    return found
