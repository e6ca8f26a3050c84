"""The real step under a late engine, launched and replayed: the text is the one of a step at a time."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from mtpserve.config import SpecConfig
from mtpserve.core.request import Request
from mtpserve.core.sampling import SamplingParams, Speculation
from tests.runtime.recorders import Again, runner_of
from tests.tiny import prompts, run, tiny_engine, tiny_model

PLAIN, CHAIN = SpecConfig(speculative_algorithm="none"), SpecConfig(speculative_algorithm="MTP", speculative_num_steps=3)
TREE = SpecConfig(speculative_algorithm="MTP", speculative_num_steps=3, speculative_eagle_topk=2, speculative_num_draft_tokens=8)
MIXED = SpecConfig(speculative_algorithm="MTP+NGRAM", speculative_num_steps=2)
KINDS = pytest.mark.parametrize("spec", [PLAIN, CHAIN, TREE, MIXED], ids=["plain", "chain", "tree", "mixed"])
STOPS = (3, 17)


def asked(sampled: bool) -> list[SamplingParams]:
    """Six requests that differ in everything that a step may have to know about them."""
    hot: dict[str, Any] = {"temperature": 0.8 if sampled else 0.0, "seed": 5, "max_tokens": 30}
    return [
        SamplingParams(**hot, stop_token_ids=STOPS),
        SamplingParams(**hot, repetition_penalty=1.3, min_tokens=9),
        SamplingParams(**hot, top_k=7, top_p=0.9, ignore_eos=True),
        SamplingParams(**hot, logprobs=2),
        SamplingParams(**hot, logit_bias={4: 3.0}, min_p=0.05),
        SamplingParams(**hot, speculation=Speculation(num_steps=1)),
    ]


def texts(spec: SpecConfig, sampled: bool, family: str = "mimo", **options: Any) -> list[list[int]]:
    engine = tiny_engine(tiny_model(family), spec, eos=(11,), **options)
    return run(engine, prompts(6, seed=2), asked(sampled))


@cache
def texts_in_time(spec: SpecConfig, sampled: bool, family: str = "mimo") -> list[list[int]]:
    return texts(spec, sampled, family)


@KINDS
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("overlap", [1, 2])
@pytest.mark.parametrize("family", ["mimo", "modules"])
def test_a_late_engine_gives_the_same_text(spec: SpecConfig, sampled: bool, family: str, overlap: int) -> None:
    assert texts(spec, sampled, family, overlap=overlap) == texts_in_time(spec, sampled, family)


@pytest.mark.parametrize("spec", [PLAIN, CHAIN, TREE], ids=["plain", "chain", "tree"])
@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_replayed_steps_give_the_same_text(spec: SpecConfig, sampled: bool, overlap: int) -> None:
    """Some of the requests cannot be replayed, and prompts come in chunks, so that most steps have both."""
    recorder = Again()
    assert texts(spec, sampled, overlap=overlap, recorder=recorder, budget=24) == texts_in_time(spec, sampled)
    assert len(recorder.replayed) > 20 and recorder.recordings < len(recorder.replayed) / 2


@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_a_small_pool_preempts_and_the_text_stays(overlap: int) -> None:
    params = [SamplingParams(temperature=0.7, seed=i, max_tokens=40) for i in range(5)]
    alone = run(tiny_engine(tiny_model(), CHAIN), prompts(5, seed=4), params)
    engine = tiny_engine(tiny_model(), CHAIN, pages=34, overlap=overlap, recorder=Again(), seats=4)
    assert run(engine, prompts(5, seed=4), params) == alone
    assert engine.stats.preemptions_total > 0


@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_the_device_ends_requests_where_the_host_does(overlap: int) -> None:
    engine = tiny_engine(tiny_model(), CHAIN, eos=(11,), overlap=overlap)
    req_tensors = runner_of(engine).req_tensors
    for i, params in enumerate(asked(sampled=True)):
        engine.add(Request(str(i), prompts(6, seed=2)[i], params))
    ended: dict[int, list[int]] = {}
    live = dict(engine._scheduler.live)
    seat_of: dict[str, int] = {}
    while engine.has_work:
        for event in engine.step():
            if event.finish is not None:
                ended[seat_of[event.id]] = live[event.id].tokens
        seat_of |= {req.id: req.req_idx for req in live.values() if req.req_idx is not None}
    assert len(ended) == 6 and bool(req_tensors.done[:6].all())
    for req_idx, tokens in ended.items():
        # Steps that came too late left the seat alone; behind the stop stands at most what came with it in one step.
        length = int(req_tensors.num_tokens[req_idx])
        assert len(tokens) <= length <= len(tokens) + 3 and req_tensors.tokens[req_idx, : len(tokens)].tolist() == tokens
