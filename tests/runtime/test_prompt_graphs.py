"""Captured prompts, with a stand-in for the recorder: which are replayed, how they are padded, and that the text stays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import count

import pytest
import torch

from mtpserve.config import SpecConfig
from mtpserve.core.request import Request
from mtpserve.core.sampling import SamplingParams
from mtpserve.engine.engine import Engine
from mtpserve.runtime.graphs import graphs as graphs_module
from mtpserve.runtime.graphs.prompt_rows import Prompts, padded_prompts, prompt_layout
from mtpserve.runtime.inputs import row_layout
from tests.runtime.recorders import Again
from tests.runtime.test_graphs import CHAIN, GREEDY, SPECS, TREE, graphs_of
from tests.spec.diagonal import diagonal
from tests.tiny import CPU, VOCAB, prompts, run, tiny_engine, tiny_model


@pytest.mark.parametrize(("family", "spec"), diagonal(["oss", "hybrid", "mimo", "deepseek", "modules", "chained"], SPECS))
def test_replayed_prompts_give_the_same_text(spec: SpecConfig, family: str) -> None:
    """Beside others that decode, and after pages of other requests, in steps with room for several."""
    first = prompts(5, seed=4, longest=40)
    rounds = [first, [prompt + more for prompt, more in zip(first, prompts(5, seed=6, longest=20), strict=True)]]
    params = [SamplingParams(max_tokens=7 + 3 * i, temperature=0.7 * (i % 2), top_k=9 * (i % 3), seed=i) for i in range(5)]
    plain = tiny_engine(tiny_model(family), spec, budget=100)
    wanted = [run(plain, each, params) for each in rounds]
    engine = tiny_engine(tiny_model(family), spec, budget=100, recorder=Again(), overlap=1)
    assert [run(engine, each, params) for each in rounds] == wanted
    resumed = {key.resumed for key in graphs_of(engine).captured if key.rows and not key.requests}
    # A hybrid model starts again where a state was kept.
    assert resumed == {False, spec.steps > 0 and family != "hybrid"}, "prompts were launched"


def arrivals(
    engine: Engine, requests: Sequence[tuple[list[int], SamplingParams]], depths: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> list[list[int]]:
    """A request for every second step; steps draft as deep as `depths` say in turn. → the tokens of each request."""
    tokens: list[list[int]] = [[] for _ in requests]
    for number in count():
        if number % 2 == 0 and number // 2 < len(requests):
            engine.add(Request(str(number // 2), *requests[number // 2]))
        monkeypatch.setattr(engine, "_next_depth", partial(depths.__getitem__, number % len(depths)))
        for event in engine.step():
            assert event.error is None, event.error
            tokens[int(event.id)] += event.tokens
        if not engine.has_work and number // 2 >= len(requests):
            break
    engine.check_integrity()
    return tokens


@pytest.mark.parametrize(("family", "spec"), diagonal(["mimo", "hybrid", "deepseek", "modules"], SPECS))
def test_prompts_and_others_in_one_pass(spec: SpecConfig, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same text, and as many drafts accepted: also rows that wait for the draft model are absorbed as they were stored."""
    wants = [min(depth, spec.steps) for depth in (0, 0, 0, 3, 3, 1)]
    params = [SamplingParams(max_tokens=11 + i % 3, temperature=0.7 * (i % 3 == 1), seed=i) for i in range(9)]
    requests = list(zip(prompts(9, seed=8, longest=24), params, strict=True))
    plain, engine = (tiny_engine(tiny_model(family), spec, recorder=recorder, overlap=1) for recorder in (None, Again()))
    assert arrivals(engine, requests, wants, monkeypatch) == arrivals(plain, requests, wants, monkeypatch)
    mixed = {key.max_steps > 0 for key in graphs_of(engine).captured if key.rows and key.requests}
    assert mixed == (set() if spec is TREE else {draft_depth > 0 for draft_depth in wants})
    assert engine.stats.accepted_tokens_total == plain.stats.accepted_tokens_total


