"""Depths that change from step to step and differ from request to request: the texts are those of plain decoding."""

from __future__ import annotations

from functools import cache
from random import Random

import pytest

from mtpserve.config import SpecConfig
from mtpserve.core.request import Request
from mtpserve.core.sampling import SamplingParams
from mtpserve.engine.engine import Engine
from mtpserve.engine.startup.start import try_out
from mtpserve.runtime.sampling.sampling import usual_features
from tests import selection
from tests.runtime.recorders import Again, runner_of
from tests.runtime.test_graphs import graphs_of
from tests.tiny import prompts, run, tiny_engine, tiny_model

CHAIN = SpecConfig(speculative_algorithm="MTP", speculative_num_steps=3)
KINDS = {
    "chain": CHAIN,
    "tree": SpecConfig(speculative_algorithm="MTP", speculative_num_steps=3, speculative_eagle_topk=2, speculative_num_draft_tokens=8),
    "n-grams": SpecConfig(speculative_algorithm="NGRAM", speculative_num_steps=4),
    "both": SpecConfig(speculative_algorithm="MTP+NGRAM", speculative_num_steps=2),
}
PARAMS = [
    SamplingParams(max_tokens=24, temperature=0),
    SamplingParams(max_tokens=30, temperature=0.9, seed=3),
    SamplingParams(max_tokens=19, temperature=1.0, top_p=0.9, seed=8),
    SamplingParams(max_tokens=27, temperature=0.7, top_k=9, seed=5, repetition_penalty=1.2),
]


def erratic(engine: Engine, seed: int, calm: int = 0) -> Engine:
    """The policy chooses at random, and as it likes every third time. `calm`: now and then nothing is drafted for so many steps."""
    policy, dice, left = engine.policy, Random(seed), [0]
    assert policy is not None
    choose = policy.choose

    def chosen(seqs):  # type: ignore[no-untyped-def]
        left[0] = left[0] - 1 if left[0] else calm * (dice.random() < 0.1)
        if left[0]:
            return 0
        if not calm and dice.random() < 0.3:
            return choose(seqs)
        for seq in seqs:
            seq.draft.max_draft_tokens = dice.choice([None, *range(policy.sizes.num_proposed + 1)])
        return dice.randint(0, policy.max_depth)

    policy.choose = chosen  # type: ignore[method-assign]
    return engine


@cache
def plain_texts(family: str) -> list[list[int]]:
    return run(tiny_engine(tiny_model(family), 0), prompts(4, seed=1), PARAMS)


@pytest.mark.parametrize("family", ["mimo", "deepseek", "modules", "chained"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("overlap", [0, 1])
def test_texts_are_those_of_plain_decoding(family: str, kind: str, overlap: int) -> None:
    """Sampled ones too: with a seed, drafts are coupled to the noise of the choice."""
    for seed in range(3 if selection.ALL else 1):
        engine = erratic(tiny_engine(tiny_model(family, kernels="torch"), KINDS[kind], adaptive=True, overlap=overlap), seed)
        assert run(engine, prompts(4, seed=1), PARAMS) == plain_texts(family)


@pytest.mark.parametrize("family", ["mimo", "deepseek"])
@pytest.mark.parametrize("kind", ["chain", "tree"])
@pytest.mark.parametrize("pauses", [(0,), (1, 1, 20)], ids=["at once", "in turn"])
def test_captured_steps_draft_what_others_do(family: str, kind: str, pauses: tuple[int, ...]) -> None:
    """Also after captured steps whose rows were absorbed later. `pauses`: steps after each request, so that prompts are computed beside
    requests that decode, some of which have rows that are absorbed later."""
    model, asked = tiny_model(family), prompts(5 * len(pauses), seed=4)
    params, proposed = SamplingParams(max_tokens=90, temperature=0, ignore_eos=True), list[dict[str, list[list[int]]]]()
    for recorder in (None, Again()):
        engine = erratic(tiny_engine(model, KINDS[kind], adaptive=True, overlap=1, recorder=recorder), 5, calm=20)
        if recorder is not None:
            greedy = usual_features(runner_of(engine).drafter.coupled)[:1]
            graphs_of(engine).capture_all(greedy, kind == "tree", adaptive=True, prompts=64)
        made = recorder and recorder.recordings
        drafts: dict[str, list[list[int]]] = {str(number): [] for number in range(len(asked))}
        for number, prompt in enumerate(asked):
            engine.add(Request(str(number), prompt, params))
            for event in (event for _ in range(pauses[number % len(pauses)]) for event in engine.step()):
                drafts[event.id].append(event.proposal.tokens)
        while engine.has_work:
            for event in engine.step():
                drafts[event.id].append(event.proposal.tokens)
        assert recorder is None or recorder.replayed
        assert recorder is None or recorder.recordings == made, "something was captured while it served"
        proposed.append(drafts)
    assert proposed[0] == proposed[1]
    each = [tokens for tokens in proposed[0].values() for tokens in tokens]
    assert sum(map(len, each)) > 100 and each.count([]) > 100


def test_some_drafts_were_accepted_and_some_were_not_made() -> None:
    engine = erratic(tiny_engine(tiny_model(), CHAIN, adaptive=True), 0)
    run(engine, prompts(6, seed=2), SamplingParams(max_tokens=60, temperature=0))
    drafts = engine.stats.draft_tokens_per_position[:3]
    assert drafts[0] > drafts[1] > drafts[2] > 0


@pytest.mark.parametrize(("spec", "adapts"), [(CHAIN, True), (KINDS["both"], True), (SpecConfig(speculative_algorithm="none"), False)])
def test_by_default_depths_are_chosen(spec: SpecConfig, adapts: bool) -> None:
    assert spec.adaptive is adapts


def test_lossy_thresholds_fix_the_depth() -> None:
    """There the text depends on what is drafted."""
    lossy = SpecConfig(speculative_algorithm="MTP", speculative_accept_threshold_single=0.5)
    assert not lossy.adaptive and tiny_engine(tiny_model(), lossy).policy is None


def test_a_depth_of_zero_is_measured_and_left_again() -> None:
    engine = tiny_engine(tiny_model(), CHAIN, adaptive=True)
    try_out(engine)
    assert engine.policy is not None and engine.policy.forced_depth is None
    assert {key.passes for key in engine.policy.times.cells} >= {0, 1, 3}
    assert engine.stats.draft_tokens_total == 0 and not engine.has_work
    engine.check_integrity()
