"""Pages that the windows of a real model have left are given again, full of NaN: the text stays what it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from mtpserve.cache.pages import PageAllocator
from mtpserve.cache.pool import KVPool
from mtpserve.config import SpecConfig
from mtpserve.core.request import Request
from mtpserve.core.sampling import SamplingParams
from mtpserve.engine.engine import Engine
from mtpserve.layers.decoder import DecoderModel
from tests import selection
from tests.runtime.recorders import Again, runner_of
from tests.spec.diagonal import diagonal
from tests.spec.test_trees import tree
from tests.tiny import prompts, run, tiny_engine, tiny_model

WINDOW, PAGE, BUDGET = 10, 4, 14
SHAPES: dict[str, int | SpecConfig] = {"tree": tree(3, 3, 9), "chain": 3, "plain": 0}
ASKED = [*prompts(2), *prompts(3, seed=4, longest=90)]
GREEDY = SamplingParams(max_tokens=24 if selection.ALL else 16, temperature=0)


@pytest.fixture(scope="module", params=["deepseek", "mimo"])
def model(request: pytest.FixtureRequest) -> DecoderModel:
    return tiny_model(request.param, layers=3, window=WINDOW, kernels="torch" if request.param == "deepseek" else None)


@pytest.fixture(scope="module")
def wanted(model: DecoderModel) -> list[list[int]]:
    """What is asked, each alone."""
    return [run(tiny_engine(model, 0), [prompt], GREEDY)[0] for prompt in ASKED]


def engine_with(model: DecoderModel, shape: int | SpecConfig, window_pages: int = 200, **options: object) -> Engine:
    return poisoning(tiny_engine(model, shape, page_size=PAGE, budget=BUDGET, window_pages=window_pages, **options))  # type: ignore[arg-type]


def poisoning(engine: Engine) -> Engine:
    """Pages are poisoned when they are given, which the steps before have all read by then."""
    pools = [each for store in runner_of(engine).step.stores.stores for each in store.pools]
    for number, group in enumerate(engine._pages.groups):
        own = [pool for of_group, pool in pools if of_group == number]
        group.allocator.allocate = poisoned(group.allocator, own)  # type: ignore[method-assign]
    return engine


def poisoned(allocator: PageAllocator, pools: list[KVPool]) -> Callable[[int], list[int]]:
    allocate = allocator.allocate

    def given(count: int) -> list[int]:
        pages = allocate(count)
        for pool in pools:
            for part in pool.parts:
                part[:, : pool.pages * pool.page_size].unflatten(1, (-1, pool.page_size))[:, pages] = torch.nan
        return pages

    return given


POOLS = {"room": (200, 0, False), "few": (60, 0, False), "few, late": (60, 1, False), "few, late, replayed": (60, 1, True)}


@pytest.mark.parametrize(("pool", "shape"), diagonal(POOLS, SHAPES))
def test_texts_are_those_of_a_pool_without_end(
    model: DecoderModel, wanted: list[list[int]], shape: int | SpecConfig, pool: tuple[int, int, bool]
) -> None:
    window_pages, overlap, replayed = pool
    options: dict[str, Any] = {"recorder": Again(), "seats": 4} if replayed else {}
    assert run(engine_with(model, shape, window_pages, overlap=overlap, **options), ASKED, GREEDY) == wanted


def test_a_long_text_holds_a_bounded_number_of_pages(model: DecoderModel) -> None:
    """Its group of the window could not hold the prompt."""
    prompt = prompts(1, seed=9)[0] * 20
    engine, most = engine_with(model, 3, 22), 0
    ahead = runner_of(engine).sizes.num_lookahead_tokens(0)
    engine.add(Request("0", prompt[:80], SamplingParams(max_tokens=70, temperature=0)))
    tokens: list[int] = []
    while engine.has_work:
        for event in engine.step():
            assert event.error is None
            tokens += event.tokens
        most = max([most, *(len(req.cache.blocks[1].pages) for req in engine._scheduler.running)])
    assert most <= -(-(WINDOW + BUDGET + ahead) // PAGE) + 1 <= 22 < 150 // PAGE
    assert tokens == run(tiny_engine(model, 0), [prompt[:80]], SamplingParams(max_tokens=70, temperature=0))[0]


SEATS = {"4": (4, 0), "4, late": (4, 1), "2": (2, 0)}


@pytest.mark.parametrize(("length", "shape", "places"), diagonal({str(length): length for length in (23, 24, 25, 41)}, SHAPES, SEATS))
def test_requests_with_one_prompt(model: DecoderModel, shape: int | SpecConfig, length: int, places: tuple[int, int]) -> None:
    """They share pages where the windows still have them, and compute the prompt again where not."""
    prompt = (prompts(1, seed=2)[0] * 30)[:length]
    params = [SamplingParams(max_tokens=12, temperature=0.7 * (i > 0), seed=i) for i in range(4)]
    wanted = [run(tiny_engine(model, shape), [prompt], each)[0] for each in params]
    seats, overlap = places
    shared, engine = 0, engine_with(model, shape, 80, seats=seats, overlap=overlap)
    tokens: list[list[int]] = [[] for _ in params]
    for i, each in enumerate(params):
        engine.add(Request(str(i), prompt, each))
    while engine.has_work:
        for event in engine.step():
            assert event.error is None
            tokens[int(event.id)] += event.tokens
            shared += sum(req.cache.num_shared_tokens > 0 for req in engine._scheduler.running)
        engine.check_integrity()
    assert tokens == wanted and engine.stats.pages_used == 0
    assert shared > 0
