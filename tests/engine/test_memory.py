"""The plan against what is really allocated."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mtpserve.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, SpecConfig
from mtpserve.core.errors import ConfigError, NoRoom
from mtpserve.core.request import Request
from mtpserve.core.sampling import SamplingParams
from mtpserve.engine.startup.build import build_engine
from mtpserve.engine.startup.drafter import plan_engine
from mtpserve.engine.startup.planning import fixed, lookahead_of, plan, state_of
from mtpserve.engine.startup.storage import Storage
from mtpserve.runtime.memory import ESTIMATE, PageShare, largest, plan_memory, usable_memory
from mtpserve.weights.quantise import quantise
from tests.house.tree import ROOT
from tests.models.checkpoints import mimo

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


def held_by(config: EngineConfig, request: Request) -> int:
    """Bytes that are allocated for an engine that has computed a request."""
    before = set(allocated())
    engine = build_engine(config)
    engine.add(request)
    while engine.has_work:
        assert all(event.error is None for event in engine.step())
    return sum(size for address, size in allocated().items() if address not in before)


@pytest.mark.covering(1)
@pytest.mark.parametrize("spec", [SpecConfig(speculative_algorithm="none"), CHAIN, TREE], ids=["plain", "chain", "tree"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tokens", [2048, 40000])
def test_the_table_adds_up_to_what_torch_holds(spec: SpecConfig, dtype: str, tokens: int) -> None:
    config = EngineConfig(model=ModelConfig(dtype=dtype), cache=CacheConfig(max_total_tokens=tokens), spec=spec)
    held = held_by(config, Request("0", [1, 2, 3], SamplingParams(max_tokens=2, repetition_penalty=1.1, logit_bias={4: 1.0})))
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
    found, device = plan(config).described, torch.device("cuda")
    sizes, (state, tables) = fixed(found, torch.float32, 1000, Storage(False, torch.float32)), state_of(config, found.arch, device)
    planned = plan_memory(config, found.arch, torch.float32, device, sizes, lookahead_of(config, device), state, tables)
    assert free // 2 - 2**21 < planned.total <= free // 2


def test_too_small_a_fraction_is_refused_with_the_one_that_is_needed() -> None:
    config = EngineConfig(cache=CacheConfig(mem_fraction_static=0.00001))
    with pytest.raises(NoRoom, match=r"weights take \d+ MiB, and --mem-fraction-static 1e-05 of [\d,]+ MiB is 0\.\d MiB: raise") as raised:
        plan(config)
    needed = float(re.search(r"raise it to ([\d.]+), or", str(raised.value))[1])  # type: ignore[index]
    assert 0.00001 < needed < 0.1
    with pytest.raises(NoRoom, match="no memory is left"):
        plan(EngineConfig(cache=CacheConfig(mem_fraction_static=0.9 * needed)))
    assert plan(EngineConfig(cache=CacheConfig(mem_fraction_static=1.5 * needed))).memory.pages


def test_what_does_not_fit_is_refused_before_anything_is_allocated() -> None:
    config = EngineConfig(cache=CacheConfig(max_total_tokens=999_999_999))
    with pytest.raises(NoRoom, match=r"GiB of memory are needed \(KV, 999,.*: 6,.* GiB\), .*: lower --max-total-tokens"):
        build_engine(config)


@pytest.mark.parametrize("algorithm", [None, "none", "MTP"])
def test_a_pool_that_fits_nowhere_is_an_error_of_one_line(algorithm: str | None) -> None:
    config = EngineConfig(cache=CacheConfig(max_total_tokens=10**12), spec=SpecConfig(speculative_algorithm=algorithm))
    with pytest.raises(ConfigError, match=r"^[\d,.]+ GiB of memory are needed \(KV, .*\), .*: lower --max-total-tokens$"):
        build_engine(config)
    assert plan_engine(config, must_fit=False).memory.pages[0] * config.cache.page_size > 10**11


def test_too_few_tokens_for_drafts_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"^--max-total-tokens must be at least 26: .* got 16; with --speculative-algorithm none no tokens are reserved"
    ):
        plan_engine(EngineConfig(cache=CacheConfig(max_total_tokens=16)))


def test_a_pool_below_the_context_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    build_engine(EngineConfig(cache=CacheConfig(max_total_tokens=64), spec=SpecConfig(speculative_algorithm="none")))
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said.startswith(
        "a request may have only 62 tokens, not the model's context of 2048: the KV cache is too small; raise --max-total-tokens"
    )


def test_concurrency_follows_from_memory_and_budget() -> None:
    def running(**options: int) -> int:
        cache = CacheConfig(max_total_tokens=options.pop("tokens"))
        return plan(EngineConfig(cache=cache, scheduler=SchedulerConfig(**options), spec=CHAIN)).memory.max_running

    few, more, many = running(tokens=4096), running(tokens=16384), running(tokens=1 << 20)
    assert few < more < many == 512 // 4  # so many verifications of a token and three drafts fit into one step
    assert running(tokens=1 << 20, chunked_prefill_size=2048) == 256 > many  # and as many into a captured step
    assert running(tokens=1 << 20, max_running_requests=7) == 7


@pytest.mark.parametrize(("asked", "cpu", "gpu"), [(None, 512, 2048), (64, 64, 64)])
def test_a_steps_tokens_follow_from_the_device(asked: int | None, cpu: int, gpu: int) -> None:
    config = EngineConfig(scheduler=SchedulerConfig(chunked_prefill_size=asked), spec=CHAIN)
    assert plan(config).config.scheduler.chunked_prefill_size == cpu
    assert config.scheduler.on("cuda").step_tokens == gpu


def test_quantised_weights_count_as_they_lie(tmp_path: Path) -> None:
    quantise(ModelConfig().directory, tmp_path / "fp8")
    model = ModelConfig(model=str(tmp_path / "fp8"), quantization="fp8", dtype="float32")
    config = EngineConfig(model=model, cache=CacheConfig(max_total_tokens=2048, kv_cache_dtype="fp8_e4m3"), spec=CHAIN)
    wide = replace(config, model=replace(model, quantization="none"), cache=CacheConfig(max_total_tokens=2048))
    kept, expanded = dict(plan(config).memory.rows), dict(plan(wide).memory.rows)
    assert kept["weights"] < 0.8 * expanded["weights"]
    pools = [sum(size for what, size in rows.items() if what.startswith("KV")) for rows in (kept, expanded)]
    assert 4 * pools[0] == pytest.approx(pools[1], rel=0.001)


@pytest.mark.parametrize("tokens", [4000, None])
def test_a_window_has_pages_of_its_own(tmp_path: Path, tokens: int | None) -> None:
    """Its group has what all requests' windows need at most, the other group the rest; the table is what torch holds."""
    options = {"max_position_embeddings": 2048, "num_hidden_layers": 4, "sliding_window": 48, "max_window_layers": 1}
    mimo(tmp_path, use_sliding_window=True, **options)
    config = EngineConfig(
        # Panels round the sizes of so small a model up by more than the test allows.
        model=ModelConfig(model=str(tmp_path), dtype="float32", attention_backend="reference"),
        cache=CacheConfig(max_total_tokens=tokens, mem_fraction_static=0.01, page_size=16),
        scheduler=SchedulerConfig(max_running_requests=3, chunked_prefill_size=64),
        spec=CHAIN,
    )
    planned = plan(config).memory
    rows, size = dict(planned.rows), 2 * 2 * 12 * 4  # a token in one layer: keys and values of two heads of 12, in float32
    all_tokens, most = planned.pages[0] * 16, -(-(48 + 64 + 24) // 16) + 1
    assert all_tokens == (4000 if tokens else 3 * (2048 + 24 + 16) // 16 * 16) and planned.pages[1] == 3 * most
    assert rows[f"KV, {all_tokens - 72:,} tokens in 2 layers (2 heads x 12)"] == (all_tokens - 72) * 2 * size
    assert rows[f"KV, {3 * most * 16} tokens in 3 layers (2 heads x 12, window 48)"] == 3 * most * 16 * 3 * size
    request = Request("0", list(range(20)) * 40, SamplingParams(max_tokens=8, repetition_penalty=1.1, logit_bias={4: 1.0}))
    held = held_by(config, request)
    counted = sum(size for what, size in planned.rows if not what.endswith(ESTIMATE))
    assert abs(held - counted) < 0.02 * counted, f"{held} bytes held, {counted} planned"


def test_what_windows_do_not_need_goes_to_the_others() -> None:
    all_, small, large = PageShare(None, 10, None), PageShare(8, 20, 64), PageShare(4000, 5, 4096)
    assert largest([all_], 1000, 2, 10**9) == 100
    assert largest([all_, small], 3000, 2, 10**9) == 100  # both have them
    assert largest([all_, small], 3840 + 1280, 2, 10**9) == 128 + 128
    assert largest([all_, small, large], 2 * 64 * 20 + 15 * 1000, 2, 10**9) == 1000
    assert largest([all_, small, large], 2 * 64 * 20 + 2 * 4096 * 5 + 10 * 9000, 2, 10**9) == 9000
    assert largest([all_, small], 10**9, 2, 500) == 500 and largest([small], 10**9, 2, 500) == 500


def test_a_plan_brings_no_compiler_along() -> None:
    """Tensors on no device are made and written, but not computed with: that imports seconds of torch."""
    code = (
        "import sys; from mtpserve.config import EngineConfig; from mtpserve.engine.startup.drafter import plan_engine;"
        "plan_engine(EngineConfig(), must_fit=False); print('sympy' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n", "torch's compiler needs it"
