"""The proof that speculation changes nothing, for any model: the same requests with it and without it, side
by side.

    greedy          the two texts of every prompt are compared token by token
    sampled         for each sampling feature, the joint counts of the first tokens after a prompt, with
                    speculation and without, are compared by a chi-square test
    same seed       where drafts are point masses (trees, n-grams), even a sampled text must be the very same
                    (spec/verify/accept)

All features and greedy requests run mixed in the same batches, as they would on a server. Computes no
statistics of speed.

Where texts differ, rounding is the only excuse, and it is checked (rounding.py), not assumed:

    1. Plain decoding scores every speculative greedy text in one pass. At each place, also after a first
       difference, the text's token must be its likeliest, or less likely by no more than twice the rounding
       error that the number format was measured to make.
    2. Such places, small gaps and large, and seeds that give another text must not be more frequent than
       twice what the number format itself does to plain decoding.
    3. In exact mode, where a row's numbers do not depend on what is computed with it (--speculative-exact),
       the requests whose texts differ must give the same text with speculation and without, to the last
       token.

Nothing is excused where the numbers are exact to begin with: in exact mode, and with the kernels of a CPU.

A defect in speculation's logic fails the third test whatever its size; one that is in the numbers of the
ordinary mode alone, the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from mtpserve.config import SpecConfig
from mtpserve.config.spec import NONE
from mtpserve.core.errors import ConfigError
from mtpserve.core.protocols.adapters import LoRARequest
from mtpserve.core.request import TokenLogprob
from mtpserve.core.sampling import MAX_LOGPROBS, GrammarSpec, SamplingParams
from mtpserve.engine.startup.compute import is_exact
from mtpserve.engine.startup.planning import plan
from mtpserve.llm import engine_config
from mtpserve.text.outputs import Completion
from mtpserve.tools.prove.divergence import (
    DRAWN,
    Divergence,
    LawTest,
    divergence,
    divergence_at,
    sampled_tokens,
    two_sample,
)
from mtpserve.tools.prove.rounding import Asked, ProvenLLM, Rounding, Share, completed, rounding_of, scores

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
MORE = 64  # tokens sampled after each built-in prompt, where rounding is measured
AGAIN = 64  # requests with differing texts that are computed again in exact mode, at most

# The stages
DRAFTING, PLAIN = "with drafts", "plain decoding"
SCORED, OTHER_FORMAT = (
    "rounding: all texts once more, each in one pass",
    "rounding: the same in another number format",
)
EXACT = "exact mode, plain decoding", "exact mode, with drafts"

Results = dict[str, list[Completion]]  # greedy, one for each prompt; and of each feature, one for each seed


@dataclass(frozen=True, slots=True)
class Excuse:
    """What rounding must explain, and whether it does."""

    rounding: Rounding
    # tokens of speculative greedy texts to which plain decoding, over the same text, prefers another
    tokens: Share
    texts: Share  # sampled: with the same seed other than plain decoding's
    exact: Share  # requests with differing texts that differ in exact mode too

    @property
    def holds(self) -> bool:
        """True if rounding explains the shares; gaps are checked one by one."""
        rounding = self.rounding
        often = rounding.explains(self.tokens, rounding.tokens) and rounding.explains(
            self.texts, rounding.texts
        )
        return often and self.exact.count == 0


@dataclass(slots=True)
class Proof:
    prompts: int
    # a greedy divergence between tokens whose log-probabilities differ by no more than this is a tie within
    # rounding
    tie: float
    # each prompt's first one, and with `excuse` those after it
    divergences: list[Divergence] = field(default_factory=list)
    laws: list[LawTest] = field(default_factory=list)
    excuse: Excuse | None = None  # None: no text differs, or a tie was given, or the mode is exact
    drafted: list[int] = field(default_factory=list)  # by depth
    accepted: list[int] = field(default_factory=list)
    accept_length: float = 1.0
    lossy: bool = False
    drafting: str = ""  # what drafted

    @property
    def holds(self) -> bool:
        gaps = [mismatch.gap for mismatch in self.divergences]
        greedy = max(gaps, default=0.0) <= self.tie
        if self.excuse is not None:
            greedy = greedy and self.excuse.rounding.explains_gaps(gaps, self.excuse.tokens.of)
        seeded = (
            all(law.same_text in (None, 1.0) for law in self.laws)
            if self.excuse is None
            else self.excuse.holds
        )
        return greedy and seeded and all(law.holds for law in self.laws) and not self.lossy


@dataclass(frozen=True, slots=True)
class ProofStage:
    """The progress of a proof, in requests: of this stage, of those that are over and of those to come."""

    number: int
    stages: int
    name: str
    done: int | None  # None: the model is loading
    of: int
    before: int
    later: int


@dataclass(slots=True)
class ProofStages:
    """`sizes`: requests of each stage, in order. Those that explain differences are added once there are
    any."""

    tell: Callable[[ProofStage], None]
    sizes: dict[str, int]
    number: int = 0

    def load(self) -> None:
        """The next one begins."""
        self.number += 1
        self.done(None)

    def done(self, count: int | None) -> None:
        sizes, at = list(self.sizes.values()), self.number - 1
        before, later = sum(sizes[:at]), sum(sizes[self.number :])
        self.tell(ProofStage(self.number, len(sizes), list(self.sizes)[at], count, sizes[at], before, later))


def features(llm: ProvenLLM, prompt: list[int]) -> dict[str, dict[str, Any]]:
    """Sampling parameters of each test. Tokens that are forbidden or preferred are such as the model likes to
    write here."""
    likely = llm.ask([(prompt, SamplingParams(max_tokens=1, temperature=0.0, logprobs=20))])[0].logprobs
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
        "top_p, penalty, bias": {
            "top_p": 0.9,
            "frequency_penalty": 0.8,
            "logit_bias": {ids[1 % len(ids)]: -2.0},
        },
    }


def prove(
    options: dict[str, Any],
    prompts: Sequence[str],
    *,
    tokens: int,
    draws: int,
    tie: float | None = None,
    lora_request: LoRARequest | None = None,
    progress: Callable[[ProofStage], None] = lambda stage: None,
) -> Proof:
    """`options` are those of `LLM`, with speculation; the plain run leaves it out. `tie` None: what is a tie
    follows from the number format; else greedy divergences up to it are, and no other difference is excused.
    `lora_request`: the adapter that all requests have. Raises ConfigError where there is nothing to prove.
    """
    if options.get("speculative_synthetic_acceptance") is not None:
        raise ConfigError(
            "--speculative-synthetic-acceptance accepts drafts at random: there is nothing to prove"
        )
    without = {
        name: value
        for name, value in options.items()
        if not name.startswith("speculative_") or name == "speculative_exact"
    }
    without["speculative_algorithm"] = NONE
    require_drafts(engine_config(options).spec)
    options, without = ({**one, "lora_request": lora_request} for one in (options, without))
    stages = ProofStages(progress, {DRAFTING: 0, PLAIN: 0})
    stages.load()
    # At a fixed depth, so that chains are sampled from q and verified by rejection for requests with a seed,
    # too.
    with ProvenLLM(**options | {"speculative_adaptive": False}) as drafting:
        if not drafting.config.spec.steps:
            raise ConfigError(
                f"there is nothing to prove without drafts. Drafter: {drafting.engine.card.drafting}"
            )
        spec, exact, texts = (
            drafting.config.spec,
            is_exact(drafting.config),
            [drafting.tokenizer.encode(text) for text in prompts],
        )
        work = Work(texts, features(drafting, texts[0]), tokens, draws)
        stages.sizes = dict.fromkeys(stages.sizes, work.size)
        stages.done(0)
        other = work.run(drafting, stages.done)
        stats, what = drafting.engine.stats, drafting.engine.card.drafting
    stages.load()
    with ProvenLLM(**without) as llm:
        stages.done(0)
        plain = work.run(llm, stages.done)
    proof = compared(work, plain, other, coupled=spec.topk > 1 or spec.ngram)
    proof.drafting = what
    proof.tie, proof.lossy = tie or 0.0, spec.lossy
    proof.drafted, proof.accepted = stats.draft_tokens_per_position, stats.accepted_tokens_per_position
    lengths = stats.accept_lengths
    proof.accept_length = sum(n * count for n, count in enumerate(lengths, 1)) / max(1, sum(lengths))
    same = not proof.divergences and all(law.same_text in (None, 1.0) for law in proof.laws)
    if not (same or spec.lossy or exact or tie is not None):
        excuse(proof, work, options, without, plain, other, stages)
    return proof


def require_drafts(spec: SpecConfig) -> None:
    """Raises ConfigError if the options leave nothing to compare."""
    if spec.named and not spec.parts:
        raise ConfigError(
            "prove compares speculation with plain decoding: --speculative-algorithm none leaves "
            "nothing to compare"
        )
    if spec.speculative_num_steps == 0:
        raise ConfigError(
            "prove compares speculation with plain decoding: --speculative-num-steps must be at "
            "least 1, got 0"
        )


def compared(work: Work, plain: Results, other: Results, coupled: bool) -> Proof:
    """`coupled`: with the same seed all texts are the same."""
    proof = Proof(len(work.prompts), 0.0)
    pairs = enumerate(zip(plain["greedy"], other["greedy"], strict=True))
    proof.divergences = [
        difference for i, (one, two) in pairs if (difference := divergence(i, one, two)) is not None
    ]
    for feature, fields in work.cases.items():
        one, two = plain[feature], other[feature]
        same = (
            sum(a.tokens == b.tokens for a, b in zip(one, two, strict=True)) / len(one)
            if coupled or "grammar" in fields
            else None
        )
        proof.laws.append(
            LawTest(feature, len(one), two_sample(sampled_tokens(one), sampled_tokens(two)), same)
        )
    return proof


def excuse(
    proof: Proof,
    work: Work,
    options: dict[str, Any],
    without: dict[str, Any],
    plain: Results,
    other: Results,
    stages: ProofStages,
) -> None:
    """Adds what rounding explains of the differences, the tie that follows from it, and the places after each
    first divergence."""
    spoken = [done.tokens for done in other["greedy"]]
    seeded = [law.feature for law in proof.laws if law.same_text is not None]
    requests = [one for feature in seeded for one in work.sampled(feature)]
    first, second = (
        [done.tokens for feature in seeded for done in results[feature]] for results in (plain, other)
    )
    starts = {mismatch.prompt: mismatch.place for mismatch in proof.divergences}
    differing = [work.greedy()[i] for i in starts] + [
        one for one, a, b in zip(requests, first, second, strict=True) if a != b
    ]
    differing, count = differing[:AGAIN], len(work.prompts) + len(PROMPTS)
    stages.sizes |= {
        SCORED: len(PROMPTS) + count,
        OTHER_FORMAT: count + len(requests),
        EXACT[0]: len(differing),
        EXACT[1]: len(differing),
    }
    stages.load()
    with ProvenLLM(**without) as llm:
        stages.done(0)
        # Besides the proof's own texts some hundred places of others, whatever its size.
        more = [
            (llm.tokenizer.encode(text), SamplingParams(max_tokens=MORE, seed=i))
            for i, text in enumerate(PROMPTS)
        ]
        texts = [prompt + tokens for prompt, tokens in zip(work.prompts, spoken, strict=True)]
        texts += [
            prompt + done.tokens
            for (prompt, _), done in zip(more, completed(llm, more, stages.done), strict=True)
        ]
        engine_plan, scored = (
            plan(llm.config),
            scores(llm, texts, lambda ended: stages.done(len(more) + ended)),
        )
    stages.load()
    rounding = rounding_of(without, engine_plan, scored, texts, requests, first, stages.done)
    proof.tie = rounding.bound
    changed = lost_places(work.prompts, spoken, scored)
    proof.divergences += [
        mismatch for mismatch in changed if mismatch.place > starts.get(mismatch.prompt, -1)
    ]
    proof.divergences.sort(key=lambda mismatch: (mismatch.prompt, mismatch.place))
    proof.excuse = Excuse(
        rounding,
        tokens=Share(len(changed), sum(map(len, spoken))),
        texts=Share(sum(a != b for a, b in zip(first, second, strict=True)), len(requests)),
        exact=differing_in_exact_mode(options, without, differing, stages),
    )


def lost_places(
    prompts: Sequence[list[int]], spoken: Sequence[list[int]], scored: Sequence[list[TokenLogprob]]
) -> list[Divergence]:
    """Returns the places of greedy texts at which plain decoding, over the same text, prefers another token.
    `scored`: plain decoding's, of each prompt with its text."""
    places = []
    for number, (prompt, text, score) in enumerate(zip(prompts, spoken, scored, strict=False)):
        for position, pair in enumerate(zip(score[len(prompt) - 1 :], text, strict=False)):
            if (mismatch := divergence_at(number, position, *pair)) is not None:
                places.append(mismatch)
    return places


