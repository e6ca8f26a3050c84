"""MTP layers of which each depth has its own, by themselves (MiMo-V2) and chained (Step-3.5): what they compute is what a computation from
scratch gives, also after pages that were found, in trees, and for requests that are shorter than there are modules."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mtpserve.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, SpecConfig
from mtpserve.core.batch import Batch
from mtpserve.core.errors import ConfigError
from mtpserve.core.request import Request
from mtpserve.core.sampling import SamplingParams
from mtpserve.engine.engine import Engine
from mtpserve.engine.startup.build import build_engine
from mtpserve.engine.startup.planning import describe
from mtpserve.spec.draft.passes import DraftPasses
from mtpserve.tools.inspect.checkpoint import inspect_model
from tests import selection
from tests.models.chained import step
from tests.models.checkpoints import Tiny
from tests.models.own_layouts import MODULES, mimo_v2
from tests.spec.diagonal import diagonal
from tests.spec.test_mtp_rounds import check, engine_of, listen

Make = Callable[..., Tiny]
KINDS: dict[str, Make] = {"apart": mimo_v2, "chained": step}
each_kind = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
TREE = {"speculative_num_steps": MODULES, "speculative_eagle_topk": 3, "speculative_num_draft_tokens": 12}


def ask(engine: Engine, name: str, text: list[int], tokens: int, temperature: float = 0) -> int:
    """→ how many tokens of the prompt were found."""
    engine.add(Request(name, text, SamplingParams(max_tokens=tokens, temperature=temperature, seed=3, ignore_eos=True)))
    cached = 0
    while engine.has_work:
        for event in engine.step():
            assert event.error is None
            cached += event.num_cached_tokens
    engine.check_integrity()
    return cached


@pytest.mark.parametrize(("page_size", "make"), diagonal({str(size): size for size in (1, 2, 3, 8)}, KINDS))
def test_after_pages_that_were_found(tmp_path: Path, page_size: int, make: Make) -> None:
    """Rows that are joined may be those of several pages; a prompt may end where a page does, so that its last row is computed again."""
    tiny, text = make(tmp_path), torch.randint(24, (33,), generator=torch.Generator().manual_seed(1)).tolist()
    engine = engine_of(tiny, 7, 400, page_size)
    ask(engine, "first", text[:24], 1)
    listener = listen(engine)
    for length in (24, 25, 26, 27, 31):
        assert ask(engine, str(length), text[:length], 6) >= 23
    check(tiny, listener.rounds)


@each_kind
@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_requests_shorter_than_there_are_modules(tmp_path: Path, length: int, make: Make) -> None:
    fused = {"fused": True, "num_key_value_heads": 2, "swa_num_key_value_heads": 4} if make is mimo_v2 and length == 4 else {}
    tiny = make(tmp_path, **fused)
    engine = engine_of(tiny, 64, 400, 4)
    listener = listen(engine)
    ask(engine, "a", list(range(3, 3 + length)), 9)
    check(tiny, listener.rounds)


def heard_nodes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], list[int], Tensor]]:
    """Filled while trees are drafted: what was committed, a node's path, and what its children are chosen from."""
    own, heard = DraftPasses.logits, list[tuple[list[int], list[int], Tensor]]()

    def logits(self: Any, head: Tensor, depth: int, batch: Batch, req_indices: Tensor, drafts: tuple[Tensor, Tensor]) -> Any:
        found, (path, count) = own(self, head, depth, batch, req_indices, drafts), drafts
        for row, req_idx in enumerate(req_indices.tolist()):
            ids = batch.req_tensors.tokens[req_idx, : batch.req_tensors.num_tokens[req_idx]].tolist()
            heard.append((ids, path[row, : int(count[row])].tolist(), found[0][row]))
        return found

    monkeypatch.setattr(DraftPasses, "logits", logits)
    return heard


def tree_engine(tiny: Tiny, backend: str) -> Engine:
    return build_engine(
        EngineConfig(
            model=ModelConfig(model=str(tiny.directory), device="cpu", dtype="float32", attention_backend=backend),
            cache=CacheConfig(page_size=4, max_total_tokens=400),
            spec=SpecConfig(speculative_algorithm="NEXTN", speculative_adaptive=False, **TREE),  # type: ignore[arg-type]
            scheduler=SchedulerConfig(max_running_requests=4, chunked_prefill_size=64),
        ),
        poison=True,
    )


@pytest.mark.parametrize(("make", "backend"), [(mimo_v2, "reference"), (mimo_v2, "cpu"), (step, "reference"), (step, "exact")])
def test_every_node_of_a_tree(tmp_path: Path, backend: str, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    if backend == "cpu":
        pytest.importorskip("mtpserve_kernels.cpu.library")
    tiny, heard = make(tmp_path), heard_nodes(monkeypatch)
    engine = tree_engine(tiny, backend)
    asked = [(length, temperature) for length in (1, 2, 3, 18) for temperature in (0.0, 1.5)]
    for length, temperature in asked if selection.ALL else asked[1::3]:
        ask(engine, f"{length} {temperature}", [(3 * i + 1) % 24 for i in range(length)], 7, temperature)
    assert {len(path) for _, path, _ in heard} == set(range(MODULES)) and engine.stats.accepted_tokens_total > 0
    for ids, path, found in heard[:: 1 if selection.ALL else 2]:
        wanted = tiny.draft_logits(ids, [*path, 0])[-1]
        assert (found - wanted).abs().max() < 1e-4, (len(ids), path)


@each_kind
def test_no_deeper_than_there_are_layers(tmp_path: Path, make: Make) -> None:
    make(tmp_path)
    config = EngineConfig(model=ModelConfig(model=str(tmp_path)), spec=SpecConfig(speculative_algorithm="MTP", speculative_num_steps=5))
    with pytest.raises(ConfigError, match=r"--speculative-num-steps must be at most 4, got 5: .* has 4 MTP layers, one for each depth"):
        describe(config, want_mtp=True)


@each_kind
def test_only_layers_that_are_drafted_with_are_loaded(tmp_path: Path, make: Make) -> None:
    layers = make(tmp_path).config["num_hidden_layers"]
    config = EngineConfig(model=ModelConfig(model=str(tmp_path)), spec=SpecConfig(speculative_algorithm="MTP", speculative_num_steps=2))
    arch = describe(config, want_mtp=True).arch
    assert arch.mtp is not None and arch.mtp.layers == 2 and arch.num_layers == layers and len(arch.layers) == layers + 2


@each_kind
def test_inspect_counts_all_of_them(tmp_path: Path, make: Make) -> None:
    tiny = make(tmp_path)
    spec = SpecConfig(speculative_num_steps=MODULES)
    report = inspect_model(EngineConfig(model=ModelConfig(model=str(tmp_path), device="cpu"), spec=spec))
    assert report.arch.summary.endswith(f"{MODULES} MTP layers")
    [numbers] = [row[1] for row in report.weights if row[0] == "MTP layer"]
    own = ("model.mtp.", *(f"model.layers.{tiny.config['num_hidden_layers'] + k}." for k in range(MODULES)))
    assert numbers == sum(name.startswith(own) for name in tiny.tensors)


def test_a_token_map_needs_a_shared_head(tmp_path: Path) -> None:
    step(tmp_path)
    spec = SpecConfig(speculative_algorithm="MTP", speculative_num_steps=2, speculative_token_map="map.json")
    with pytest.raises(ConfigError, match="--speculative-token-map needs a draft model that shares the target model's head"):
        describe(EngineConfig(model=ModelConfig(model=str(tmp_path)), spec=spec), want_mtp=True)
