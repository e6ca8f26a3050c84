"""What rounding alone does to a model's text: the measure by which the proof tells a tie from a defect.

Two evaluations of one logit that sum in another order (another batch, another shape, another instruction set)
differ by rounding, and where two tokens are nearly as likely, one evaluation prefers the one and another the
other. How near is near follows from the number format. Each rounded operation gives its exact result times 1
+ d with |d| <= u, the unit roundoff (N. Higham, Accuracy and Stability of Numerical Algorithms, 2002, eq.
2.4): 2^-8 in bfloat16, 2^-11 in float16, 2^-24 in float32. A sum of n products is, in whatever order, the
exact sum of the products times 1 + t_i, |t_i| <= gamma_n = nu / (1 - nu) (lemma 3.1, eq. 3.5). So

    gap(a, b) = exact gap + sum_j c_j d_j + O(u²)

where the c_j belong to the model and the text, not to the format or the order. They cannot be bounded in
advance: a deep network's condition is not known, and where two experts' scores tie, rounding changes which of
them computes. But the sum can be measured: the same weights over the same text in a format whose u is 2^-16
of this one's give the exact gap as far as this one is concerned. Let E be the largest error at any place. Two
evaluations g and g' of one gap then differ by

    |g - g'| <= |g - exact| + |g' - exact| <= 2 E

and if the one prefers a (g >= 0) and the other b (g' <= 0), then g <= 2 E. Such a difference is a tie within
rounding; a larger one is a defect. For texts the same inequality holds of shares: two evaluations give
different texts only where one of them gives another than the exact one would, so no more than twice as often
as the format's text is not the exact one; and gaps of g or more at ties come no more than twice as often as
errors of g / 2 or more.

float32 has no finer format here: E and the shares are measured in bfloat16 and scaled by the ratio of the
units, 2^-16, times the square root of the longest sum. bfloat16's products are accumulated in float32 and
rounded once, those of float32 round at each of their n terms, and with roundings that are independent gamma_n
becomes a multiple of sqrt(n) u (Higham and Mary 2019, https://doi.org/10.1137/18M1226312).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from mtpserve.core.errors import ConfigError
from mtpserve.core.protocols.adapters import LoRARequest
from mtpserve.core.request import TokenLogprob
from mtpserve.core.sampling import MAX_LOGPROBS, SamplingParams
from mtpserve.engine.startup.planning import Plan
from mtpserve.llm import LLM
from mtpserve.text.outputs import Completion

CHANCE = 1e-4  # a test that fails by chance less often than this
LIKELY = 5  # tokens of a place that are compared with each other
COMPARED = {"bfloat16": "float32", "float16": "float32", "float32": "bfloat16"}

Asked = tuple[list[int], SamplingParams]  # a prompt and what to do with it
Heard = Callable[[int], None]  # how many requests have ended


class ProvenLLM(LLM):
    """An engine whose requests all have one adapter, or none."""

    def __init__(self, *, lora_request: LoRARequest | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._lora_request = lora_request

    def ask(self, requests: Sequence[Asked], progress: Heard = lambda ended: None) -> list[Completion]:
        prompts, sampling = [prompt for prompt, _ in requests], [params for _, params in requests]
        return self.generate(prompts, sampling, progress, lora_request=self._lora_request)


def unheard(ended: int) -> None:
    """Nobody wants to know."""


@dataclass(frozen=True, slots=True)
class Share:
    """A share: `count` of `of` differ."""

    count: int
    of: int


@dataclass(frozen=True, slots=True)
class Rounding:
    """What `dtype` does to plain decoding's text, `scale` times what was measured against `reference`."""

    dtype: str
    reference: str
    scale: float
    # errors of all places, scaled, ascending: in the gap between two likely tokens' log-probabilities, in
    # nats
    errors: tuple[float, ...]
    tokens: Share  # places where the likeliest token is another one
    texts: Share  # sampled texts that differ with the same seed

    @property
    def bound(self) -> float:
        """2 E"""
        return 2 * max(self.errors, default=0.0)

    @property
    def typical(self) -> float:
        return self.errors[len(self.errors) // 2] if self.errors else 0.0

    def explains(self, differing: Share, measured: Share) -> bool:
        """True if no more differ than twice the share that rounding was measured to change."""
        return chance_of(differing, measured, 2 * self.scale) > CHANCE

    def explains_gaps(self, gaps: Sequence[float], of: int) -> bool:
        """True if ties with these gaps, among so many tokens, are as rare as large errors: a gap of g needs
        one of g / 2 on either side."""
        for rank, gap in enumerate(sorted(gaps, reverse=True), 1):
            measured = Share(sum(error >= gap / 2 for error in self.errors), len(self.errors))
            if gap > self.bound or chance_of(Share(rank, of), measured, 2.0) <= CHANCE:
                return False
        return True


def chance_of(sample: Share, measured: Share, factor: float) -> float:
    """The probability of so many in `sample` or more, given how many there are in both, if they come at
    `factor` times the rate at which they come in `measured` (rare events: a binomial split of two Poisson
    counts)."""
    weight = factor * sample.of / max(factor * sample.of + measured.of, 1e-300)
    total = sample.count + measured.count
    if sample.count == 0 or weight >= 1:
        return 1.0
    if weight <= 0:
        return 0.0
    chances = (
        math.lgamma(total + 1)
        - math.lgamma(k + 1)
        - math.lgamma(total - k + 1)
        + k * math.log(weight)
        + (total - k) * math.log1p(-weight)
        for k in range(sample.count, total + 1)
    )
    return min(1.0, math.fsum(map(math.exp, chances)))


def completed(llm: ProvenLLM, requests: Sequence[Asked], progress: Heard = unheard) -> list[Completion]:
    """Raises ConfigError if a request fails."""
    if not requests:
        return []
    done = llm.ask(requests, progress)
    if (
        error := next((completion.error for completion in done if completion.error is not None), None)
    ) is not None:
        raise ConfigError(f"a request of the proof failed: {error}")
    return done


def scores(llm: ProvenLLM, texts: Iterable[list[int]], progress: Heard = unheard) -> list[list[TokenLogprob]]:
    """Returns the scores of each text's tokens from the second on, by one pass over each text. A text that
    fills the context loses its last token."""
    sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=MAX_LOGPROBS)
    longest = llm.engine.card.context_length - 1
    return [
        completion.prompt_logprobs or []
        for completion in completed(llm, [(text[:longest], sampling) for text in texts], progress)
    ]


