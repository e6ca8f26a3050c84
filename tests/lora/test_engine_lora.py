"""Engines with adapters against engines of merged checkpoints: two adapters and none in one batch, with drafts and without."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mtpserve.config import LoRAConfig, SpecConfig
from mtpserve.core.protocols.adapters import LoRARequest
from mtpserve.core.protocols.control import UpdateTensors
from mtpserve.core.request import Request
from mtpserve.engine.engine import Engine
from mtpserve.engine.startup.build import build_engine
from tests.lora.adapters import ASKED, CHAIN, PLAIN, PROMPTS, SEEDED, TREE, Adapter, answers, config_of
from tests.models.checkpoints import Tiny, mimo

ONE, TWO = Adapter(1), Adapter(2, 3, ("q_proj", "v_proj", "down_proj"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def tiny(folder: Path) -> Tiny:
    made = mimo(folder / "base")
    ONE.save(folder / "one", made.tensors)
    TWO.save(folder / "two", made.tensors)
    return made


@pytest.fixture(scope="module")
def merged(folder: Path, tiny: Tiny) -> list[list[list[int]]]:
    """The greedy texts of all prompts by plain decoding: of the model, and with each adapter merged into it."""
    places = [tiny.directory, ONE.merge(folder / "one-merged", tiny), TWO.merge(folder / "two-merged", tiny)]
    texts = [answers(build_engine(config_of(place, PLAIN)), [None] * len(PROMPTS)) for place in places]
    assert texts[0] != texts[1] != texts[2] != texts[0]
    return texts


def engine_of(folder: Path, tiny: Tiny, spec: SpecConfig, slots: int = 2, backend: str = "auto") -> tuple[Engine, list[LoRARequest | None]]:
    """And the model, its first and its second adapter, in turn for each prompt."""
    lora = LoRAConfig(lora_modules=(f"one={folder / 'one'}", f"two={folder / 'two'}"), max_loras=slots, max_lora_rank=5)
    return build_engine(config_of(tiny.directory, spec, lora, backend), poison=True), [None, *lora.requests] * 2


def wanted(merged: list[list[list[int]]]) -> list[list[int]]:
    return [merged[i % 3][i] for i in range(len(PROMPTS))]


@pytest.mark.parametrize("backend", ["auto", pytest.param("reference", marks=pytest.mark.thorough)])
@pytest.mark.parametrize("slots", [2, 1])
@pytest.mark.parametrize("spec", [PLAIN, CHAIN, TREE], ids=["plain", "chain", "tree"])
def test_texts_are_those_of_merged_weights(
    folder: Path, tiny: Tiny, merged: list[list[list[int]]], spec: SpecConfig, slots: int, backend: str
) -> None:
    """With one slot the adapters take turns."""
    engine, loras = engine_of(folder, tiny, spec, slots, backend)
    assert answers(engine, loras) == wanted(merged)
    assert engine.stats.draft_tokens_total > 0 or not spec.steps
    assert answers(engine, loras[::-1]) == [merged[(2, 1, 0)[i % 3]][i] for i in range(len(PROMPTS))], "and again, from the cache"


@pytest.mark.parametrize("spec", [CHAIN, TREE], ids=["chain", "tree"])
def test_a_seed_gives_the_same_text_with_drafts(folder: Path, tiny: Tiny, spec: SpecConfig) -> None:
    adaptive = replace(spec, speculative_adaptive=True)
    engines = [engine_of(folder, tiny, each) for each in (PLAIN, adaptive)]
    plain, drafted = (answers(engine, loras, SEEDED) for engine, loras in engines)
    assert plain == drafted


def test_requests_without_an_adapter_are_the_same_beside_others(folder: Path, tiny: Tiny) -> None:
    """To the last bit: log-probabilities tell."""
    engine, loras = engine_of(folder, tiny, CHAIN)
    scored = replace(SEEDED, logprobs=0, temperature=0.0)

    def scores(chosen: list[LoRARequest | None]) -> list[float]:
        for i, lora in enumerate(chosen):
            engine.add(Request(str(i), PROMPTS[0], scored, lora=lora, salt=str(chosen)))
        found = []
        while engine.has_work:
            found += [score.logprob for event in engine.step() if event.id == "0" for score in event.logprobs or ()]
        return found

    assert scores([None]) == scores([None, *loras[1:3]])
    assert scores([loras[1]]) == scores([loras[1], None, loras[2]])


def test_prefixes_belong_to_an_adapter(folder: Path, tiny: Tiny) -> None:
    engine, loras = engine_of(folder, tiny, CHAIN)
    prompt = [list(range(2, 22))]

    def cached(lora: LoRARequest | None) -> int:
        before = engine.stats.cached_prompt_tokens_total
        answers(engine, [lora], prompts=prompt)
        return engine.stats.cached_prompt_tokens_total - before

    assert [cached(lora) for lora in loras[:3]] == [0, 0, 0]
    again = LoRARequest("again", 9, str(folder / "one"))
    assert [cached(lora) for lora in [*loras[:3], again]] == [16] * 4, "the same numbers under another name have the same pages"


def test_preempted_requests_go_on_with_their_adapter(folder: Path, tiny: Tiny, merged: list[list[list[int]]]) -> None:
    config = config_of(tiny.directory, CHAIN, LoRAConfig(enable_lora=True, max_loras=2))
    small = replace(config, cache=replace(config.cache, max_total_tokens=72), model=replace(config.model, context_length=48))
    engine = build_engine(small, poison=True)
    loras = [None, *(LoRARequest(name, i, str(folder / name)) for i, name in enumerate(("one", "two"), 1))] * 2
    assert answers(engine, loras) == wanted(merged)
    assert engine.stats.preemptions_total > 0


@pytest.mark.parametrize("backend", ["auto", pytest.param("reference", marks=pytest.mark.thorough)])
def test_new_weights_keep_the_adapters(folder: Path, tiny: Tiny, tmp_path: Path, backend: str) -> None:
    """Also of a request that runs: it goes on as if it had come now, and shares no pages with other adapters."""
    engine, loras = engine_of(folder, tiny, CHAIN, backend=backend)
    answers(engine, loras)
    trained = mimo(tmp_path / "trained", seed=5)
    engine.add(Request("r", PROMPTS[1], replace(ASKED, max_tokens=30), lora=loras[1]))
    engine.step()
    assert engine.controls.take(UpdateTensors(trained.tensors)).error == ""
    while engine.has_work:
        assert all(event.error is None for event in engine.step())
    merged = [ONE.merge(tmp_path / "one", trained), TWO.merge(tmp_path / "two", trained)]
    texts = [answers(build_engine(config_of(place, PLAIN)), [None] * 6) for place in (trained.directory, *merged)]
    assert answers(engine, loras) == wanted(texts)


def test_bfloat16_in_cpp_is_lossless(folder: Path, tiny: Tiny) -> None:
    """Near ties would show a row whose numbers depend on others."""
    texts = []
    for spec in (PLAIN, CHAIN, TREE):
        lora = LoRAConfig(lora_modules=(f"one={folder / 'one'}", f"two={folder / 'two'}"), max_loras=2)
        config = config_of(tiny.directory, spec, lora, "cpu")
        engine = build_engine(replace(config, model=replace(config.model, dtype="bfloat16")))
        texts.append(answers(engine, [None, *lora.requests] * 2))
    assert texts[0] == texts[1] == texts[2]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
