"""Pages that were in host memory or on disk meanwhile: text, drafts and acceptance are those of an engine that kept everything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mtpserve.config import CacheConfig, SpecConfig
from mtpserve.core.errors import ConfigError
from mtpserve.engine.engine import Engine
from mtpserve.engine.pages.kv_offload import TierOptions
from tests import selection
from tests.spec.diagonal import diagonal
from tests.spec.test_prefix_cache import PAGE, SHAPES, SYSTEM, facts, said, spoken
from tests.tiny import VOCAB, tiny_engine, tiny_model

MODEL = b"tiny" * 4
TURNS = 3 if selection.ALL else 2


def engine_with(shape: str, family: str, tiers: CacheConfig | None, pages: int = 400, model: Any = None, **options: Any) -> Engine:
    spec: int | SpecConfig = SHAPES[shape]
    cache = CacheConfig() if tiers is None else tiers
    below = TierOptions(cache.host_bytes, cache)
    return tiny_engine(model or tiny_model(family), spec, pages=pages, page_size=PAGE, below=below, fingerprint=MODEL, **options)


def histories() -> list[list[int]]:
    return [[*SYSTEM, *((13 * who + i) % VOCAB for i in range(5 + who))] for who in range(6)]


def talk(engine: Engine, turns: int = TURNS, first: int = 0) -> list[list[object]]:
    """Six conversations in turn: by the time that one goes on, the others have taken its pages."""
    seen, texts = [], histories()
    for turn in range(turns):
        for who in range(6):
            events = said(engine, f"{first} {turn} {who}", texts[who], temperature=0.7, seed=who)
            seen.append(facts(events))
            texts[who] += [*spoken(events), (turn + who) % VOCAB]
    return seen


@pytest.mark.parametrize(
    ("family", "shape", "backend"), diagonal(["sparse", "deepseek", "modules", "mimo"], ["tree", "chain", "plain"], ["reference", "cpu"])
)
def test_conversations_that_do_not_fit_the_device(family: str, shape: str, backend: str) -> None:
    model = tiny_model(family, kernels="cpu" if backend == "cpu" else "torch")
    small = engine_with(shape, family, CacheConfig(kv_offload_gib=0.01), pages=32, model=model, backend=backend)
    assert talk(small) == talk(engine_with(shape, family, None, model=model, backend=backend))
    stats = small.stats
    assert stats.loaded_pages["host"] > 20 and not stats.failed_transfers_total and stats.transfer_bytes_total["load"] > 0
    # What the first turn of each computed is not computed again.
    assert stats.cached_prompt_tokens_total > 0.75 * stats.prompt_tokens_total


def test_the_windows_of_layers_come_back_too() -> None:
    model = tiny_model("mimo", window=10)
    small = engine_with("chain", "mimo", CacheConfig(kv_offload_gib=0.01), pages=32, model=model, window_pages=16, budget=16)
    assert talk(small) == talk(engine_with("chain", "mimo", None, model=model))
    assert small.stats.loaded_pages["host"] > 20


@pytest.mark.parametrize("shape", SHAPES)
def test_another_engine_finds_the_pages_on_disk(shape: str, tmp_path: Path) -> None:
    tiers = CacheConfig(kv_offload_dir=str(tmp_path))
    first = talk(engine_with(shape, "deepseek", tiers), turns=1)
    second = engine_with(shape, "deepseek", tiers)
    assert talk(second, turns=1) == first
    found = sum(len(text) // PAGE * PAGE for text in histories())
    assert second.stats.loaded_pages["disk"] > 0 and second.stats.cached_prompt_tokens_total >= 0.9 * found


def test_damaged_files_are_computed_again(tmp_path: Path) -> None:
    tiers = CacheConfig(kv_offload_dir=str(tmp_path))
    first = talk(engine_with("chain", "deepseek", tiers), turns=1)
    for number, file in enumerate(sorted(tmp_path.rglob("*.kv"))):
        content = bytearray(file.read_bytes())
        if number % 3:
            content[-1 - number] ^= 4
            file.write_bytes(content)
    second = engine_with("chain", "deepseek", tiers)
    assert talk(second, turns=1) == first
    assert second.stats.failed_transfers_total["fetch"] > 0


def test_host_memory_for_less_than_a_page_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--kv-offload-gib 9.3.* is less than one KV page of"):
        engine_with("chain", "deepseek", CacheConfig(kv_offload_gib=2**-30))
