"""Every sampling feature under every kind of speculation, against plain decoding and against the exact law.

greedy             the text is the oracle's, whatever is drafted, in batches that mix all features and sampled requests
trees, n-grams     a sampled request's text is that of plain decoding with the same seed, token for token
chains             (drawn from q) the joint law of the first three tokens, by chi-square: 16,000 draws with --all, else 2000
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from scipy.stats import chisquare

from mtpserve.config import SpecConfig
from mtpserve.core.request import Request
from mtpserve.core.sampling import GrammarSpec, SamplingParams
from mtpserve.runtime.sampling.rules import BatchRules
from mtpserve.runtime.sampling.sampling import BatchSampler
from tests import selection
from tests.parity import table
from tests.parity.table import Alternatings, Halving, greedy_text, joint, run, table_engine
from tests.spec.diagonal import diagonal

DRAWS = 16_000 if selection.ALL else 2000
BATCH = 250  # admission looks at all that run: a large batch takes more than many steps
PLAIN = SpecConfig(speculative_algorithm="none")


def chain(steps: int) -> SpecConfig:
    return SpecConfig(speculative_algorithm="MTP", speculative_num_steps=steps)


def tree(steps: int, topk: int, nodes: int, algorithm: str = "MTP") -> SpecConfig:
    return SpecConfig(
        speculative_algorithm=algorithm, speculative_num_steps=steps, speculative_eagle_topk=topk, speculative_num_draft_tokens=nodes + 1
    )


CHAINS = {"chain 1": chain(1), "chain 3": chain(3), "chain 7": chain(7)}
COUPLED = {
    "tree 2x8": tree(3, 2, 8),
    "tree 4x16": tree(4, 4, 16),
    "tree 6x32": tree(5, 6, 32),
    "n-gram": SpecConfig(speculative_algorithm="NGRAM", speculative_num_steps=4),
    "chain and n-gram": SpecConfig(speculative_algorithm="MTP+NGRAM", speculative_num_steps=3),
    "tree and n-gram": tree(3, 3, 9, "nextn+ngram"),
}
SHAPES = CHAINS | COUPLED

Case = tuple[dict[str, Any], list[list[int]]]  # fields of SamplingParams, bad words in tokens
FEATURES: dict[str, Case] = {
    "temperature": ({"temperature": 0.6}, []),
    "top_k": ({"top_k": 3}, []),
    "top_p": ({"top_p": 0.7}, []),
    "min_p": ({"min_p": 0.25}, []),
    "repetition": ({"repetition_penalty": 1.7}, []),
    "frequency": ({"frequency_penalty": 1.1}, []),
    "presence": ({"presence_penalty": 1.3}, []),
    "logit_bias": ({"logit_bias": {2: 1.5, 4: -3.0}}, []),
    "bad words": ({"bad_words": ("x",)}, [[3], [1, 2], [0, 4, 1], [4, 4]]),
    "allowed": ({"allowed_token_ids": (0, 1, 3, 5)}, []),
    "min_tokens": ({"min_tokens": 2}, []),
    "stop_token_ids": ({"stop_token_ids": (2,)}, []),
    "ignore_eos": ({"ignore_eos": True}, []),
    "processor": ({"custom_params": {"halve": True}}, []),
    "grammar": ({"grammar": GrammarSpec("regex", "9")}, []),
    "logprobs": ({"logprobs": 3}, []),
    "penalties, top_p, bias": ({"frequency_penalty": 0.8, "presence_penalty": 0.5, "top_p": 0.8, "logit_bias": {1: 1.0}}, []),
    "grammar, top_k, repetition": ({"grammar": GrammarSpec("regex", "7"), "top_k": 4, "repetition_penalty": 1.4}, []),
    "bad words, min_tokens, min_p": ({"bad_words": ("x",), "min_tokens": 3, "min_p": 0.1}, [[2, 3], [0]]),
    "processor, temperature, frequency": ({"custom_params": {"halve": True}, "temperature": 1.6, "frequency_penalty": 0.6}, []),
    "allowed, stop, presence": ({"allowed_token_ids": (0, 1, 2, 4), "stop_token_ids": (4,), "presence_penalty": 0.9}, []),
    "bias, ignore_eos, top_k, logprobs": ({"logit_bias": {5: 2.0}, "ignore_eos": True, "top_k": 2, "logprobs": 3}, []),
}
PROMPTS = [[1], [0, 3, 3, 2], [4, 2, 0]]


def engine(spec: SpecConfig, seats: int) -> Any:
    return table_engine(spec, seats, [Halving()], Alternatings())


def mixed(greedy: bool, tokens: int = 30) -> list[Request]:
    """Every feature, greedy or sampled, and as many neighbours of the other kind."""
    found = []
    for i, (fields, words) in enumerate(FEATURES.values()):
        for j, prompt in enumerate(PROMPTS):
            cold = greedy if j < 2 else not greedy
            values = fields | ({"temperature": 0.0} if cold else {})
            found.append(Request(f"{i}-{j}", prompt, SamplingParams(max_tokens=tokens, seed=7 * i + j, **values), bad_words=words))
    return found


@cache
def plain_texts(greedy: bool) -> list[list[int]]:
    asked = mixed(greedy)
    return run(engine(PLAIN, len(asked)), asked)


@pytest.mark.parametrize("shape", [PLAIN, *SHAPES.values()], ids=["plain", *SHAPES])
def test_greedy_text_is_the_oracles_in_mixed_batches(shape: SpecConfig) -> None:
    asked = mixed(greedy=True)
    made = engine(shape, len(asked))
    for request, text in zip(asked, run(made, asked), strict=True):
        if request.sampling.greedy:
            assert text == greedy_text(request.prompt, request.sampling, request.bad_words), request
    assert shape is PLAIN or made.stats.accepted_tokens_total > 100


@pytest.mark.parametrize("shape", COUPLED.values(), ids=COUPLED)
def test_a_seeds_text_is_that_of_plain_decoding(shape: SpecConfig) -> None:
    asked = mixed(greedy=False)
    made = engine(shape, len(asked))
    assert run(made, asked) == plain_texts(False)
    assert made.stats.accepted_tokens_total > 100


def p_value(shape: SpecConfig, fields: dict[str, Any], words: Seq[list[int]], draws: int = DRAWS) -> float:
    """Of the first three tokens' counts, if the exact law holds. Outputs that it rules out must not occur."""
    prompt = PROMPTS[0]
    exact = joint(prompt, SamplingParams(**fields), words, 3)
    made = table_engine(shape, BATCH, [Halving()] if "custom_params" in fields else [], Alternatings())
    counts: Counter[tuple[int, ...]] = Counter()
    for start in range(0, draws, BATCH):
        asked = [
            # Room for one token more than is counted, or nothing would be drafted for the last.
            Request(str(i), prompt, SamplingParams(max_tokens=4, seed=start + i, **fields), bad_words=list(words))
            for i in range(BATCH)
        ]
        counts.update(tuple(text[:3]) for text in run(made, asked))
    if set(counts) - set(exact):
        return 0.0
    common = [output for output, p in exact.items() if p * draws >= 5]
    rest = draws - sum(counts[output] for output in common), draws * (1 - sum(exact[output] for output in common))
    observed, wanted = [counts[output] for output in common], [exact[output] * draws for output in common]
    if rest[1] > 1e-6:
        observed, wanted = [*observed, rest[0]], [*wanted, rest[1]]
    return 1.0 if len(observed) == 1 else float(chisquare(observed, wanted, sum_check=False).pvalue)


