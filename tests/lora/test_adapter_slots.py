"""Adapters take turns in their slots: who leaves, who waits, and what is dropped when."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mtpserve.config import LoRAConfig
from mtpserve.core.errors import InvalidRequest
from mtpserve.core.protocols.adapters import LoRARequest
from mtpserve.core.protocols.control import LoadLoRA, UnloadLoRA
from mtpserve.core.request import Request
from mtpserve.core.sampling import SamplingParams
from mtpserve.engine.lora.adapter_slots import AdapterSlots
from mtpserve.engine.process.affinity import Affinity
from mtpserve.engine.startup.build import build_engine
from tests.lora.adapters import CHAIN, Adapter, answers, config_of
from tests.models.checkpoints import Tiny, mimo

A, B, C = (LoRARequest(name, number, name) for number, name in enumerate("abc", 1))


def slots_of(number: int) -> tuple[AdapterSlots, list[str]]:
    """And what was read and dropped."""
    slots, log = AdapterSlots(), list[str]()

    def read(request: LoRARequest) -> bytes:
        log.append(request.lora_name)
        return request.lora_name.encode()

    slots.open(number, read, lambda lora_int_id: log.append(f"-{lora_int_id}"))
    return slots, log


def test_the_least_recently_used_that_nobody_uses_gives_way() -> None:
    slots, log = slots_of(2)
    for request in (A, B, C, A):
        slots.require(request)
    assert log == ["a", "b", "c"]
    first, second = slots.seat(A), slots.seat(B)
    assert {first, second} == {0, 1} and slots.seat(None) == -1
    assert slots.has_room(A) and not slots.has_room(C)
    slots.release(B)
    assert slots.has_room(C) and slots.seat(C) == second
    slots.release(A)
    slots.release(C)
    assert slots.seat(A) == first
    slots.release(A)
    assert slots.seat(B) == second, "c was used before a"


def test_what_is_unloaded_is_kept_as_long_as_a_request_lives() -> None:
    slots, log = slots_of(1)
    slots.require(A)
    slots.require(A)
    slots.seat(A)
    slots.retire(A.lora_int_id)
    slots.release(A)
    slots.leave(A)
    assert log == ["a"]
    slots.leave(A)
    assert log == ["a", "-1"]
    slots.retire(B.lora_int_id)  # unknown: it was never loaded
    slots.require(B)
    assert slots.seat(B) == 0, "the slot is free"


def test_a_number_is_one_adapter() -> None:
    slots, _ = slots_of(1)
    slots.require(A)
    with pytest.raises(InvalidRequest, match="lora_int_id 1 is that of the adapter 'a' in a: give 'z' another number"):
        slots.require(LoRARequest("z", 1, "z"))
    assert slots.fingerprint(None) == b"" and slots.fingerprint(A) == b"a"


def test_several_engines_know_an_adapters_prompts_apart() -> None:
    keys = [Affinity().keys(Request("r", list(range(200)), SamplingParams(), lora=lora)) for lora in (None, A, B, A)]
    assert keys[0] and keys[1] == keys[3] and keys[0][0] != keys[1][0] != keys[2][0] != keys[0][0]


def test_an_adapter_that_cannot_be_read_may_be_tried_again() -> None:
    slots = AdapterSlots()
    slots.open(1, lambda request: (_ for _ in ()).throw(InvalidRequest("unreadable")), lambda number: None)
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="unreadable"):
            slots.require(A)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return mimo(tmp_path_factory.mktemp("base"))


def test_an_engine_without_adapters_says_so(tiny: Tiny) -> None:
    engine = build_engine(config_of(tiny.directory, CHAIN))
    with pytest.raises(InvalidRequest, match="'a' needs an engine with --enable-lora"):
        engine.add(Request("r", [1, 2], SamplingParams(max_tokens=2), lora=A))
    assert "LoadLoRA" in engine.controls.take(LoadLoRA(A)).error


def test_nobody_overtakes_a_request_that_waits_for_a_slot(tiny: Tiny, tmp_path: Path) -> None:
    """One slot: the second adapter's request comes next, not the third one, which has the first's adapter. Those without one go on."""
    paths = [str(Adapter(seed).save(tmp_path / str(seed), tiny.tensors)) for seed in (1, 2)]
    engine = build_engine(config_of(tiny.directory, CHAIN, LoRAConfig(enable_lora=True, max_loras=1)), poison=True)
    one, two = (LoRARequest(path, number, path) for number, path in enumerate(paths, 1))
    sampling = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    for name, lora in (("1", one), ("2", two), ("3", one), ("4", None)):
        engine.add(Request(name, [3, 4, 5], replace(sampling, max_tokens=30 if name == "4" else 12), lora=lora))
    ended = list[str]()
    while engine.has_work:
        ended += [event.id for event in engine.step() if event.finish is not None]
        engine.check_integrity()
    assert ended.index("1") < ended.index("2") < ended.index("3")
    assert ended.index("4") < 3, "it waited for nobody"


def test_adapters_come_and_go_beside_requests(tiny: Tiny, tmp_path: Path) -> None:
    adapter, other = Adapter(1), Adapter(2)
    path = str(adapter.save(tmp_path / "it", tiny.tensors))
    engine = build_engine(config_of(tiny.directory, CHAIN, LoRAConfig(enable_lora=True, max_loras=1)), poison=True)
    first = LoRARequest("it", 1, path)
    assert engine.controls.take(LoadLoRA(first)).error == ""
    before = answers(engine, [first], prompts=[[3, 4, 5]])
    engine.add(Request("r", [3, 4, 5], SamplingParams(max_tokens=20, temperature=0, ignore_eos=True), lora=first))
    tokens = [token for event in engine.step() for token in event.tokens]
    assert engine.controls.take(UnloadLoRA(1)).error == ""
    other.save(tmp_path / "it", tiny.tensors)  # other numbers in the same place
    second = LoRARequest("it", 2, path)
    assert engine.controls.take(LoadLoRA(second)).error == ""
    while engine.has_work:
        tokens += [token for event in engine.step() for token in event.tokens]
    assert tokens == before[0], "it went on with what it had"
    after = answers(engine, [second], prompts=[[3, 4, 5]])
    merged = build_engine(config_of(other.merge(tmp_path / "merged", tiny), CHAIN))
    assert after == answers(merged, [None], prompts=[[3, 4, 5]]) != before


def test_what_cannot_be_loaded_harms_nobody(tiny: Tiny, tmp_path: Path) -> None:
    engine = build_engine(config_of(tiny.directory, CHAIN, LoRAConfig(enable_lora=True)), poison=True)
    reply = engine.controls.take(LoadLoRA(LoRARequest("x", 5, str(tmp_path / "nowhere"))))
    assert "adapter_config.json: No such file" in reply.error and reply.kind == "invalid"
    with pytest.raises(InvalidRequest, match="No such file"):
        engine.add(Request("r", [1], SamplingParams(max_tokens=2), lora=LoRARequest("x", 5, str(tmp_path / "nowhere"))))
    large = Adapter(1, 17).save(tmp_path / "large", tiny.tensors)
    assert "rank 17, and --max-lora-rank is 16" in engine.controls.take(LoadLoRA(LoRARequest("x", 5, str(large)))).error
    assert len(answers(engine, [None], prompts=[[1, 2]])[0]) == 20
