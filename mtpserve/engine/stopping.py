"""Where a request's token run ends. Stop strings are not here: they need text, so the text layer finds them and aborts."""

from __future__ import annotations

from collections.abc import Collection

from mtpserve.core.request import Finish
from mtpserve.core.sequence import Sequence


def until_stop(seq: Sequence, tokens: list[int], eos_ids: Collection[int]) -> tuple[list[int], Finish | None]:
    """What of a step's `tokens` the request keeps, and why it ends there; None: it goes on.

        accepted run   a b E c d       E stops: keep a b E, drop c d before anyone sees or counts them

    The stop token is kept. A stop on the last permitted token is a stop, not a length.
    """
    sampling = seq.sampling
    for count, token in enumerate(tokens, 1):
        if token in sampling.stop_token_ids or (token in eos_ids and not sampling.ignore_eos):
            return tokens[:count], Finish.STOP
        if count == seq.room:
            return tokens[:count], Finish.LENGTH
    return tokens, None
