"""Entries that stand for several tokens (DeepSeek-V4): chunks, drafts, trees, preemption and pages that were found change nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mtpserve.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, SpecConfig
from mtpserve.core.errors import ConfigError
from mtpserve.core.sampling import SamplingParams
from mtpserve.engine.engine import Engine
from mtpserve.engine.startup.build import build_engine
from mtpserve.engine.startup.planning import plan
from tests.models.compressed_checkpoints import HEAVY, SPARSE, V4, deepseek_v4
from tests.models.harness import Harness
from tests.runtime.recorders import runner_of
from tests.spec.test_modules import ask, heard_nodes
from tests.spec.test_mtp_rounds import check, listen, run as run_rounds
from tests.spec.test_window_pages import poisoning
from tests.tiny import run

TREE = {"speculative_num_steps": 3, "speculative_eagle_topk": 4, "speculative_num_draft_tokens": 14}
CHAIN = {"speculative_num_steps": 3}
PAGE = 12
GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)


def small(directory: Path) -> V4:
    """Entries of 2 tokens, and entries of more than a window's."""
    return deepseek_v4(
        directory,
        layer_types=[SPARSE, HEAVY],
        num_hidden_layers=2,
        compress_rates={SPARSE: 2, HEAVY: 12},
        sliding_window=9,
        index_topk=3,
        hc_mult=2,
        hc_sinkhorn_iters=2,
    )


def engine_of(tiny: V4, spec: dict[str, Any], tokens: int = 400, budget: int = 64, backend: str = "reference", **cache: Any) -> Engine:
    algorithm: dict[str, Any] = {"speculative_algorithm": "NEXTN", "speculative_adaptive": False} if spec else {}
    config = EngineConfig(
        model=ModelConfig(model=str(tiny.directory), device="cpu", dtype="float32", attention_backend=backend),
        cache=CacheConfig(page_size=PAGE, max_total_tokens=tokens, **cache),
        spec=SpecConfig(**algorithm, **spec),
        scheduler=SchedulerConfig(max_running_requests=4, chunked_prefill_size=budget),
    )
    engine = build_engine(config, poison=True)
    # What goes down to host memory is read after its page was given to somebody else.
    return engine if "kv_offload_gib" in cache else poisoning(engine)


@pytest.mark.parametrize("place", [(400, 64), (400, 14), (108, 14)], ids=["one step a prompt", "chunks", "chunks and preemption"])
def test_drafts_are_those_of_a_computation_from_scratch(tmp_path: Path, place: tuple[int, int]) -> None:
    tiny = small(tmp_path)
    engine = engine_of(tiny, {"speculative_num_steps": 4}, *place)
    listener = listen(engine)
    accepted = run_rounds(engine, temperatures=(1.0, 0.0, 2.0))
    assert accepted[0] and sum(accepted[n] for n in range(1, 4)), f"no partial rejection was seen: {accepted}"
    assert (engine.stats.preemptions_total > 0) == (place[0] == 108)
    check(tiny, listener.rounds)


@pytest.mark.parametrize(
    ("backend", "spec", "stored"),
    [
        pytest.param("reference", {"speculative_num_steps": 1}, "auto", marks=pytest.mark.thorough),
        ("reference", CHAIN, "auto"),
        ("reference", TREE, "auto"),
        ("reference", TREE, "fp8_e4m3"),
        ("cpu", TREE, "auto"),
        ("exact", TREE, "auto"),
    ],
)
def test_texts_do_not_depend_on_drafts(tmp_path: Path, backend: str, spec: dict[str, Any], stored: str) -> None:
    if backend == "cpu":
        pytest.importorskip("mtpserve_kernels.cpu.library")
    exact = {"speculative_exact": True} if backend == "exact" else {}
    tiny, backend = small(tmp_path), "reference" if exact else backend
    # Texts that repeat themselves, so that the same tokens come in several trees.
    asked = [[token % 5 + i for token in range(n)] for i, n in enumerate((9, 17, 30, 1))]
    greedy = replace(GREEDY, max_tokens=20)
    plain = [run(engine_of(tiny, {}, backend=backend, kv_cache_dtype=stored), [ids], greedy)[0] for ids in asked]
    engine = engine_of(tiny, spec | exact, 108, 14, backend, kv_cache_dtype=stored)
    assert run(engine, asked, greedy) == plain
    assert engine.stats.accepted_tokens_total >= 5 * (spec is TREE) and (spec is TREE or engine.stats.preemptions_total > 0)


