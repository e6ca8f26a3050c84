"""Requests as Dynamo's frontend preprocesses them, and outputs as the chunks that it reads. As of Dynamo 1.6;
imports nothing of it.

a request in tokens ─┬─ sampling_options, stop_conditions, output_options, routing
                     └─ metadata["mtpserve"]: JSON of a header, for fields of completions that Dynamo does not
                     hand on → a body of completions, with all of its checks → requests to the engine → steps
                     → chunks
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec
from pydantic import ValidationError

from mtpserve.core.errors import InvalidRequest
from mtpserve.core.request import Finish, TokenLogprob
from mtpserve.server.chat.bodies import CompletionRequest
from mtpserve.server.chat.constraints import NATIVE
from mtpserve.server.chat.steps.step_output import StepOutput
from mtpserve.server.http.errors import validation_message
from mtpserve.server.openai.usage import Usage
from mtpserve.text.tokenizer import Tokenizer

HEADER = "mtpserve"  # x-dynamo-meta-mtpserve
SAMPLING = (
    "n", "best_of", "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty",
    "repetition_penalty"
)  # fmt: skip
CONSTRAINTS = NATIVE.keys() | {"response_format", "structured_outputs"}
GRAMMARS = ("json", "regex", "choice", "grammar", "structural_tag")
STOPS = ("stop_token_ids", "stop_token_ids_visible", "stop_token_ids_hidden")
# What changes an answer and is not supported, by its place.
REFUSED = (
    ("sampling_options", "use_beam_search"),
    ("sampling_options", "length_penalty"),
    ("stop_conditions", "max_thinking_tokens"),
)

Fields = dict[str, Any]


def body_of(request: Mapping[str, Any], metadata: str | None, *, has_priorities: bool) -> CompletionRequest:
    """Stop strings stay Dynamo's, which has the text. `has_priorities`: --scheduling-policy priority, where
    lower ones come first, unlike Dynamo's. Raises InvalidRequest."""
    sampling, stops, output, routing = (
        request.get(section) or {}
        for section in ("sampling_options", "stop_conditions", "output_options", "routing")
    )
    for section, name in REFUSED:
        if (value := (request.get(section) or {}).get(name)) not in (None, False):
            raise InvalidRequest(f"{name} is not supported, got {value!r}", name)
    fields: Fields = further(metadata) | ((request.get("extra_args") or {}).get("sampling_options") or {})
    fields |= {name: exact(sampling[name]) for name in SAMPLING if sampling.get(name) is not None}
    guided = sampling.get("guided_decoding") or {}
    if guided.get("whitespace_pattern"):
        raise InvalidRequest(
            "whitespace_pattern is not supported: a schema's white space is the engine's",
            "whitespace_pattern",
        )
    fields |= (
        {
            "structured_outputs": {name: guided[name] for name in GRAMMARS if guided.get(name) is not None}
            or None
        }
        if guided
        else {}
    )
    fields |= {
        name: stops[name]
        for name in ("max_tokens", "min_tokens", "ignore_eos")
        if stops.get(name) is not None
    }
    stopping = [id for name in STOPS for id in stops.get(name) or ()]
    fields |= {"stop_token_ids": list(dict.fromkeys(stopping))} if stopping else {}
    fields |= {
        name: int(output[name]) for name in ("logprobs", "prompt_logprobs") if output.get(name) is not None
    }
    fields |= {"cache_salt": routing["cache_salt"]} if routing.get("cache_salt") else {}
    fields |= {"priority": -int(routing["priority"])} if has_priorities and routing.get("priority") else {}
    try:
        body = CompletionRequest.model_validate(fields | {"prompt": list(request["token_ids"])})
    except ValidationError as error:
        message, param, _ = validation_message(error.errors())
        raise InvalidRequest(message, param) from error
    if body.choices > 1:
        raise InvalidRequest(
            f"n must be 1 behind Dynamo, which ends a stream where its first choice ends, got {body.choices}",
            "n",
        )
    if body.selects:
        raise InvalidRequest(f"best_of must be 1 behind Dynamo, which streams, got {body.best_of}", "best_of")
    return body


def further(metadata: str | None) -> Fields:
    """The header's fields."""
    try:
        fields = {} if metadata is None else json.loads(metadata)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise InvalidRequest(
            f"x-dynamo-meta-{HEADER} must be a JSON object with fields of completions, got "
            f"{str(metadata)[:200]!r}",
            HEADER,
        )
    for name in CONSTRAINTS & fields.keys():
        # Dynamo sends a stream that was cut on to another worker as a longer prompt, unless it knows of a
        # grammar, which would begin again.
        raise InvalidRequest(f"{name} belongs in the body, not in x-dynamo-meta-{HEADER}", name)
    return fields


def exact(value: Any) -> Any:
    """Dynamo keeps fractions in 32 bits: 0.9 comes as 0.8999999761581421."""
    return float(f"{value:.7g}") if isinstance(value, float) else value


def chunk_of(index: int, step: StepOutput, tokenizer: Tokenizer, top: int | None) -> Fields:
    """`top`: how many alternatives the request wants; None: no log-probabilities."""
    chunk: Fields = {"token_ids": step.tokens, "index": index}
    if top is not None and step.logprobs is not None:
        chunk["log_probs"] = [token_logprob.logprob for token_logprob in step.logprobs]
        if top:
            chunk["top_logprobs"] = [
                [alternative(tokenizer, rank, *one) for rank, one in enumerate(token_logprob.top, 1)]
                for token_logprob in step.logprobs
            ]
    if step.finish is not None:
        chunk["finish_reason"] = "cancelled" if step.finish is Finish.ABORT else step.finish.value
    return chunk


def alternative(tokenizer: Tokenizer, rank: int, token: int, logprob: float) -> Fields:
    spelled = tokenizer.token_bytes(token)
    return {
        "rank": rank,
        "token_id": token,
        "token": spelled.decode(errors="replace"),
        "logprob": logprob,
        "bytes": list(spelled),
    }


def last_of(usage: Usage, prompt: list[int], scores: list[TokenLogprob], tokenizer: Tokenizer) -> Fields:
    """What the answer's last chunk has beside its tokens. `engine_data` reaches clients that ask for it by
    nvext.extra_fields."""
    token_usage = usage.object()
    counted = {
        "prompt_tokens": token_usage.prompt_tokens,
        "completion_tokens": token_usage.completion_tokens,
        "total_tokens": token_usage.total_tokens,
    }
    data: Fields = {"usage": msgspec.to_builtins(token_usage)}
    if scores:
        data["prompt_logprobs"] = [
            None,
            *(scored(tokenizer, token, score) for token, score in zip(prompt[1:], scores, strict=False)),
        ]
    cached = {"cached_tokens": token_usage.prompt_tokens_details.cached_tokens}
    return {"completion_usage": counted | {"prompt_tokens_details": cached}, "engine_data": data}


def scored(tokenizer: Tokenizer, token: int, score: TokenLogprob) -> Fields:
    """A prompt token and the alternatives to it, by id, as in vLLM."""
    ranked = [
        (token, score.logprob, score.rank),
        *((other, logprob, rank) for rank, (other, logprob) in enumerate(score.top, 1)),
    ]
    return {
        str(id): {
            "logprob": logprob,
            "rank": rank,
            "decoded_token": tokenizer.token_bytes(id).decode(errors="replace"),
        }
        for id, logprob, rank in ranked
    }