def prefers_another(here: TokenLogprob, token: int) -> bool:
    """True if another token is likelier; at an exact tie none is."""
    return dict(here.top).get(token, -math.inf) < here.top[0][1]


def gap_error(here: TokenLogprob, there: TokenLogprob) -> float:
    """The largest difference between two evaluations of the gap between two of a place's likely tokens, in
    nats."""
    other = dict(there.top)
    errors = [logprob - other[token] for token, logprob in here.top[:LIKELY] if token in other]
    return max(errors, default=0.0) - min(errors, default=0.0)


def rounding_of(
    options: dict[str, Any],
    engine_plan: Plan,
    scored: list[list[TokenLogprob]],
    texts: list[list[int]],
    requests: list[Asked],
    answers: list[list[int]],
    progress: Heard = unheard,
) -> Rounding:
    """`options` of LLM, with which plain decoding gave these scores of `texts`, and these answers to what was
    asked. Loads the model again, in another format. `progress` hears of how many texts and answers are
    done."""
    dtype, arch = str(engine_plan.dtype).removeprefix("torch."), engine_plan.described.arch
    longest = max(arch.hidden, arch.intermediate, arch.heads * arch.head_dim)
    scale = 2.0**-16 * math.sqrt(longest) if dtype == "float32" else 1.0
    # Keys and values too: a cache in float8 is part of the rounding.
    with ProvenLLM(**options | {"dtype": COMPARED[dtype], "kv_cache_dtype": "auto"}) as other:
        progress(0)
        again = scores(other, texts, progress)
        done = completed(other, requests, lambda ended: progress(len(texts) + ended))
    changed = sum(one != completion.tokens for one, completion in zip(answers, done, strict=True))
    pairs = [pair for one, two in zip(scored, again, strict=True) for pair in zip(one, two, strict=True)]
    moved = sum(prefers_another(one, two.top[0][0]) for one, two in pairs)
    errors = tuple(sorted(scale * gap_error(one, two) for one, two in pairs))
    return Rounding(
        dtype, COMPARED[dtype], scale, errors, Share(moved, len(pairs)), Share(changed, len(requests))
    )
