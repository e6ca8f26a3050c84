"""The keystone: whatever is drafted, chunked, preempted or batched, the text is what plain decoding gives."""

from __future__ import annotations

from functools import cache

import pytest

from mtpserve.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, SpecConfig
from mtpserve.core.errors import ConfigError
from mtpserve.core.sampling import SamplingParams
from mtpserve.engine.startup.build import build_engine
from tests import selection
from tests.spec.diagonal import diagonal
from tests.spec.test_trees import tree
from tests.tiny import prompts, run, tiny_engine, tiny_model

GREEDY = SamplingParams(max_tokens=24, temperature=0)
ASKED = prompts(12 if selection.ALL else 8)


@cache
def texts_alone(family: str) -> list[list[int]]:
    """Without --all those of one family: the others' are computed side by side, which the same test compares with it."""
    model = tiny_model(family)
    if not selection.ALL and family != "deepseek":
        return run(tiny_engine(model, 0), ASKED, GREEDY)
    return [run(tiny_engine(model, 0), [prompt], GREEDY)[0] for prompt in ASKED]


FAMILIES = ["deepseek", "sparse", "mimo", "glm", "qwen", "modules"]
PLACES = {"chunks": (9, 24, 16), "preemption": (64, 44, 5), "odd pages": (17, 90, 3), "room": (64, 400, 4)}  # budget, pages, their size
DRAFTS: dict[str, int | SpecConfig] = {"0": 0, "tree": tree(2, 2, 5), "3": 3, "7": 7, "1": 1}


@pytest.mark.parametrize(("family", "place", "drafts"), diagonal(FAMILIES, PLACES.keys(), DRAFTS))
def test_greedy_text_does_not_depend_on_drafts_chunks_or_pages(family: str, place: str, drafts: int | SpecConfig) -> None:
    budget, pages, page_size = PLACES[place]
    budget = max(budget, 14) if isinstance(drafts, SpecConfig) else budget
    kernels = "torch" if place == "chunks" else None  # the texts do not depend on these, either
    engine = tiny_engine(tiny_model(family, kernels=kernels), drafts, budget=budget, pages=pages, page_size=page_size)
    assert run(engine, ASKED, GREEDY) == texts_alone(family)
    assert place != "preemption" or engine.stats.preemptions_total > 0


WINDOWED = [*prompts(5), *prompts(2, seed=3, longest=90)]


@cache
def windowed_texts_alone(family: str) -> list[list[int]]:
    model = tiny_model(family, layers=4, window=10)
    expected = [run(tiny_engine(model, 0), [prompt], GREEDY)[0] for prompt in WINDOWED]
    assert expected != [run(tiny_engine(tiny_model(family, layers=4), 0), [prompt], GREEDY)[0] for prompt in WINDOWED], "it shows nothing"
    return expected


@pytest.mark.parametrize(
    ("drafts", "place", "family"),
    diagonal(
        {"0": 0, "3": 3, "tree 2x5": tree(2, 2, 5), "7": 7, "tree 4x12": tree(3, 4, 12)},
        {"64": (64, 4), "14": (14, 3)},
        ["mimo", "deepseek"],
    ),
)
def test_greedy_text_of_layers_with_a_window(family: str, place: tuple[int, int], drafts: int | SpecConfig) -> None:
    """Drafts reach over the window's edge; prompts and texts are longer than several windows."""
    budget, page_size = place
    model = tiny_model(family, layers=4, window=10)
    assert run(tiny_engine(model, drafts, budget=budget, page_size=page_size), WINDOWED, GREEDY) == windowed_texts_alone(family)


def test_a_window_must_hold_the_deepest_path_of_a_tree() -> None:
    with pytest.raises(ConfigError, match=r"drafts 8 deep need layers with a window of at least 9, got 2 heads x 8, window 8"):
        tiny_engine(tiny_model("mimo", window=8), 3)
    assert run(tiny_engine(tiny_model("mimo", window=8), 0), [[1, 2]], GREEDY)