# Chains of three are held to every feature, several at once; the others to those that look hardest at the path. With --all all are held
# to each, alone too.
HARDEST = {"penalties, top_p, bias"}
COMBINED = [feature for feature in FEATURES if "," in feature]


def law_of(feature: str, shape: str) -> Any:
    quick = feature in HARDEST or (shape == "chain 3" and feature in COMBINED)
    return pytest.param(feature, shape, id=f"{feature}-{shape}", marks=[] if quick else [pytest.mark.thorough])


def test_every_feature_is_among_the_combined() -> None:
    fields = [set().union(*(FEATURES[feature][0] for feature in features)) for features in (FEATURES, COMBINED)]
    assert fields[0] == fields[1]


@pytest.mark.parametrize(("feature", "shape"), [law_of(feature, shape) for feature in FEATURES for shape in ("plain", *CHAINS)])
def test_the_law_is_the_models(feature: str, shape: str) -> None:
    assert p_value(CHAINS.get(shape, PLAIN), *FEATURES[feature]) > 1e-5


@pytest.mark.parametrize("shape", [PLAIN, *SHAPES.values()], ids=["plain", *SHAPES])
@pytest.mark.parametrize("fields", [{"top_p": 1e-6, "temperature": 1.3}, {"top_k": 1, "temperature": 2.0}], ids=str)
def test_the_narrowest_choice_is_greedy(shape: SpecConfig, fields: dict[str, Any]) -> None:
    asked = [Request(str(i), prompt, SamplingParams(max_tokens=25, seed=i, ignore_eos=True, **fields)) for i, prompt in enumerate(PROMPTS)]
    cold = SamplingParams(max_tokens=25, temperature=0, ignore_eos=True)
    assert run(engine(shape, 3), asked) == [greedy_text(prompt, cold) for prompt in PROMPTS]


