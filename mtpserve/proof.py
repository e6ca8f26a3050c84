"""The proof that speculation changes nothing, for any model: the same requests with it and without it, side by side.

    greedy          the two texts of every prompt are compared token by token
    sampled         for each sampling feature, the joint counts of the first tokens after a prompt, with speculation and without, are
                    held against each other by a chi-square test
    same seed       where drafts are point masses (trees, n-grams), even a sampled text must be the very same (spec/accept)

All features and greedy requests run mixed in the same batches, as they would on a server. No threshold hides a difference: what fails
is printed with the numbers that show it. Computes no statistics of speed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from mtpserve.core.errors import ConfigError
from mtpserve.core.sampling import GrammarSpec, SamplingParams
from mtpserve.llm import LLM, Completion

PROMPTS = (
    "import os\n\ndef read_lines(path):",
    "The three laws of thermodynamics are",
    "class Stack:\n    def __init__(self):",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "Dear Sir or Madam,\n\nI am writing to",
    "for key, value in sorted(",
    "Q: What is the capital of France?\nA:",
)
DRAWN = 3  # tokens whose joint counts are compared
RARE = 5  # an outcome with fewer draws in both runs together is counted with the other rare ones
CHANCE = 1e-4  # a test that fails by chance less often than this


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first place where a greedy text differs, and the plain run's log-probabilities of the two tokens."""

    prompt: int
    place: int
    plain: int
    speculative: int
    plain_logprob: float
    speculative_logprob: float | None  # None: not among the likeliest

    @property
    def gap(self) -> float:
        return float("inf") if self.speculative_logprob is None else self.plain_logprob - self.speculative_logprob


@dataclass(frozen=True, slots=True)
class LawTest:
    feature: str
    draws: int
    p_value: float
    same_text: float | None  # share of seeds whose text is the same; None where it need not be

    @property
    def holds(self) -> bool:
        return self.p_value > CHANCE and self.same_text in (None, 1.0)


@dataclass(slots=True)
class Proof:
    prompts: int
    tie: float  # a greedy divergence between tokens whose log-probabilities differ by no more than this is forgiven
    divergences: list[Divergence] = field(default_factory=list)
    laws: list[LawTest] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)  # by depth
    accepted: list[int] = field(default_factory=list)
    accept_length: float = 1.0
    lossy: bool = False

    @property
    def holds(self) -> bool:
        greedy = all(found.gap <= self.tie for found in self.divergences)
        return greedy and all(law.holds for law in self.laws) and not self.lossy


def features(llm: LLM, prompt: list[int]) -> dict[str, dict[str, Any]]:
    """Sampling parameters of each test. Tokens that are forbidden or preferred are such as the model likes to write here."""
    likely = llm.generate([prompt], SamplingParams(max_tokens=1, temperature=0.0, logprobs=20))[0].logprobs
    assert likely is not None
    ids = [token for token, _ in likely[0].top]
    word = next((text for token in ids if (text := llm.tokenizer.decode([token]).strip())), "the")
    return {
        "temperature": {"temperature": 0.7},
        "top_k": {"top_k": 8},
        "top_p": {"top_p": 0.8},
        "min_p": {"min_p": 0.1},
        "repetition_penalty": {"repetition_penalty": 1.3},
        "frequency, presence": {"frequency_penalty": 1.2, "presence_penalty": 0.6},
        "logit_bias": {"logit_bias": {ids[0]: -4.0, ids[-1]: 3.0}, "top_k": 20},
        "bad_words": {"bad_words": (word,), "top_k": 20},
        "allowed_token_ids": {"allowed_token_ids": tuple(ids)},
        "min_tokens": {"min_tokens": 2, "top_k": 20},
        "grammar": {"grammar": GrammarSpec("regex", "[a-f]+( [a-f]+)*"), "top_k": 30},
        "top_p, penalty, bias": {"top_p": 0.9, "frequency_penalty": 0.8, "logit_bias": {ids[1 % len(ids)]: -2.0}},
    }


