"""The end of a request's tokens. Stop strings are not here: they need text, so the text layer finds them and
aborts."""

from __future__ import annotations

from collections.abc import Collection

from mtpserve.core.request import Finish
from mtpserve.core.state.request_state import RequestState


def until_stop(
    req: RequestState, tokens: list[int], eos_ids: Collection[int]
) -> tuple[list[int], Finish | None]:
    """What of a step's `tokens` the request keeps, and why it ends there; None: it goes on.

        accepted run   a b E c d       E stops: keep a b E, drop c d before anyone sees or counts them

    The stop token is kept. A stop on the last permitted token is a stop, not a length.
    """
    sampling, room = req.sampling, req.num_free_tokens
    stops, ends = sampling.stop_token_ids, () if sampling.ignore_eos else eos_ids
    for count, token in enumerate(tokens, 1):
        if token in ends or token in stops:
            return tokens[:count], Finish.STOP
        if count == room:
            return tokens[:count], Finish.LENGTH
    return tokens, None