# -- the suite sees what it is there to see: each mutation leaves one transform out behind the first draft --------------------------

Apply = Any
RULES = BatchRules.apply
PROBS = BatchSampler.probs


def without_path(
    self: BatchRules, logits: torch.Tensor, req_indices: torch.Tensor, path: torch.Tensor, count: torch.Tensor
) -> torch.Tensor:
    """Every node is treated like the root, as peers do."""
    return RULES(self, logits, req_indices, path, torch.zeros_like(count))


def only_at_the_root(
    self: BatchRules, logits: torch.Tensor, req_indices: torch.Tensor, path: torch.Tensor, count: torch.Tensor
) -> torch.Tensor:
    """No rule behind the first token of a step."""
    return torch.where((count == 0).unsqueeze(1), RULES(self, logits, req_indices, path, count), logits)


def skipped(name: str) -> Any:
    def probs(self: BatchSampler, logits: torch.Tensor, req_indices: torch.Tensor) -> torch.Tensor:
        kept = self.features
        self.features = replace(kept, **{name: 0 if name == "largest_k" else False})
        try:
            return PROBS(self, logits, req_indices)
        finally:
            self.features = kept

    return probs


# In an order in which the quick selection pairs features that do not look at the path with the mutation that they show.
ON_THE_PATH = ["frequency", "repetition", "presence", "allowed", "processor", "logit_bias", "min_tokens", "bad words"]
LEFT_OUT = {"without_path": without_path, "only_at_the_root": only_at_the_root}


@pytest.mark.parametrize(("feature", "shape", "mutation"), diagonal(ON_THE_PATH, ["chain 3", "tree 4x16", "chain and n-gram"], LEFT_OUT))
def test_rules_left_out_on_the_path_are_seen(monkeypatch: pytest.MonkeyPatch, mutation: Apply, shape: str, feature: str) -> None:
    if mutation is without_path and feature in ("logit_bias", "allowed"):
        pytest.skip("does not look at the path")
    fields, words = FEATURES[feature]
    if feature == "repetition" and shape in CHAINS:
        fields = {"repetition_penalty": 0.2}  # strong enough to show in three tokens
    if feature == "min_tokens" and mutation is only_at_the_root:
        fields = {"min_tokens": 3}  # a step begins with the second token: the third is the first one on a path
    if shape in CHAINS:
        monkeypatch.setattr(BatchRules, "apply", mutation)
        assert p_value(SHAPES[shape], fields, words, draws=12_000 if selection.ALL else 2000) < 1e-5
        return
    asked = [Request(str(i), PROMPTS[1], SamplingParams(max_tokens=20, seed=i, **fields), bad_words=words) for i in range(60)]
    plain = run(engine(PLAIN, 60), asked)
    assert run(engine(SHAPES[shape], 60), asked) == plain
    monkeypatch.setattr(BatchRules, "apply", mutation)
    assert run(engine(SHAPES[shape], 60), asked) != plain


@pytest.mark.parametrize(("name", "feature"), [("largest_k", "top_k"), ("any_top_p", "top_p"), ("any_min_p", "min_p")])
def test_a_transform_left_out_is_seen(monkeypatch: pytest.MonkeyPatch, name: str, feature: str) -> None:
    monkeypatch.setattr(table, "kernels", dict)  # plain torch, from which it can be left out
    monkeypatch.setattr(BatchSampler, "probs", skipped(name))
    assert p_value(chain(3), *FEATURES[feature], draws=8000 if selection.ALL else 1000) < 1e-5


def test_a_feature_does_not_leak_to_its_neighbours() -> None:
    """A request without rules has the same text alone and among all features."""
    bare = [Request(f"bare {i}", prompt, SamplingParams(max_tokens=30, seed=i)) for i, prompt in enumerate(PROMPTS)]
    for shape in SHAPES.values():
        alone = run(engine(shape, 3), bare)
        crowd = mixed(greedy=False)
        assert run(engine(shape, 3 + len(crowd)), [*crowd, *[replace(r, id=f"again {r.id}") for r in bare]])[-3:] == alone
