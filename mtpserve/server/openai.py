"""OpenAI's request bodies: what is understood, what is refused by name, and the way to SamplingParams. No responses here.

Three kinds of fields. Supported ones are declared. Known ones that a later release will support are in UNSUPPORTED with the
values that ask for nothing; those pass, any other value is refused: a silently ignored field gives wrong answers. All the rest
is unknown and refused too.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator, model_validator
from pydantic_core import PydanticCustomError

from mtpserve.core.errors import InvalidRequest
from mtpserve.core.sampling import SamplingParams

MAX_PROMPTS = 128

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": (None, []),
    "audio": (None,),
    "bad_words": (None, []),
    "best_of": (None, 1),
    "cache_salt": (None,),
    "chat_template": (None,),
    "chat_template_kwargs": (None, {}),
    "continue_final_message": (None, False),
    "documents": (None, []),
    "ebnf": (None,),
    "echo": (None, False),
    "frequency_penalty": (None, 0),
    "function_call": (None, "none", "auto"),
    "functions": (None, []),
    "guided_json": (None,),
    "json_schema": (None,),
    "length_penalty": (None, 1),
    "logit_bias": (None, {}),
    "logprobs": (None, False),
    "lora_path": (None,),
    "min_tokens": (None, 0),
    "modalities": (None, ["text"]),
    "n": (None, 1),
    "no_stop_trim": (None, False),
    "prediction": (None,),
    "presence_penalty": (None, 0),
    "priority": (None, 0),
    "prompt_embeds": (None,),
    "prompt_logprobs": (None,),
    "reasoning_effort": (None,),
    "regex": (None,),
    "repetition_penalty": (None, 1),
    "response_format": (None, {"type": "text"}),
    "return_hidden_states": (None, False),
    "return_token_ids": (None, False),
    "service_tier": (None, "auto", "default"),
    "spaces_between_special_tokens": (None, True),
    "stop_regex": (None, []),
    "store": (None, False),
    "structured_outputs": (None,),
    "suffix": (None, ""),
    "tool_choice": (None, "none", "auto"),
    "tools": (None, []),
    "top_logprobs": (None, 0),
    "truncate_prompt_tokens": (None,),
    "use_beam_search": (None, False),
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
}
# Say something about the caller or about caches elsewhere and change no answer.
IGNORED = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_key", "parallel_tool_calls", "request_id", "rid"})

Tokens = Annotated[list[int], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]


def same(value: Any, neutral: Any) -> bool:
    """Equal, and False is not 0."""
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)


def either(kinds: str) -> WrapValidator:
    """One message for a union, instead of one for each of its members."""

    def validate(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise PydanticCustomError("kinds", "must be {kinds}", {"kinds": kinds}) from None

    return WrapValidator(validate)


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(Strict):
    include_usage: bool | None = None
    continuous_usage_stats: Annotated[bool | None, Field(description="only false is supported")] = None
    include_obfuscation: bool | None = None  # OpenAI pads its chunks against eavesdroppers; there is nothing to leave out here


class GenerationRequest(Strict):
    """What both endpoints share. None: not given."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: Annotated[str | Texts | None, either("a string or a list of strings")] = None
    stop_token_ids: Tokens | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="before")
    @classmethod
    def refuse_by_name(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        for name in sorted(body.keys() & UNSUPPORTED.keys()):
            if not any(same(body[name], neutral) for neutral in UNSUPPORTED[name]):
                raise InvalidRequest(f"{name} is not supported yet: leave it out", name)
        return {name: value for name, value in body.items() if name not in UNSUPPORTED and name not in IGNORED}

    def check(self) -> None:
        options = self.stream_options
        if options is None:
            return
        if not self.stream:
            raise InvalidRequest("stream_options needs stream to be true", "stream_options")
        if options.continuous_usage_stats:
            raise InvalidRequest("stream_options.continuous_usage_stats is not supported yet: leave it out", "stream_options")

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_tokens

    def sampling(self, defaults: dict[str, float | int], max_tokens: int | None) -> SamplingParams:
        """`defaults` are the model's own recommendations; what the request says goes before them."""
        given = {name: getattr(self, name) for name in ("temperature", "top_p", "top_k", "min_p")}
        chosen: dict[str, Any] = defaults | {name: value for name, value in given.items() if value is not None}
        return SamplingParams(
            max_tokens=max_tokens,
            seed=self.seed,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            include_stop=bool(self.include_stop_str_in_output),
            skip_special_tokens=self.skip_special_tokens is not False,
            **chosen,
        )


class CompletionRequest(GenerationRequest):
    prompt: Annotated[
        str | Texts | Tokens | Annotated[list[Tokens], Field(fail_fast=True)],
        either("a string, a list of strings, a list of token ids, or a list of such lists"),
    ]
    add_special_tokens: bool | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """One or several, each a text or tokens."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise InvalidRequest("prompt is empty", "prompt")
        if isinstance(prompt[0], int):
            return [prompt]
        if len(prompt) > MAX_PROMPTS:
            raise InvalidRequest(f"prompt has {len(prompt)} prompts, at most {MAX_PROMPTS} are allowed", "prompt")
        return list(prompt)


class ContentPart(Strict):
    type: str
    text: str | None = None
    model_config = ConfigDict(extra="allow", strict=True)


class ChatMessage(BaseModel):
    """Extra keys pass only when they are null, since clients send back whole messages that they were given."""

    model_config = ConfigDict(extra="allow", strict=True)

    role: str
    content: Annotated[
        str | Annotated[list[ContentPart], Field(fail_fast=True)] | None,
        either("a string or a list of parts like {'type': 'text', 'text': ...}"),
    ] = None
    name: str | None = None
    reasoning_content: str | None = None

    def for_template(self) -> dict[str, Any]:
        if self.role not in ("system", "developer", "user", "assistant"):
            raise InvalidRequest(
                f"messages: role {self.role[:50]!r} is not supported; system, developer, user and assistant are", "messages"
            )
        for name, value in (self.model_extra or {}).items():
            if value not in (None, []):
                raise InvalidRequest(f"messages: {name[:50]} is not supported yet: leave it out", "messages")
        message: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": self.text()}
        for name in ("name", "reasoning_content"):
            if (value := getattr(self, name)) is not None:
                message[name] = value
        return message

    def text(self) -> str:
        if isinstance(self.content, str) or self.content is None:
            return self.content or ""
        for part in self.content:
            if part.type != "text" or part.text is None:
                raise InvalidRequest(f"messages: content of type {part.type[:50]!r} is not supported; only text is", "messages")
        return "\n".join(part.text or "" for part in self.content)


class ChatRequest(GenerationRequest):
    messages: Annotated[list[ChatMessage], Field(fail_fast=True)]
    max_completion_tokens: int | None = None
    add_generation_prompt: bool | None = None

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