def differing_in_exact_mode(
    options: dict[str, Any], without: dict[str, Any], requests: Sequence[Asked], stages: ProofStages
) -> Share:
    answers = []
    for llm_options in (without, options):
        stages.load()
        with ProvenLLM(**llm_options | {"speculative_exact": True}) as llm:
            stages.done(0)
            answers.append([done.tokens for done in completed(llm, requests, stages.done)])
    return Share(sum(a != b for a, b in zip(*answers, strict=True)), len(requests))


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

    def greedy(self) -> list[Asked]:
        return [
            (prompt, SamplingParams(max_tokens=self.tokens, temperature=0.0, logprobs=MAX_LOGPROBS))
            for prompt in self.prompts
        ]

    def sampled(self, feature: str) -> list[Asked]:
        # One token more than is counted, or nothing would be drafted for the last.
        sampling = SamplingParams(**self.cases[feature], max_tokens=DRAWN + 1)
        return [(self.prompts[0], replace(sampling, seed=seed)) for seed in range(self.draws)]

    def run(self, llm: ProvenLLM, progress: Callable[[int], None], chunk: int = 512) -> Results:
        named = [("greedy", one) for one in self.greedy()]
        named += [
            (feature, one)
            for row in zip(*map(self.sampled, self.cases), strict=True)
            for feature, one in zip(self.cases, row, strict=True)
        ]
        results: Results = {}
        for start in range(0, len(named), chunk):
            batch = named[start : start + chunk]
            done = completed(
                llm, [one for _, one in batch], partial(lambda before, ended: progress(before + ended), start)
            )
            for (what, _), completion in zip(batch, done, strict=True):
                results.setdefault(what, []).append(completion)
        return results
