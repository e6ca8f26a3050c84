"""A request's sampling parameters, validated once, for the HTTP server and the offline engine alike."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from mtpserve.core.errors import InvalidRequest

# the parameters that models' makers recommend
SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p")
MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 256
MAX_STOP_IDS = 1024
MAX_BIASED = 1024
MAX_BIAS = 100
MAX_BAD_WORDS = 256
MAX_LOGPROBS = 20  # OpenAI's limit, where --max-logprobs does not say
MAX_GRAMMAR_BYTES = 1 << 20
MIN_PENALTY = 1e-6  # a smaller one makes logits overflow
# a token count that no vocabulary or context reaches, and that fits into the engine's tensors
MAX_COUNT = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Range:
    """Which numbers a parameter may be: what is checked, and what the HTTP server's OpenAPI document says.
    `allowed` where a message says it in other words; `open`: `low` itself is not one of them. No infinity and
    no NaN is in one."""

    low: float
    high: float
    allowed: str = ""
    open: bool = False

    def __contains__(self, value: float) -> bool:
        return (self.low < value if self.open else self.low <= value) and value <= self.high

    @property
    def words(self) -> str:
        return self.allowed or (
            f"at least {self.low}"
            if self.high == math.inf
            else f"in {'(' if self.open else '['}{self.low}, {self.high}]"
        )


# The allowed values of SamplingParams' fields.
RANGES = {
    "max_tokens": Range(1, math.inf),
    "temperature": Range(0, 100),
    "top_k": Range(-1, MAX_COUNT, f"-1 or 0 (off) or at most {MAX_COUNT}"),
    "top_p": Range(0, 1, open=True),
    "min_p": Range(0, 1),
    "seed": Range(-(2**63), 2**63 - 1, "a 64-bit signed integer"),
    "repetition_penalty": Range(MIN_PENALTY, 2),
    "frequency_penalty": Range(-2, 2),
    "presence_penalty": Range(-2, 2),
    "min_tokens": Range(0, MAX_COUNT),
    "thinking_token_budget": Range(0, MAX_COUNT),
    "priority": Range(-(2**31), 2**31 - 1, "a 32-bit signed integer"),
    "logprobs": Range(0, MAX_COUNT, "at least 0"),  # see check_logprobs
    "prompt_logprobs": Range(0, MAX_COUNT, "at least 0"),
}
MAX_STEPS = 63  # that a request may ask for

# "any_text" constrains nothing; it stands beside a `thinking` budget.
GrammarKind = Literal[
    "json_object", "json_schema", "regex", "choice", "ebnf", "structural_tag", "tool_calls", "any_text"
]
# Tokens that steps in flight and drafts may be ahead of what the host knows.
BUDGET_MARGIN = 256


@dataclass(frozen=True, slots=True)
class ThinkingBudget:
    """A limit on the reasoning at the beginning of an output.

    `start`, `end`: the texts around reasoning. `is_open`: the output begins inside. After `num_tokens` tokens
    of reasoning without `end`, the output goes on with `closing_ids`.
    """

    num_tokens: int
    start: str
    end: str
    closing_ids: tuple[int, ...]
    is_open: bool


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A constraint on the output. `text` is a JSON schema, a regular expression, a JSON list of choices, a
    grammar in EBNF (Lark or GBNF), a JSON structural tag, or tool calls in Lark; empty for json_object.

    `front`, `instead`: rules in Lark, or empty: a rule `front` that comes before the constrained text, and a
    rule `calls`, tool calls that may replace it. `lead`: an expression in Lark, or empty: what comes right
    before the text, but not before these calls. `thinking`: a limit on the reasoning before all of it.
    `field`: the request's field, for errors.
    """

    kind: GrammarKind
    text: str = ""
    front: str = ""
    instead: str = ""
    lead: str = ""
    thinking: ThinkingBudget | None = None
    field: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if len(self.text) > MAX_GRAMMAR_BYTES:
            raise InvalidRequest(
                f"{self.kind} has {len(self.text)} characters, at most {MAX_GRAMMAR_BYTES} are allowed",
                self.field or self.kind,
            )

    @property
    def first_token(self) -> int:
        """The output's first token on which the constraint may bear."""
        budget = self.thinking if self.kind == "any_text" else None
        return 0 if budget is None else max(budget.num_tokens - BUDGET_MARGIN, 0)


