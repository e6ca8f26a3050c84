"""The check that an engine can compute a request: the vocabulary has its tokens, and they fit into the
context."""

from __future__ import annotations

from collections.abc import Container, Iterable

from mtpserve.core.errors import InvalidRequest
from mtpserve.core.request import ModelCard, Request
from mtpserve.core.sampling import SamplingParams


def validate(request: Request, card: ModelCard, live_ids: Container[str], policy: str) -> None:
    """`live_ids`: ids in use; `policy`: the scheduling policy. Raises InvalidRequest."""
    prompt, context, sampling = len(request.prompt), card.context_length, request.sampling
    if request.id in live_ids:
        raise InvalidRequest(f"request id {request.id!r} is in use", "id")
    if not request.prompt:
        raise InvalidRequest("prompt must not be empty", "prompt")
    lists: list[tuple[Iterable[int], str]] = [
        (request.prompt, "prompt"),
        (request.prior_output_ids, "said"),
        (sampling.stop_token_ids, "stop_token_ids"),
        (sampling.allowed_token_ids, "allowed_token_ids"),
        (sampling.logit_bias, "logit_bias"),
        *((word, "bad_words") for word in request.bad_words),
        (request.prediction, "prediction"),
    ]
    for ids, param in lists:
        require_known(ids, param, card.vocab)
    if prompt >= context:
        raise InvalidRequest(
            f"prompt has {prompt} tokens, but prompt and output together may have at most {context}", "prompt"
        )
    require_fit(prompt, sampling, context)
    if sampling.thinking_token_budget is not None:
        raise InvalidRequest(
            "thinking_token_budget needs a server with --reasoning-parser, got "
            f"{sampling.thinking_token_budget}",
            "thinking_token_budget",
        )
    require_room(request, context)
    sampling.check_policy(policy)
    sampling.check_experts(card.experts is not None)
    if not request.prior_output_ids:
        sampling.check_allowed(request.bad_words, card.eos_ids)


def require_known(ids: Iterable[int], param: str, vocab: int) -> None:
    for token in ids:
        if not 0 <= token < vocab:
            raise InvalidRequest(f"{param} must be token ids in [0, {vocab - 1}], got {token}", param)


def require_room(request: Request, context: int) -> None:
    """A request that goes on has not come to its end yet."""
    prompt, num_prior_tokens, at_most = (
        len(request.prompt),
        len(request.prior_output_ids),
        request.sampling.max_tokens,
    )
    room = context - prompt if at_most is None else at_most
    if num_prior_tokens >= room:
        raise InvalidRequest(
            f"{num_prior_tokens} tokens were said already, and the request may say {room}", "said"
        )


def require_fit(prompt: int, sampling: SamplingParams, context: int) -> None:
    if sampling.max_tokens is not None and prompt + sampling.max_tokens > context:
        allowed = f"at most {context - prompt} for a prompt of {prompt} tokens and a context of {context}"
        raise InvalidRequest(f"max_tokens must be {allowed}, got {sampling.max_tokens}", "max_tokens")