def test_a_row_on_a_cpu_is_the_same_however_a_text_is_cut(tmp_path: Path) -> None:
    """To the last bit."""
    pytest.importorskip("mtpserve_kernels.cpu.library")
    tiny, texts = small(tmp_path), [[7 * i % 24 for i in range(n)] for n in (37, 22)]
    whole, *others = (
        Harness(tiny.directory, texts, PAGE, backend="cpu").all_logits(*cut) for cut in (((64, 64), 0), ((1, 1), 0), ((7, 4), 3))
    )
    assert all(torch.equal(ours, theirs) for found in others for ours, theirs in zip(found, whole, strict=True))


def test_every_node_of_a_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what the trunk has computed of it: the next drafts are made with its streams."""
    tiny, heard = small(tmp_path), heard_nodes(monkeypatch)
    engine = engine_of(tiny, TREE)
    for length, temperature in ((1, 1.5), (18, 0.0)):
        ask(engine, str(length), [(3 * i + 1) % 24 for i in range(length)], 9, temperature)
    assert {len(path) for _, path, _ in heard} == {0, 1, 2} and engine.stats.accepted_tokens_total > 0
    for ids, path, found in heard:
        wanted = tiny.draft_logits(ids, [*path, 0])[-1]
        assert (found - wanted).abs().max() < 1e-4, (len(ids), path)


@pytest.mark.parametrize("spec", [CHAIN, TREE], ids=["chain", "tree"])
def test_after_pages_that_were_found(tmp_path: Path, spec: dict[str, Any]) -> None:
    """Pages of a prompt, and of an output whose entries were completed by drafts. A prompt may end where a page does: its last row is
    computed again."""
    tiny, text = small(tmp_path), torch.randint(24, (17,), generator=torch.Generator().manual_seed(1)).tolist()
    engine = engine_of(tiny, spec)
    text += run(engine, [text], replace(GREEDY, max_tokens=23))[0]
    listener, plain = listen(engine) if spec is CHAIN else None, engine_of(tiny, {}, disable_radix_cache=True)
    for length in (24, 25, 39):
        assert run(engine, [text[:length]], GREEDY) == run(plain, [text[:length]], GREEDY)
    assert engine.stats.cached_prompt_tokens_total >= 23 + 24 + 36
    if listener is not None:
        check(tiny, listener.rounds)


def test_pages_that_come_back_from_host_memory(tmp_path: Path) -> None:
    tiny = small(tmp_path)
    texts = [torch.randint(24, (40,), generator=torch.Generator().manual_seed(i)).tolist() for i in range(3)]
    engine, plain = engine_of(tiny, CHAIN, tokens=72, kv_offload_gib=0.01), engine_of(tiny, {})
    for i, ids in enumerate([*texts, *texts]):
        assert run(engine, [ids], GREEDY) == run(plain, [ids], GREEDY)
        assert (sum(engine.stats.loaded_pages.values()) > 0) == (i > 2)


def test_the_size_of_pages(tmp_path: Path) -> None:
    small(tmp_path)
    model = ModelConfig(model=str(tmp_path), device="cpu")
    assert plan(EngineConfig(model=model)).config.cache.page_size == 48
    with pytest.raises(
        ConfigError, match="--page-size must be a multiple of 12 for this model, whose layers store one entry per 12 tokens, got 6"
    ):
        plan(EngineConfig(model=model, cache=CacheConfig(page_size=6)))


def test_the_memory_plan_is_what_stores_take(tmp_path: Path) -> None:
    small(tmp_path)
    model = ModelConfig(model=str(tmp_path), device="cpu", dtype="bfloat16", context_length=60)
    config = EngineConfig(
        model=model,
        cache=CacheConfig(page_size=PAGE, max_total_tokens=6000),
        spec=SpecConfig(speculative_algorithm="MTP", speculative_draft_model_quantization="none", **TREE),  # type: ignore[arg-type]
        scheduler=SchedulerConfig(max_running_requests=6, chunked_prefill_size=64),
    )
    memory, stores = plan(config).memory, runner_of(build_engine(config)).step.stores
    assert sum(size for what, size in memory.rows if what.startswith(("KV, ", "entries "))) == stores.nbytes
    assert memory.pages[0] == 500 and [what for what, _ in memory.rows if "entries in" in what] == [
        "KV, 3,000 entries in 1 layers (latent, 24, one of 2 tokens, index key 12, best 3)",
        "KV, 500 entries in 1 layers (latent, 24, one of 12 tokens)",
    ]