@dataclass(frozen=True, slots=True)
class Speculation:
    """A request's settings of speculation. They never change the distribution of the output, only its speed.

    `num_steps` None: the server's depth. `prediction`: text that the output probably repeats.
    """

    enabled: bool = True
    num_steps: int | None = None
    prediction: str = ""
    trace: bool = False  # report for each step the proposed tokens, their source, and which were accepted

    def __post_init__(self) -> None:
        if self.num_steps is not None and not 0 <= self.num_steps <= MAX_STEPS:
            raise InvalidRequest(
                f"speculative.num_steps must be in [0, {MAX_STEPS}], got {self.num_steps!r}", "speculative"
            )

    @property
    def depth(self) -> int | None:
        return self.num_steps if self.enabled else 0


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Transforms apply in this order, each to the result of the one before: logit_bias, allowed_token_ids,
    bad_words, min_tokens, penalties, custom processors, the grammar; then temperature, top_k, top_p, min_p.

    temperature 0 is greedy; top_k 0 or -1, top_p 1 and min_p 0 are off. `max_tokens` None means: up to the
    context length. `seed` None: one is drawn at admission; with a seed the same request gives the same text
    whatever else is in the batch. Raises InvalidRequest with the field and the value.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop: bool = False  # keep the stop string in the text
    skip_special_tokens: bool = True
    # divides the positive logits of tokens in prompt and output, multiplies the negative ones
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0  # subtracted once per occurrence of the token in the output
    presence_penalty: float = 0.0  # subtracted once if the token occurs in the output
    logit_bias: Mapping[int, float] = field(default_factory=dict)  # added to the logits of token ids
    allowed_token_ids: tuple[int, ...] = ()  # empty: all
    bad_words: tuple[str, ...] = ()  # texts that the output must not contain, as token sequences
    min_tokens: int = 0  # tokens before a stop token is allowed
    logprobs: int | None = None  # log-probabilities of the output's tokens, and of this many alternatives
    prompt_logprobs: int | None = None  # the same for the prompt's tokens, except the first
    grammar: GrammarSpec | None = None
    thinking_token_budget: int | None = None  # tokens of reasoning; None: no limit of its own
    # for the logits processors given at launch
    custom_params: Mapping[str, object] = field(default_factory=dict)
    # lower ones are scheduled first with --scheduling-policy priority; no text depends on it
    priority: int = 0
    # the chosen experts of each token but the last, with --enable-return-routed-experts
    return_routed_experts: bool = False
    speculation: Speculation = Speculation()

    def __post_init__(self) -> None:
        def require(good: bool, field: str, allowed: str) -> None:
            if not good:
                raise InvalidRequest(f"{field} must be {allowed}, got {getattr(self, field)!r}", param=field)

        for name, range in RANGES.items():
            value = getattr(self, name)
            require(value is None or value in range, name, range.words)
        require(len(self.stop) <= MAX_STOP_STRINGS, "stop", f"at most {MAX_STOP_STRINGS} strings")
        require(
            all(0 < len(s) <= MAX_STOP_LENGTH for s in self.stop),
            "stop",
            f"strings of 1 to {MAX_STOP_LENGTH} characters",
        )
        require(len(self.stop_token_ids) <= MAX_STOP_IDS, "stop_token_ids", f"at most {MAX_STOP_IDS} ids")
        require(len(self.logit_bias) <= MAX_BIASED, "logit_bias", f"at most {MAX_BIASED} entries")
        require(
            all(-MAX_BIAS <= bias <= MAX_BIAS for bias in self.logit_bias.values()),
            "logit_bias",
            f"numbers in [-{MAX_BIAS}, {MAX_BIAS}]",
        )
        require(len(self.bad_words) <= MAX_BAD_WORDS, "bad_words", f"at most {MAX_BAD_WORDS} strings")
        require(
            all(0 < len(word) <= MAX_STOP_LENGTH for word in self.bad_words),
            "bad_words",
            f"strings of 1 to {MAX_STOP_LENGTH} characters",
        )
        require(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            "min_tokens",
            f"at most max_tokens = {self.max_tokens}",
        )

    def texts(self) -> list[tuple[str, str]]:
        """(field, text) of each parameter that is tokenised."""
        return [
            *(("bad_words", word) for word in self.bad_words),
            ("prediction", self.speculation.prediction),
        ]

    @property
    def used_prediction(self) -> str:
        """The client's prediction of the output; "" where the request turns speculation off."""
        return "" if self.speculation.depth == 0 else self.speculation.prediction

    def check_experts(self, available: bool) -> None:
        """Raises InvalidRequest where a request wants experts that the engine does not keep."""
        if self.return_routed_experts and not available:
            raise InvalidRequest(
                "return_routed_experts must be false without --enable-return-routed-experts, got True",
                "return_routed_experts",
            )

    def check_policy(self, policy: str) -> None:
        """Raises InvalidRequest for a priority where the scheduling policy ignores priorities."""
        if self.priority and policy != "priority":
            raise InvalidRequest(
                f"priority must be 0 unless --scheduling-policy is priority, got {self.priority}", "priority"
            )

    def check_logprobs(self, max_logprobs: int) -> None:
        """Raises InvalidRequest for more alternatives than the server's `max_logprobs`; -1: any number."""
        for name in ("logprobs", "prompt_logprobs"):
            if max_logprobs >= 0 and (getattr(self, name) or 0) > max_logprobs:
                raise InvalidRequest(
                    f"{name} must be in [0, {max_logprobs}], got {getattr(self, name)}: see --max-logprobs",
                    name,
                )

    def check_allowed(self, bad_words: Sequence[Sequence[int]], eos_ids: Collection[int]) -> None:
        """Raises InvalidRequest where constraints leave no first token: `bad_words`, as tokens, or ends of
        the text that `min_tokens` forbids. A grammar goes before the other constraints."""
        left = set(self.allowed_token_ids)
        if not left or self.grammar is not None:
            return
        ends = {*self.stop_token_ids, *(() if self.ignore_eos else eos_ids)} if self.min_tokens else set()
        words = {word[0] for word in bad_words if len(word) == 1}
        excluding = [name for name, ids in (("bad_words", words), ("min_tokens", ends)) if left & ids]
        if left <= words | ends:
            raise InvalidRequest(
                f"allowed_token_ids and {' and '.join(excluding)} leave no token that the model may write",
                "allowed_token_ids",
            )

    @property
    def first_constrained_token(self) -> int | None:
        """The output's first token on which the grammar may bear; None: there is no grammar."""
        return None if self.grammar is None else self.grammar.first_token

    @property
    def greedy(self) -> bool:
        # Below this the softmax is a point mass in float32, and dividing by it overflows.
        return self.temperature < 1e-5
