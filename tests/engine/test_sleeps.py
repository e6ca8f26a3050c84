"""Sleeping engines: memory goes back to the system, requests wait, and the texts afterwards are those without a sleep."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mtpserve import LLM
from mtpserve.config import CacheConfig, EngineConfig, ModelConfig, SpecConfig
from mtpserve.core.errors import EngineBusy, InvalidRequest
from mtpserve.core.protocols.control import Call, ContinueGeneration, PauseGeneration, SetWeightVersion, Sleep, WakeUp
from mtpserve.core.request import Request
from mtpserve.core.sampling import SamplingParams
from mtpserve.engine.engine import Engine
from mtpserve.engine.startup.build import build_engine
from mtpserve.runtime.occupation import storages as storages_module
from mtpserve.runtime.occupation.storages import Storages, give_back
from tests.engine.test_ranks import as_before, built, config_of
from tests.models import checkpoints
from tests.models.compressed_checkpoints import deepseek_v4
from tests.models.gemmas import gemma4_small
from tests.models.hybrids import nemotron_h, qwen3_5
from tests.models.ling import ling
from tests.models.longcat import longcat
from tests.models.own_layouts import gpt_oss
from tests.models.sparse_checkpoints import deepseek_v32

__all__ = ["as_before"]

PLAIN = SpecConfig(speculative_algorithm="none")
CHAIN = SpecConfig(speculative_algorithm="NEXTN", speculative_num_steps=3, speculative_adaptive=False)
PROMPTS = [[3 + 7 * i % 20 for i in range(3 + 18 * place)] for place in range(3)]
BOTH = ["weights", "kv_cache"]


def control(engine: Engine, call: Call) -> dict[str, Any]:
    assert engine.settle() == [] or engine.has_work
    return engine.controls.take(call).check().values


def texts(engine: Engine, between: Callable[[], None] = lambda: None) -> list[list[int]]:
    """Greedy ones. `between`: after some steps."""
    tokens: list[list[int]] = [[] for _ in PROMPTS]
    for number, prompt in enumerate(PROMPTS):
        engine.add(Request(str(number), prompt, SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)))
    for step in range(1000):
        if step == 3:
            for event in engine.settle():
                tokens[int(event.id)] += event.tokens
            between()
        if not engine.has_work:
            break
        for event in engine.step():
            assert event.error is None, event.error
            tokens[int(event.id)] += event.tokens
    engine.check_integrity()
    assert [len(text) for text in tokens] == [24] * len(PROMPTS)
    return tokens


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize("drops_weights", [False, True], ids=["level 1", "level 2"])
@pytest.mark.parametrize("spec", [PLAIN, CHAIN], ids=["plain", "drafts"])
def test_memory_goes_back_and_the_text_stays(spec: SpecConfig, drops_weights: bool) -> None:
    config = config_of(1, spec, tokens=1 << 15)
    with built(config) as engine:
        expected = texts(engine)
        runner: Any = engine.runner
        pool, weights = runner.step.stores.nbytes, sum(p.nbytes for p in runner.step.model.parameters())
        assert pool > 50 << 20 and weights > 10 << 20

        def sleep() -> None:
            gc.collect()
            before = resident()
            released = control(engine, Sleep(BOTH, drops_weights))["bytes"]
            assert before - resident() > 0.95 * released > 0.9 * (pool + weights * drops_weights)
            assert (engine.stats.sleeping, engine.stats.running, engine.stats.waiting) == (1, 0, len(PROMPTS))
            assert not engine.has_work and engine.step() == []
            assert control(engine, Sleep(BOTH))["bytes"] == 0, "it sleeps already"
            control(engine, WakeUp(["weights"]))
            assert not engine.has_work and engine.stats.sleeping == 1
            control(engine, WakeUp())
            control(engine, WakeUp())
            assert engine.has_work and engine.stats.sleeping == 0

        assert texts(engine, sleep) == expected
        assert texts(engine) == expected


def test_a_pause_and_a_sleep_end_by_themselves() -> None:
    with built(config_of(1)) as engine:
        expected = texts(engine)

        def both() -> None:
            control(engine, PauseGeneration("in_place"))
            control(engine, Sleep(["kv_cache"]))
            control(engine, ContinueGeneration())
            assert not engine.has_work
            control(engine, PauseGeneration("retract"))
            control(engine, WakeUp())
            assert not engine.has_work
            control(engine, ContinueGeneration())

        assert texts(engine, both) == expected


@pytest.mark.thorough
def test_all_ranks_sleep() -> None:
    with built(config_of(2)) as engine:
        expected = texts(engine)

        def sleep() -> None:
            assert control(engine, Sleep(BOTH, drops_weights=True))["bytes"] > 0
            control(engine, WakeUp())

        assert texts(engine, sleep) == expected


def test_weights_that_were_dropped_are_those_of_the_start_again() -> None:
    with built(config_of(1)) as engine:
        control(engine, SetWeightVersion("v2"))
        control(engine, Sleep(["weights"]))
        control(engine, WakeUp())
        assert engine.weight_version == "v2"
        control(engine, Sleep(["weights"], drops_weights=True))
        control(engine, WakeUp())
        assert engine.weight_version == "default"


def poison(address: int, nbytes: int) -> int:
    ctypes.memset(address, 0xFF, nbytes)
    return nbytes


FORMATS: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "deepseek, fp8": (checkpoints.deepseek, {"fp8": True}, {"quantization": "fp8"}),
    "int8": (checkpoints.mimo, {}, {"quantization": "int8"}),
    "plain torch": (checkpoints.mimo, {"tie_word_embeddings": True}, {"attention_backend": "reference"}),
    "mxfp4": (gpt_oss, {"mxfp4": True, "hidden_size": 96, "intermediate_size": 128}, {"quantization": "int4"}),
    "recurrent": (qwen3_5, {"tie_word_embeddings": True}, {}),
    "mamba": (nemotron_h, {}, {}),
    "gemma": (gemma4_small, {}, {}),
    "compressed": (deepseek_v4, {}, {}),
    "sparse": (deepseek_v32, {}, {}),
    "ling": (ling, {}, {}),
    "longcat": (longcat, {}, {}),
}


@pytest.mark.parametrize("name", FORMATS)
def test_weights_come_back_in_their_formats(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is dropped becomes NaN, however small: all of it has to be written again."""
    monkeypatch.setattr(storages_module, "give_back", poison)
    make, checkpoint, model = FORMATS[name]
    make(tmp_path, **checkpoint)
    config = EngineConfig(
        model=ModelConfig(model=str(tmp_path), device="cpu", dtype="float32", **model), cache=CacheConfig(max_total_tokens=1024)
    )
    engine = build_engine(config, poison=True)
    expected = texts(engine)
    assert control(engine, Sleep(BOTH, drops_weights=True))["bytes"] > 0
    control(engine, WakeUp())
    assert texts(engine) == expected
    engine.close()


