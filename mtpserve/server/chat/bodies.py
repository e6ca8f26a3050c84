"""The bodies of /v1/completions and /v1/chat/completions, and their way to SamplingParams. Other APIs are
converted to a ChatRequest."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from mtpserve.core.errors import InvalidRequest
from mtpserve.core.sampling import MAX_COUNT, MAX_STEPS, SAMPLING_FIELDS, SamplingParams, Speculation
from mtpserve.server.chat import forms
from mtpserve.server.chat.constraints import NATIVE, constraint, thinking_budget
from mtpserve.server.chat.conversation import Messages
from mtpserve.server.http.errors import Unsupported
from mtpserve.server.schema.base import (
    MAX_CHOICES,
    MAX_PROMPTS,
    MAX_SEQUENCES,
    Effort,
    Label,
    Metadata,
    RequestId,
    Salted,
    Strict,
    Texts,
    Timeout,
    Tokens,
)
from mtpserve.server.schema.fields import biases, custom, either, predicted, texts
from mtpserve.server.schema.kv_transfer import TransferFields
from mtpserve.server.schema.shapes import (
    CLAMPED_TOKENS,
    NULL,
    PROMPT,
    SAMPLING,
    Schema,
    needs,
    not_both,
)

CHOICES: Schema = {"minimum": 1, "maximum": MAX_CHOICES}
TEXTS: Schema = {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_PROMPTS}


NOT_BOTH_ENDS: Schema = {
    "anyOf": [
        {"properties": {name: {"enum": [None, False]}}}
        for name in ("continue_final_message", "add_generation_prompt")
    ]
}


BudgetTokens = Annotated[int, Field(ge=0, le=MAX_COUNT)]


class StreamOptions(Strict):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    # OpenAI pads its chunks against eavesdroppers; there is nothing to leave out here
    include_obfuscation: bool | None = None


class SpeculativeOptions(Strict):
    """Ours: whether and how deep to draft for this request. The output's distribution is the same."""

    model_config = ConfigDict(extra="forbid", strict=True)
    shapes: ClassVar[dict[str, Schema]] = {"num_steps": {"minimum": 0, "maximum": MAX_STEPS}}

    enabled: bool | None = None
    num_steps: int | None = None


class SamplingFields(Salted):
    """What every conversation may ask of sampling and of the prefix cache, in the words of both peers. None:
    not given."""

    shapes: ClassVar[dict[str, Schema]] = {"prediction": {"anyOf": [forms.PREDICTION]}}

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: Annotated[str | Texts | None, either("a string or a list of strings")] = None
    stop_token_ids: Tokens | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    no_stop_trim: bool | None = None  # SGLang's name for the same
    skip_special_tokens: bool | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: Tokens | None = None
    bad_words: Texts | None = None
    min_tokens: int | None = None
    thinking_token_budget: int | None = None
    custom_params: dict[str, Any] | None = None
    priority: int | None = None
    prediction: dict[str, Any] | None = None
    speculative: SpeculativeOptions | None = None


