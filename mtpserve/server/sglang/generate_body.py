"""The body of POST /generate, SGLang's native route, and its way to SamplingParams."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import ConfigDict, Field, ValidatorFunctionWrapHandler, WrapValidator

from mtpserve.core.errors import InvalidRequest
from mtpserve.core.protocols.adapters import LoRARequest
from mtpserve.core.sampling import MAX_COUNT, SamplingParams
from mtpserve.server.chat.constraints import constraint, thinking_budget
from mtpserve.server.chat.forms import GRAMMAR
from mtpserve.server.schema.base import (
    MAX_CHOICES,
    MAX_PROMPTS,
    MAX_SEQUENCES,
    RequestId,
    Salted,
    Strict,
    Texts,
    Timeout,
    Tokens,
)
from mtpserve.server.schema.fields import biases, custom, either, texts
from mtpserve.server.schema.kv_transfer import TransferFields
from mtpserve.server.schema.shapes import PROMPT, SAMPLING, Schema, one_of

DEFAULT_MAX_TOKENS = 128  # SGLang's
TOP = SAMPLING["logprobs"]


class NativeSampling(Strict):
    """SGLang's names. None: not given. Unknown ones are refused, there as here."""

    model_config = ConfigDict(extra="forbid", strict=True)
    column = "sampling_params"
    shapes: ClassVar[dict[str, Schema]] = {
        "max_new_tokens": SAMPLING["max_tokens"] | {"minimum": 0},
        "min_new_tokens": SAMPLING["min_tokens"],
        "sampling_seed": SAMPLING["seed"],
        "n": {"minimum": 1, "maximum": MAX_CHOICES},
        **dict.fromkeys(("json_schema", "regex", "ebnf", "structural_tag"), GRAMMAR),
    }

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    sampling_seed: int | None = None
    stop: Annotated[str | Texts | None, either("a string or a list of strings")] = None
    stop_token_ids: Tokens | None = None
    no_stop_trim: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    n: int | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    logit_bias: dict[str, float] | None = None
    custom_params: dict[str, Any] | None = None

    @property
    def scores_only(self) -> bool:
        return self.max_new_tokens == 0

    def params(self, defaults: dict[str, float | int]) -> SamplingParams:
        """Raises InvalidRequest with the names of SamplingParams, which are SGLang's but for three."""
        names = (
            "temperature",
            "top_p",
            "top_k",
            "min_p",
            "repetition_penalty",
            "frequency_penalty",
            "presence_penalty",
        )
        options: dict[str, Any] = defaults | {
            name: value for name in names if (value := getattr(self, name)) is not None
        }
        form = {"json_schema": self.json_schema, "regex": self.regex, "ebnf": self.ebnf}
        if self.structural_tag is not None:
            form["structured_outputs"] = {"structural_tag": self.structural_tag}  # type: ignore[assignment]
        return SamplingParams(
            max_tokens=1 if self.scores_only else self.max_new_tokens,
            min_tokens=self.min_new_tokens or 0,
            seed=self.sampling_seed,
            stop=texts("stop", [self.stop] if isinstance(self.stop, str) else self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            include_stop=bool(self.no_stop_trim),
            ignore_eos=bool(self.ignore_eos),
            skip_special_tokens=self.skip_special_tokens is not False,
            grammar=constraint(form),
            logit_bias=biases(self.logit_bias or {}),
            thinking_token_budget=thinking_budget(custom_params=self.custom_params),
            custom_params=custom(self.custom_params or {}),
            **options,
        )


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is asked for with one prompt. `scored_from`: the first token of the prompt whose log-probability
    is wanted, -1: none's."""

    sampling: NativeSampling
    logprobs: bool
    scored_from: int
    top_logprobs: int

    def scores(self, prompt: list[int]) -> bool:
        return self.logprobs and 0 <= self.scored_from < len(prompt)


def one_or_several(
    value: Any, _: ValidatorFunctionWrapHandler
) -> NativeSampling | list[NativeSampling] | None:
    """Errors name a field of the object that was given, and not of each that the union allows."""
    if isinstance(value, list):
        return [NativeSampling.model_validate(item) for item in value]
    return None if value is None else NativeSampling.model_validate(value)


PER_PROMPT = ("sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num")
CHECKED = (*PER_PROMPT, "lora_path")  # which of them may be lists


class NativeRequest(Salted, TransferFields):
    """Exactly one of `text` and `input_ids`; a list of either is answered by a list, and may have a list of
    what is asked for with each."""

    column = "generate"
    shapes: ClassVar[dict[str, Schema]] = {
        "text": {"minLength": 1, "minItems": 1, "maxItems": MAX_PROMPTS},
        "input_ids": {
            "anyOf": [PROMPT, {"type": "array", "items": PROMPT, "minItems": 1, "maxItems": MAX_PROMPTS}]
        },
        "logprob_start_len": {"minimum": -1, "items": {"type": "integer", "minimum": -1}},
        "top_logprobs_num": TOP | {"items": {"type": "integer"} | TOP},
    }
    rules: ClassVar[tuple[Schema, ...]] = (one_of("text", "input_ids"),)

    text: Annotated[str | Texts | None, either("a string or a list of strings")] = None
    input_ids: Annotated[
        Tokens | Annotated[list[Tokens], Field(fail_fast=True)] | None,
        either("a list of token ids, or a list of such lists"),
    ] = None
    sampling_params: Annotated[
        NativeSampling | list[NativeSampling] | None, WrapValidator(one_or_several)
    ] = None
    rid: Annotated[
        RequestId | list[RequestId] | None,
        either("an id of letters, digits, '.', '_', ':' and '-', or a list of such"),
    ] = None
    stream: bool | None = None
    return_logprob: Annotated[bool | list[bool] | None, either("true, false, or a list of these")] = None
    logprob_start_len: Annotated[int | Tokens | None, either("a number or a list of numbers")] = None
    top_logprobs_num: Annotated[int | Tokens | None, either("a number or a list of numbers")] = None
    return_text_in_logprobs: bool | None = None
    return_routed_experts: bool | None = None
    routed_experts_start_len: Annotated[int, Field(ge=0, le=MAX_COUNT)] | None = None
    priority: int | None = None
    lora_path: Annotated[str | list[str | None] | None, either("an adapter's name, or a list of such")] = None
    timeout: Timeout | None = None  # ours

    def check(self) -> None:
        if (self.text is None) == (self.input_ids is None):
            raise InvalidRequest("give either text or input_ids", "text")
        if not 1 <= self.choices <= MAX_CHOICES:
            raise InvalidRequest(f"n must be in [1, {MAX_CHOICES}], got {self.choices}", "n")
        count = len(self.prompts)
        if count > MAX_PROMPTS or count * self.choices > MAX_SEQUENCES:
            allowed = f"at most {MAX_PROMPTS} prompts and {MAX_SEQUENCES} texts are allowed"
            raise InvalidRequest(
                f"{self.field} has {count} prompts and n is {self.choices}: {allowed}", self.field
            )
        if isinstance(self.rid, list) and (
            len(set(self.rid)) != len(self.rid) or len(self.rid) != count or not self.listed
        ):
            raise InvalidRequest(
                f"rid must be one id, or one for each of {count} prompts in a list, all different", "rid"
            )
        for name in CHECKED:
            value = getattr(self, name)
            if isinstance(value, list) and (len(value) != count or not self.listed):
                raise InvalidRequest(
                    f"{name} must be one value, or one for each of {count} prompts in a list, got "
                    f"{len(value)}",
                    name,
                )
        for options in self.prompt_options():
            if options.scored_from < -1:
                raise InvalidRequest(
                    f"logprob_start_len must be at least -1, got {options.scored_from}",
                    "logprob_start_len",
                )
            if options.top_logprobs and not options.logprobs:
                raise InvalidRequest("top_logprobs_num needs return_logprob to be true", "top_logprobs_num")
            if (options.sampling.n or 1) != self.choices:
                raise InvalidRequest(
                    f"n must be the same for all prompts, got {self.choices} and {options.sampling.n or 1}",
                    "n",
                )

    def lora_of(self, prompt: int, loras: Mapping[str, LoRARequest]) -> LoRARequest | None:
        """Returns the adapter of one of several prompts. Raises InvalidRequest."""
        name = self.lora_path[prompt] if isinstance(self.lora_path, list) else self.lora_path
        if name is None:
            return None
        if name not in loras:
            loaded = ", ".join(map(repr, loras)) or "none"
            raise InvalidRequest(
                f"lora_path must be the name of an adapter, got {name[:200]!r}; loaded: {loaded}", "lora_path"
            )
        return loras[name]

    def prompt_options(self) -> list[Wanted]:
        """What the client wants of each prompt."""
        count = len(self.prompts)
        columns = [getattr(self, name) for name in PER_PROMPT]
        rows = zip(
            *(values if isinstance(values, list) else [values] * count for values in columns), strict=True
        )
        return [
            Wanted(sampling or NativeSampling(), bool(logprobs), -1 if start is None else start, top or 0)
            for sampling, logprobs, start, top in rows
        ]

    @property
    def field(self) -> str:
        return "text" if self.text is not None else "input_ids"

    @property
    def choices(self) -> int:
        """The number of choices of each prompt."""
        params = (
            self.sampling_params[:1] if isinstance(self.sampling_params, list) else [self.sampling_params]
        )
        return next((one.n for one in params if one is not None and one.n is not None), 1)

    @property
    def listed(self) -> bool:
        """Several prompts, though it may be a list of one."""
        ids = self.input_ids
        return isinstance(self.text, list) or (bool(ids) and isinstance(ids[0], list))  # type: ignore[index]

    @property
    def prompts(self) -> list[str | list[int]]:
        raw_prompts: Any = self.text if self.text is not None else self.input_ids
        if not raw_prompts:
            raise InvalidRequest(f"{self.field} is empty", self.field)
        return list(raw_prompts) if self.listed else [raw_prompts]