def prove(
    options: dict[str, Any],
    prompts: Sequence[str],
    *,
    tokens: int,
    draws: int,
    tie: float,
    progress: Callable[[str, int, int], None] = lambda what, done, of: None,
) -> Proof:
    """`options` are those of `LLM`, with speculation; the plain run leaves it out. Raises ConfigError where there is nothing to prove."""
    if options.get("speculative_synthetic_acceptance") is not None:
        raise ConfigError("--speculative-synthetic-acceptance accepts by lot: there is nothing to prove about it")
    drafting = LLM(**options)
    spec = drafting.config.spec
    if spec.steps == 0:
        raise ConfigError("prove compares speculation with plain decoding: --speculative-num-steps must be at least 1")
    plain = LLM(**{name: value for name, value in options.items() if not name.startswith("speculative_") or name == "speculative_exact"})
    texts = [drafting.tokenizer.encode(text) for text in prompts]
    cases = features(plain, texts[0])
    work = Work(texts, cases, tokens, draws)
    found: dict[str, dict[str, list[Completion]]] = {}
    for name, llm in (("plain", plain), ("speculative", drafting)):
        found[name] = {}
        for what, done in work.run(llm):
            found[name].setdefault(what, []).append(done)
            progress(name, sum(map(len, found[name].values())), work.size)
    proof = Proof(len(texts), tie, lossy=spec.lossy)
    proof.divergences = [
        difference
        for i, (one, other) in enumerate(zip(found["plain"]["greedy"], found["speculative"]["greedy"], strict=True))
        if (difference := divergence(i, one, other)) is not None
    ]
    for feature, fields in cases.items():
        one, other = (texts_of(found[name][feature]) for name in ("plain", "speculative"))
        coupled = spec.topk > 1 or spec.ngram or "grammar" in fields
        same = sum(a == b for a, b in zip(one, other, strict=True)) / len(one) if coupled else None
        proof.laws.append(LawTest(feature, len(one), two_sample(one, other), same))
    stats = drafting.engine.stats
    proof.drafted, proof.accepted = stats.draft_tokens_per_position, stats.accepted_tokens_per_position
    lengths = stats.accept_lengths
    proof.accept_length = sum(n * count for n, count in enumerate(lengths, 1)) / max(1, sum(lengths))
    return proof


@dataclass(frozen=True, slots=True)
class Work:
    """The requests of one side, and the order in which they run: every batch holds a bit of everything."""

    prompts: list[list[int]]
    cases: dict[str, dict[str, Any]]
    tokens: int
    draws: int

    @property
    def size(self) -> int:
        return len(self.prompts) + self.draws * len(self.cases)

    def requests(self) -> list[tuple[str, list[int], SamplingParams]]:
        greedy = SamplingParams(max_tokens=self.tokens, temperature=0.0, logprobs=5)
        listed = [("greedy", prompt, greedy) for prompt in self.prompts]
        for seed in range(self.draws):
            for feature, fields in self.cases.items():
                # One token more than is counted, or nothing would be drafted for the last.
                listed.append((feature, self.prompts[0], replace(SamplingParams(**fields), max_tokens=DRAWN + 1, seed=seed)))
        return listed

    def run(self, llm: LLM, chunk: int = 512) -> Iterator[tuple[str, Completion]]:
        listed = self.requests()
        for start in range(0, len(listed), chunk):
            part = listed[start : start + chunk]
            done = llm.generate([prompt for _, prompt, _ in part], [sampling for _, _, sampling in part])
            for (what, _, _), completion in zip(part, done, strict=True):
                if completion.error is not None:
                    raise ConfigError(f"a request of the proof failed: {completion.error}")
                yield what, completion


def texts_of(completions: list[Completion]) -> list[tuple[int, ...]]:
    return [tuple(completion.tokens[:DRAWN]) for completion in completions]


def divergence(number: int, plain: Completion, other: Completion) -> Divergence | None:
    for place, (one, two) in enumerate(zip(plain.tokens, other.tokens, strict=False)):
        if one != two:
            scores = plain.logprobs[place] if plain.logprobs is not None else None
            top = dict(scores.top) if scores is not None else {}
            return Divergence(number, place, one, two, scores.logprob if scores is not None else 0.0, top.get(two))
    if len(plain.tokens) != len(other.tokens):
        return Divergence(number, min(len(plain.tokens), len(other.tokens)), -1, -1, 0.0, None)
    return None


def two_sample(one: list[tuple[int, ...]], other: list[tuple[int, ...]]) -> float:
    """The probability of counts that differ at least so much, if both come from one law (chi-square)."""
    import torch

    first, second = Counter(one), Counter(other)
    common = [text for text in first | second if first[text] + second[text] >= RARE]
    table = torch.tensor(
        [[counts[text] for text in common] + [sum(counts.values()) - sum(counts[t] for t in common)] for counts in (first, second)]
    )
    table = table[:, table.sum(0) > 0].double()
    if table.shape[1] < 2:
        return 1.0
    wanted = table.sum(1, keepdim=True) * table.sum(0) / table.sum()
    statistic = ((table - wanted) ** 2 / wanted).sum()
    freedom = torch.tensor((table.shape[1] - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, statistic / 2))