class GenerationRequest(SamplingFields, TransferFields):
    """What both endpoints share. None: not given."""

    shapes: ClassVar[dict[str, Schema]] = {
        "n": CHOICES,
        "best_of": CHOICES,
        "response_format": forms.RESPONSE_FORMAT,
        "structured_outputs": forms.STRUCTURED_OUTPUTS,
        "truncate_prompt_tokens": {"minimum": -1, "not": {"const": 0}},
        **forms.GRAMMARS,
    }
    rules: ClassVar[tuple[Schema, ...]] = (needs("stream_options", "stream"), not_both("rid", "request_id"))

    model: str | None = None
    max_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    best_of: int | None = None
    prompt_logprobs: int | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Texts | None = None
    guided_grammar: str | None = None
    return_spec_trace: bool | None = None
    return_token_ids: bool | None = None
    return_routed_experts: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] | None = None  # where tokens are cut off; None is left
    rid: RequestId | None = None  # SGLang's name for the id of the answer, which /abort_request takes
    request_id: RequestId | None = None  # vLLM's
    timeout: Timeout | None = None
    user: Label | None = None  # this and the next ones say something about the caller and change no answer
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None
    metadata: Metadata | None = None

    def check(self) -> None:
        if not 1 <= self.choices <= MAX_CHOICES:
            raise InvalidRequest(f"n must be in [1, {MAX_CHOICES}], got {self.choices}", "n")
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream to be true", "stream_options")
        if self.truncate_prompt_tokens is not None and (
            self.truncate_prompt_tokens < -1 or self.truncate_prompt_tokens == 0
        ):
            limit = self.truncate_prompt_tokens
            raise InvalidRequest(
                f"truncate_prompt_tokens must be at least 1, or -1 for what fits, got {limit}",
                "truncate_prompt_tokens",
            )
        if self.rid is not None and self.request_id is not None:
            raise InvalidRequest("rid and request_id name the same thing: give one of them", "request_id")

    @property
    def keeps_first(self) -> bool:
        """True if truncation keeps the prompt's first tokens."""
        return self.truncation_side == "right"

    @property
    def continuous_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def choices(self) -> int:
        """The number of answers to each prompt."""
        return 1 if self.n is None else self.n

    @property
    def generated(self) -> int:
        """The number of choices that are generated for each prompt, the answered ones among them."""
        return self.choices

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_tokens

    @property
    def top_logprobs_wanted(self) -> int | None:
        """The number of alternatives; None: no log-probabilities."""
        return None

    @property
    def thinking_budgets(self) -> tuple[int | None, ...]:
        """The fields that limit the reasoning; the first that is set counts."""
        return (self.thinking_token_budget,)

    @property
    def names_sampling(self) -> bool:
        """True if the request chooses a distribution of its own, or a part of one."""
        return any(getattr(self, name) is not None for name in SAMPLING_FIELDS)

    def speculation(self) -> Speculation:
        options = self.speculative or SpeculativeOptions()
        return Speculation(
            enabled=options.enabled is not False,
            num_steps=options.num_steps,
            prediction=predicted(self.prediction),
            trace=bool(self.return_spec_trace),
        )

    def sampling(self, defaults: dict[str, float | int], max_tokens: int | None) -> SamplingParams:
        """`defaults`: of fields that the request leaves out."""
        values = {name: getattr(self, name) for name in GIVEN}
        params: dict[str, Any] = defaults | {
            name: value for name, value in values.items() if value is not None
        }
        if self.keeps:  # a router that asks for the prompt alone leaves it in
            params.pop("min_tokens", None)
        return SamplingParams(
            max_tokens=max_tokens,
            seed=self.seed,
            stop=texts("stop", [self.stop] if isinstance(self.stop, str) else self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            ignore_eos=bool(self.ignore_eos),
            include_stop=bool(self.include_stop_str_in_output or self.no_stop_trim),
            skip_special_tokens=self.skip_special_tokens is not False,
            logit_bias=biases(self.logit_bias or {}),
            allowed_token_ids=tuple(self.allowed_token_ids or ()),
            bad_words=texts("bad_words", self.bad_words or ()),
            logprobs=self.top_logprobs_wanted,
            prompt_logprobs=self.prompt_logprobs,
            grammar=constraint(
                {name: getattr(self, name) for name in (*NATIVE, "response_format", "structured_outputs")}
            ),
            thinking_token_budget=thinking_budget(*self.thinking_budgets, custom_params=self.custom_params),
            custom_params=custom(self.custom_params or {}),
            speculation=self.speculation(),
            return_routed_experts=bool(self.return_routed_experts),
            **params,
        )


# Fields of SamplingParams whose own default holds where nothing is given.
GIVEN = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty",
    "min_tokens", "priority",
)  # fmt: skip


class CompletionRequest(GenerationRequest):
    column = "completions"
    shapes: ClassVar[dict[str, Schema]] = {
        "prompt": {
            "anyOf": [
                {"type": "string"},
                TEXTS,
                PROMPT,
                {"type": "array", "items": PROMPT, "minItems": 1, "maxItems": MAX_PROMPTS},
            ]
        },
        "max_tokens": SAMPLING["max_tokens"] | {"minimum": 0},
        "suffix": {"maxLength": 0},
    }
    rules: ClassVar[tuple[Schema, ...]] = (
        needs("max_tokens", "echo", unless={"anyOf": [NULL, {"type": "integer", "minimum": 1}]}),
    )

    prompt: Annotated[
        str | Texts | Tokens | Annotated[list[Tokens], Field(fail_fast=True)],
        either("a string, a list of strings, a list of token ids, or a list of such lists"),
    ]
    add_special_tokens: bool | None = None
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None

    def check(self) -> None:
        GenerationRequest.check(self)
        if self.suffix:
            raise Unsupported(
                "suffix is not supported: this server has no fill-in-the-middle template", "suffix"
            )
        if not self.choices <= self.generated <= MAX_CHOICES:
            raise InvalidRequest(
                f"best_of must be in [n = {self.choices}, {MAX_CHOICES}], got {self.best_of}", "best_of"
            )
        if self.selects and self.stream:
            raise InvalidRequest(
                f"best_of {self.best_of} > n = {self.choices} excludes stream: the best are known at the end",
                "best_of",
            )
        if len(self.prompts) * self.generated > MAX_SEQUENCES:
            field = "best_of" if self.selects else "n"
            count = f"{len(self.prompts)} prompts with {field} = {self.generated}"
            raise InvalidRequest(f"prompt asks for {count}; at most {MAX_SEQUENCES} texts are allowed", field)
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequest(
                "max_tokens must be at least 1, or 0 together with echo, got 0", "max_tokens"
            )

    @property
    def generated(self) -> int:
        return self.choices if self.best_of is None else self.best_of

    @property
    def selects(self) -> bool:
        return self.generated > self.choices

    @property
    def top_logprobs_wanted(self) -> int | None:
        return self.logprobs

    def sampling(self, defaults: dict[str, float | int], max_tokens: int | None) -> SamplingParams:
        params = GenerationRequest.sampling(self, defaults, max_tokens)
        # the best choices are found by their log-probabilities
        return replace(params, logprobs=params.logprobs or 0) if self.selects else params

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, each a text or tokens."""
        prompt = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise InvalidRequest("prompt is empty", "prompt")
        if isinstance(prompt[0], int):
            return [prompt]
        if len(prompt) > MAX_PROMPTS:
            raise InvalidRequest(
                f"prompt has {len(prompt)} prompts, at most {MAX_PROMPTS} are allowed", "prompt"
            )
        return list(prompt)


class ReasoningOptions(Strict):
    """`reasoning` in SGLang's and OpenRouter's form. It goes before `reasoning_effort`."""

    model_config = ConfigDict(extra="forbid", strict=True)
    shapes: ClassVar[dict[str, Schema]] = {"max_tokens": {"minimum": 0, "maximum": MAX_COUNT}}

    effort: Effort | None = None
    enabled: bool | None = None
    exclude: bool | None = None
    max_tokens: BudgetTokens | None = None


class ThinkingSwitch(Strict):
    """`thinking` in DeepSeek's and GLM's form; `reasoning` and `reasoning_effort` go before it."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: BudgetTokens | None = None


