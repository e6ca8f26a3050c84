"""The plan against what is really allocated."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mtpserve.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, SpecConfig
from mtpserve.core.request import Request
from mtpserve.core.sampling import SamplingParams
from mtpserve.engine.build import build_engine
from mtpserve.engine.planning import fixed, lookahead_of, plan, state_of
from mtpserve.runtime.memory import ESTIMATE, plan_memory, usable_memory
from mtpserve.weights.quantise import quantise

CHAIN = SpecConfig(speculative_algorithm="MTP", speculative_num_steps=3)
TREE = SpecConfig(speculative_algorithm="MTP", speculative_num_steps=3, speculative_eagle_topk=4, speculative_num_draft_tokens=17)


def allocated() -> dict[int, int]:
    """Storages of all tensors that live, by address: views of one another count once. oneDNN's packed ones hide theirs."""
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        if isinstance(thing, torch.Tensor) and thing.device.type == "cpu":
            if thing.layout is torch.strided:
                storage = thing.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
            else:
                found[id(thing)] = thing.numel() * thing.element_size()
    return found


@pytest.mark.parametrize("spec", [SpecConfig(), CHAIN, TREE], ids=["plain", "chain", "tree"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tokens", [2048, 40000])
def test_the_table_adds_up_to_what_torch_holds(spec: SpecConfig, dtype: str, tokens: int) -> None:
    config = EngineConfig(model=ModelConfig(dtype=dtype), cache=CacheConfig(max_total_tokens=tokens), spec=spec)
    before = set(allocated())
    engine = build_engine(config)
    engine.add(Request("0", [1, 2, 3], SamplingParams(max_tokens=2, repetition_penalty=1.1, logit_bias={4: 1.0})))
    while engine.has_work:
        assert all(event.error is None for event in engine.step())
    held = sum(size for address, size in allocated().items() if address not in before)
    planned = sum(size for what, size in plan(config).memory.rows if not what.endswith(ESTIMATE))
    assert abs(held - planned) < 0.02 * planned, f"{held} bytes held, {planned} planned"


def test_the_pool_is_what_is_left() -> None:
    device = torch.device("cpu")
    for fraction in (0.02, 0.05):
        planned = plan(EngineConfig(cache=CacheConfig(mem_fraction_static=fraction), scheduler=SchedulerConfig(max_running_requests=2000)))
        assert planned.device == device
        whole = int(usable_memory(device) * fraction)
        assert whole - 2**21 < planned.memory.total <= whole or "requests x" in str(planned.memory.rows)


@pytest.mark.parametrize("free", [2**28, 2**30])
def test_on_a_gpu_the_share_is_of_what_is_free(free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process has the rest."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 80 * 2**30))
    config = EngineConfig(scheduler=SchedulerConfig(max_running_requests=100), cache=CacheConfig(mem_fraction_static=0.5))
    found, device = plan(config).found, torch.device("cuda")
    sizes, (state, tables) = fixed(found, torch.float32, 1000, False), state_of(config, found.arch, device)
    planned = plan_memory(config, found.arch, torch.float32, device, sizes, lookahead_of(config, device), state, tables)
    assert free // 2 - 2**21 < planned.total <= free // 2


def test_concurrency_follows_from_memory_and_budget() -> None:
    def running(**options: int) -> int:
        cache = CacheConfig(max_total_tokens=options.pop("tokens"))
        return plan(EngineConfig(cache=cache, scheduler=SchedulerConfig(**options), spec=CHAIN)).memory.max_running

    few, more, many = running(tokens=4096), running(tokens=16384), running(tokens=1 << 20)
    assert few < more < many == 512 // 4  # so many verifications of a token and three drafts fit into one step
    assert running(tokens=1 << 20, chunked_prefill_size=2048) > many
    assert running(tokens=1 << 20, max_running_requests=7) == 7


def test_quantised_weights_count_as_they_lie(tmp_path: Path) -> None:
    quantise(ModelConfig().directory, tmp_path / "fp8")
    model = ModelConfig(model=str(tmp_path / "fp8"), quantization="fp8", dtype="float32")
    config = EngineConfig(model=model, cache=CacheConfig(max_total_tokens=2048, kv_cache_dtype="fp8_e4m3"), spec=CHAIN)
    wide = replace(config, model=replace(model, quantization="none"), cache=CacheConfig(max_total_tokens=2048))
    kept, expanded = dict(plan(config).memory.rows), dict(plan(wide).memory.rows)
    assert kept["weights"] < 0.8 * expanded["weights"]
    pools = [sum(size for what, size in rows.items() if what.startswith("KV")) for rows in (kept, expanded)]
    assert 4 * pools[0] == pytest.approx(pools[1], rel=0.001)