def test_wrong_tags_are_named_and_change_nothing() -> None:
    with built(config_of(1)) as engine:
        with pytest.raises(InvalidRequest, match=r"^tags: 'graphs' must be one of weights, kv_cache$"):
            control(engine, Sleep(["weights", "graphs"]))
        assert engine.stats.sleeping == 0


def test_storages_come_back_with_what_they_had() -> None:
    """The way of a GPU, whose storages grow and shrink, on a CPU."""

    class Movable(Storages):
        def _release(self, storage: torch.UntypedStorage) -> int:
            return self._shrink(storage)

    table = torch.arange(50_000.0).reshape(100, 500)
    views = [table[3], table[:, 2:]]
    whole, tail = table.clone(), views[1].clone()
    for keep in (True, False):
        storages = Movable([table, *views], keep)
        assert storages.release() == 200_000 and table.untyped_storage().nbytes() == 0
        storages.resume()
        assert table.untyped_storage().nbytes() == 200_000
        if keep:
            assert torch.equal(table, whole) and torch.equal(views[1], tail)
    table.fill_(1.0)
    assert torch.equal(views[0], torch.ones(500))


def test_memory_that_is_given_back_reads_as_zeros_at_its_address() -> None:
    tensor = torch.ones(1 << 20)
    address = tensor.data_ptr()
    given = give_back(address, tensor.nbytes)
    assert tensor.nbytes - 8192 <= given <= tensor.nbytes
    assert int(tensor.count_nonzero()) <= 2048 and tensor.data_ptr() == address
    assert give_back(address, 100) == 0


def test_an_llm_sleeps() -> None:
    greedy = SamplingParams(max_tokens=12, temperature=0)
    with LLM("demo", max_total_tokens=1024, max_running_requests=2) as llm:
        (expected,) = llm.generate("import os", greedy)
        assert not llm.is_sleeping()
        stream = llm.stream("import os", greedy)
        next(stream)
        with pytest.raises(EngineBusy, match="streams are open"):
            llm.sleep()
        stream.close()  # type: ignore[attr-defined]
        for level in (1, 2):
            llm.sleep(level)
            assert llm.is_sleeping()
            with pytest.raises(EngineBusy, match="call wake_up"):
                llm.generate("import os", greedy)
            with pytest.raises(InvalidRequest, match="wake up the tag weights first"):
                llm.update_weights([("model.norm.weight", torch.ones(1))])
            llm.wake_up(["weights"])
            llm.wake_up()
            assert not llm.is_sleeping()
            assert llm.generate("import os", greedy)[0].tokens == expected.tokens
        with pytest.raises(InvalidRequest, match="level must be 1 or 2, got 3"):
            llm.sleep(3)
        with pytest.raises(InvalidRequest, match="tags"):
            llm.wake_up(["graphs"])