class ChatRequest(GenerationRequest):
    column = "chat"
    shapes: ClassVar[dict[str, Schema]] = {
        "messages": {"minItems": 1},
        "max_tokens": CLAMPED_TOKENS,
        "max_completion_tokens": CLAMPED_TOKENS,
        "top_logprobs": SAMPLING["logprobs"],
        "tools": forms.TOOLS,
        "tool_choice": forms.TOOL_CHOICE,
        "chat_template_kwargs": forms.VARIABLES,
    }
    rules: ClassVar[tuple[Schema, ...]] = (
        needs("top_logprobs", "logprobs", unless={"enum": [None, 0]}),
        NOT_BOTH_ENDS,
        forms.DEMANDED,
    )

    messages: Messages
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    tools: list[Any] | None = None
    tool_choice: Annotated[str | dict[str, Any] | None, either("a string or an object")] = None
    parallel_tool_calls: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Effort | None = None
    reasoning: ReasoningOptions | None = None
    thinking: ThinkingSwitch | None = None
    separate_reasoning: bool | None = None  # False: reasoning stays in the content, as the model wrote it
    include_reasoning: bool | None = None  # False: it is left out

    def check(self) -> None:
        GenerationRequest.check(self)
        if self.best_of not in (None, 1, self.choices):
            raise Unsupported(
                f"best_of is a field of completions, got {self.best_of} here: leave it out", "best_of"
            )
        if self.continue_final_message:
            if self.add_generation_prompt:
                raise InvalidRequest(
                    "continue_final_message excludes add_generation_prompt: give one of them",
                    "continue_final_message",
                )
            if not self.messages or self.messages[-1].role != "assistant":
                raise InvalidRequest(
                    "continue_final_message needs a last message of role assistant", "continue_final_message"
                )
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true", "top_logprobs")
        if (self.top_logprobs or 0) < 0:
            raise InvalidRequest(f"top_logprobs must be at least 0, got {self.top_logprobs}", "top_logprobs")

    @property
    def thinking_budgets(self) -> tuple[int | None, ...]:
        thinking = None if self.thinking is None else self.thinking.budget_tokens
        reasoning = None if self.reasoning is None else self.reasoning.max_tokens
        return self.thinking_token_budget, thinking, reasoning

    @property
    def effort(self) -> Effort | None:
        effort = None if self.reasoning is None else self.reasoning.effort
        return self.reasoning_effort or ("none" if self.thinks is False else effort)

    @property
    def thinks(self) -> bool | None:
        """True if the model shall reason; None if the client does not say it."""
        if self.reasoning is not None and self.reasoning.enabled is not None:
            return self.reasoning.enabled
        return None if self.thinking is None else self.thinking.type != "disabled"

    @property
    def template_kwargs(self) -> dict[str, Any]:
        return ({"enable_thinking": True} if self.thinks else {}) | (self.chat_template_kwargs or {})

    @property
    def shows_reasoning(self) -> bool:
        return self.include_reasoning is not False and not (
            self.reasoning is not None and self.reasoning.exclude
        )

    @property
    def top_logprobs_wanted(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