@pytest.mark.parametrize("drafts", [0, 3])
def test_a_seeded_request_gives_the_same_text_in_any_company(drafts: int) -> None:
    model, asked = tiny_model(), prompts(10)
    params = [SamplingParams(max_tokens=20, temperature=0.8, top_p=0.9, seed=i) for i in range(10)]
    alone = [run(tiny_engine(model, drafts), [prompt], sampling)[0] for prompt, sampling in zip(asked, params, strict=True)]
    assert len({tuple(tokens) for tokens in alone}) > 5
    assert run(tiny_engine(model, drafts), asked, params) == alone
    crowded = tiny_engine(model, drafts, pages=45, budget=40)
    assert run(crowded, asked, params) == alone
    assert crowded.stats.preemptions_total > 0


def test_a_shorter_answer_is_the_beginning_of_a_longer_one() -> None:
    model, asked = tiny_model(), prompts(4)
    longest = run(tiny_engine(model, 3), asked, GREEDY)
    for length in range(1, 12):
        cut = run(tiny_engine(model, 3), asked, SamplingParams(max_tokens=length, temperature=0))
        assert cut == [tokens[:length] for tokens in longest]


def test_stops_inside_an_accepted_run() -> None:
    model, asked = tiny_model(), prompts(6)
    whole = run(tiny_engine(model, 0), asked, GREEDY)
    for stop in sorted({tokens[7] for tokens in whole})[: None if selection.ALL else 2]:
        expected = [tokens[: tokens.index(stop) + 1] if stop in tokens else tokens for tokens in whole]
        for drafts in (0, 3, 7) if selection.ALL else (3, 7):
            assert run(tiny_engine(model, drafts, eos=(stop,)), asked, GREEDY) == expected
            by_id = SamplingParams(max_tokens=24, temperature=0, stop_token_ids=(stop,))
            assert run(tiny_engine(model, drafts), asked, by_id) == expected
            ignored = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
            assert run(tiny_engine(model, drafts, eos=(stop,)), asked, ignored) == whole


def test_greedy_and_sampled_requests_share_a_batch() -> None:
    model, asked = tiny_model(), prompts(6)
    params = [GREEDY if i % 2 else SamplingParams(max_tokens=24, temperature=1.0, min_p=0.05, seed=i) for i in range(6)]
    alone = [run(tiny_engine(model, 3), [prompt], sampling)[0] for prompt, sampling in zip(asked, params, strict=True)]
    assert run(tiny_engine(model, 3), asked, params) == alone
    plain = run(tiny_engine(model, 0), asked, GREEDY)
    assert alone[1::2] == plain[1::2]


def test_the_demo_model_in_a_small_pool() -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(ModelConfig().directory / "tokenizer.json"))
    starts = ["import os\n\ndef read_lines(path):\n", "class Node:\n    def __init__(self", "    try:\n        ", "# Return the", '"""A']
    asked = [tokenizer.encode(starts[i % 5] + "\n" * (i % 3) + f"x{i} = {i}\n" * (i // 8)).ids for i in range(64)][
        :: 1 if selection.ALL else 3
    ]
    length = 128 if selection.ALL else 64
    params, texts, preemptions = SamplingParams(max_tokens=length, temperature=0, ignore_eos=True), [], 0
    for drafts in (0, 1, 3, 7) if selection.ALL else (0, 3):
        config = EngineConfig(
            model=ModelConfig(dtype="float32"),
            cache=CacheConfig(max_total_tokens=4096 if selection.ALL else 1024),
            spec=SpecConfig(speculative_algorithm="NEXTN", speculative_num_steps=drafts),
            scheduler=SchedulerConfig(max_running_requests=32, chunked_prefill_size=256),
        )
        engine = build_engine(config, poison=True)
        texts.append(run(engine, asked, params))
        preemptions += engine.stats.preemptions_total
    assert preemptions > (10 if selection.ALL else 2)
    assert all(len(tokens) == length for tokens in texts[0])
    assert texts[1:] == texts[:1] * (len(texts) - 1)