def test_what_fits_into_a_step_is_captured_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each number of requests that decode, and prompts in all the rows that these leave."""
    graphs = graphs_of(tiny_engine(tiny_model(), CHAIN, recorder=Again(), seats=40))
    monkeypatch.setattr(graphs, "capture", lambda key: graphs.captured.setdefault(key, None))
    graphs.capture_all([GREEDY], False, prompts=150)
    for requests in range(1, 150 // 4):
        for rows in (1, (150 - 4 * requests) // 2, 150 - 4 * requests):
            key = graphs.mixed_key(requests, 3, 3, GREEDY, Prompts([max(rows, 1)], []), False)
            assert key is None or key in graphs.captured, (requests, rows)


def test_prompts_that_a_graph_does_not_hold_are_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many rows, too many requests, chunks that do not end their prompt, and scored ones."""
    monkeypatch.setattr(graphs_module, "PROMPTS", ((32, 4), (64, 8)))
    engine = tiny_engine(tiny_model(), CHAIN, budget=160, seats=16, recorder=Again())
    graphs, short, number = graphs_of(engine), SamplingParams(max_tokens=3), count()

    def replayed(lengths: list[int], params: SamplingParams = short) -> set[int]:
        """All prompts differ from their first token on."""
        graphs.captured.clear()
        run(engine, [[next(number) % VOCAB] * length for length in lengths], params)
        return {key.rows for key in graphs.captured} - {0}

    assert replayed([9, 11]) == {32} and replayed([30]) == {64} and replayed([3] * 4) == {64} and replayed([30, 28]) == {64}
    assert replayed([30, 29]) == set() and replayed([3] * 8) == set()
    assert replayed([9], replace(short, prompt_logprobs=1)) == set()
    chunked = tiny_engine(tiny_model(), CHAIN, budget=16, recorder=Again())
    run(chunked, [list(range(30))], short)
    assert {key.rows for key in graphs_of(chunked).captured} == {0, 32}, "its last chunk alone is replayed"


@pytest.mark.parametrize("lengths", [[1], [5, 1, 9], [3] * 7, [57]])
def test_what_pads_prompts_has_rows_of_its_own(lengths: list[int]) -> None:
    graphs = graphs_of(tiny_engine(tiny_model(), CHAIN, recorder=Again()))
    key = graphs.prompt_key(Prompts(lengths, [1] if len(lengths) > 1 else []), 3, GREEDY)
    assert key is not None and key.rows == 64
    padded, real, resumed = padded_prompts(Prompts(lengths, [1] if len(lengths) > 1 else []), key.rows, key.spans, 0)
    assert padded[: len(lengths)] == lengths and min(padded) > 0 and sum(padded) == key.rows and len(padded) == key.spans
    assert real == [1] * len(lengths) + [0] * (key.spans - len(lengths))
    assert set(resumed) == ({1} if len(lengths) > 1 else {key.spans - 1})
    layout, kept = prompt_layout(torch.tensor(padded), torch.tensor(real), key.rows), row_layout(tuple((n, 0, True) for n in padded), CPU)
    given = sum(lengths)
    for name in ("row_span", "node", "query_start_loc", "num_tokens", "num_draft_tokens", "last_token_rows", "sample_rows"):
        assert torch.equal(getattr(layout, name), getattr(kept, name)), name
    assert torch.equal(layout.offset[:given], kept.offset[:given]) and not layout.offset[given:].any()


def test_steps_that_defer_rows_beside_prompts_are_captured_at_start(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = graphs_of(tiny_engine(tiny_model(), CHAIN, recorder=Again(), seats=20))
    monkeypatch.setattr(graphs, "capture", lambda key: graphs.captured.setdefault(key, None))
    graphs.capture_all([GREEDY], False, plain_above=0, prompts=150)
    keys = [graphs.mixed_key(requests, 0, 0, GREEDY, Prompts([1], []), True) for requests in (1, 20)]
    assert all(key is not None and key.defers_kv and key in graphs.captured for key in keys)
