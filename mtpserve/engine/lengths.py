"""Whether a request's tokens fit into the context."""

from __future__ import annotations

from mtpserve.core.errors import InvalidRequest
from mtpserve.core.request import Request
from mtpserve.core.sampling import SamplingParams


def require_room(request: Request, context: int) -> None:
    """A request that goes on has not come to its end yet."""
    prompt, said, at_most = len(request.prompt), len(request.prior_output_ids), request.sampling.max_tokens
    room = context - prompt if at_most is None else at_most
    if said >= room:
        raise InvalidRequest(f"{said} tokens were said already, and the request may say {room}", "said")


def require_fit(prompt: int, sampling: SamplingParams, context: int) -> None:
    if sampling.max_tokens is not None and prompt + sampling.max_tokens > context:
        allowed = f"at most {context - prompt} for a prompt of {prompt} tokens and a context of {context}"
        raise InvalidRequest(f"max_tokens must be {allowed}, got {sampling.max_tokens}", "max_tokens")
