"""Differences between two runs of the same requests: greedy texts at their first divergence, sampled texts by
a chi-square test of their first tokens."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from mtpserve.core.request import TokenLogprob
from mtpserve.text.outputs import Completion
from mtpserve.tools.prove.rounding import CHANCE, prefers_another

DRAWN = 3  # tokens whose joint counts are compared
RARE = 5  # an outcome with fewer draws in both runs together is counted with the other rare ones


@dataclass(frozen=True, slots=True)
class Divergence:
    """A place where a greedy text is not plain decoding's, and plain decoding's log-probabilities of the two
    tokens there."""

    prompt: int
    place: int
    plain: int
    speculative: int
    plain_logprob: float
    speculative_logprob: float | None  # None: not among the likeliest

    @property
    def gap(self) -> float:
        return (
            float("inf")
            if self.speculative_logprob is None
            else self.plain_logprob - self.speculative_logprob
        )


@dataclass(frozen=True, slots=True)
class LawTest:
    feature: str
    draws: int
    p_value: float
    same_text: float | None  # share of seeds whose text is the same; None where it need not be

    @property
    def holds(self) -> bool:
        """True if the distribution is the same. Differing texts are checked for all features
        together."""
        return self.p_value > CHANCE


def sampled_tokens(completions: list[Completion]) -> list[tuple[int, ...]]:
    return [tuple(completion.tokens[:DRAWN]) for completion in completions]


def divergence(number: int, plain: Completion, other: Completion) -> Divergence | None:
    """Returns the first divergence, with plain decoding's log-probabilities; None if the texts are equal."""
    for position, (one, two) in enumerate(zip(plain.tokens, other.tokens, strict=False)):
        if one != two:
            score = plain.logprobs[position] if plain.logprobs is not None else None
            top = dict(score.top) if score is not None else {}
            return Divergence(
                number, position, one, two, score.logprob if score is not None else 0.0, top.get(two)
            )
    if len(plain.tokens) != len(other.tokens):
        return Divergence(number, min(len(plain.tokens), len(other.tokens)), -1, -1, 0.0, None)
    return None


def divergence_at(number: int, position: int, score: TokenLogprob, token: int) -> Divergence | None:
    """Returns a divergence if plain decoding, over the same text, prefers another token; else None."""
    if not prefers_another(score, token):
        return None
    best, logprob = score.top[0]
    return Divergence(number, position, best, token, logprob, dict(score.top).get(token))


def two_sample(one: list[tuple[int, ...]], other: list[tuple[int, ...]]) -> float:
    """Returns the probability of counts that differ at least so much, if both come from one distribution
    (chi-square)."""
    import torch

    first, second = Counter(one), Counter(other)
    common = [text for text in first | second if first[text] + second[text] >= RARE]
    table = torch.tensor(
        [
            [counts[text] for text in common] + [sum(counts.values()) - sum(counts[t] for t in common)]
            for counts in (first, second)
        ]
    )
    table = table[:, table.sum(0) > 0].double()
    if table.shape[1] < 2:
        return 1.0
    expected = table.sum(1, keepdim=True) * table.sum(0) / table.sum()
    statistic = ((table - expected) ** 2 / expected).sum()
    freedom = torch.tensor((table.shape[1] - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))
