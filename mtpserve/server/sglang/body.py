"""The body of POST /generate, SGLang's native route, and its way to SamplingParams."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import ConfigDict, Field

from mtpserve.core.errors import InvalidRequest
from mtpserve.core.sampling import SamplingParams
from mtpserve.server.body import MAX_CHOICES, MAX_PROMPTS, MAX_SEQUENCES, RequestId, Salted, Strict, Texts, Timeout, Tokens
from mtpserve.server.constraints import constraint
from mtpserve.server.fields import custom, either, texts

DEFAULT_MAX_TOKENS = 128  # SGLang's


class NativeSampling(Strict):
    """SGLang's names. None: not given. Unknown ones are refused, there as here."""

    model_config = ConfigDict(extra="forbid", strict=True)
    column = "sampling_params"

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
    custom_params: dict[str, Any] | None = None

    def params(self, defaults: dict[str, float | int]) -> SamplingParams:
        """Raises InvalidRequest with the names of SamplingParams, which are SGLang's but for three."""
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")
        chosen: dict[str, Any] = defaults | {name: value for name in names if (value := getattr(self, name)) is not None}
        form = {"json_schema": self.json_schema, "regex": self.regex, "ebnf": self.ebnf}
        if self.structural_tag is not None:
            form["structured_outputs"] = {"structural_tag": self.structural_tag}  # type: ignore[assignment]
        return SamplingParams(
            max_tokens=self.max_new_tokens,
            min_tokens=self.min_new_tokens or 0,
            seed=self.sampling_seed,
            stop=texts("stop", [self.stop] if isinstance(self.stop, str) else self.stop or ()),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            include_stop=bool(self.no_stop_trim),
            ignore_eos=bool(self.ignore_eos),
            skip_special_tokens=self.skip_special_tokens is not False,
            grammar=constraint(form),
            custom_params=custom(self.custom_params or {}),
            **chosen,
        )


class NativeRequest(Salted):
    """Exactly one of `text` and `input_ids`; a list of either is answered by a list."""

    column = "generate"

    text: Annotated[str | Texts | None, either("a string or a list of strings")] = None
    input_ids: Annotated[
        Tokens | Annotated[list[Tokens], Field(fail_fast=True)] | None, either("a list of token ids, or a list of such lists")
    ] = None
    sampling_params: NativeSampling | None = None
    rid: Annotated[RequestId | list[RequestId] | None, either("an id of letters, digits, '.', '_', ':' and '-', or a list of such")] = None
    stream: bool | None = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = None
    top_logprobs_num: int | None = None
    return_text_in_logprobs: bool | None = None
    priority: int | None = None
    timeout: Timeout | None = None  # ours

    def check(self) -> None:
        if (self.text is None) == (self.input_ids is None):
            raise InvalidRequest("give either text or input_ids", "text")
        if not 1 <= self.choices <= MAX_CHOICES:
            raise InvalidRequest(f"n must be in [1, {MAX_CHOICES}], got {self.choices}", "n")
        count = len(self.prompts)
        if count > MAX_PROMPTS or count * self.choices > MAX_SEQUENCES:
            allowed = f"at most {MAX_PROMPTS} prompts and {MAX_SEQUENCES} texts are allowed"
            raise InvalidRequest(f"{self.field} has {count} prompts and n is {self.choices}: {allowed}", self.field)
        if isinstance(self.rid, list) and (len(set(self.rid)) != len(self.rid) or len(self.rid) != count or not self.listed):
            raise InvalidRequest(f"rid must be one id, or one for each of {count} prompts in a list, all different", "rid")
        if self.logprob_start_len is not None and self.logprob_start_len < -1:
            raise InvalidRequest(f"logprob_start_len must be at least -1, got {self.logprob_start_len}", "logprob_start_len")
        if self.top_logprobs_num and not self.return_logprob:
            raise InvalidRequest("top_logprobs_num needs return_logprob to be true", "top_logprobs_num")

    @property
    def field(self) -> str:
        return "text" if self.text is not None else "input_ids"

    @property
    def choices(self) -> int:
        given = None if self.sampling_params is None else self.sampling_params.n
        return 1 if given is None else given

    @property
    def listed(self) -> bool:
        """Several prompts, though it may be a list of one."""
        return isinstance(self.text, list) or (bool(self.input_ids) and isinstance(self.input_ids[0], list))  # type: ignore[index]

    @property
    def prompts(self) -> list[str | list[int]]:
        given: Any = self.text if self.text is not None else self.input_ids
        if not given:
            raise InvalidRequest(f"{self.field} is empty", self.field)
        return list(given) if self.listed else [given]
