"""Engines with a head, and what goes through their drafters: which request had which text, and the logits of each draft."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from mtpserve.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, SpecConfig
from mtpserve.core.batch import Batch, Hidden
from mtpserve.core.request import Request
from mtpserve.core.sampling import SamplingParams
from mtpserve.engine.engine import Engine
from mtpserve.engine.startup.build import build_engine
from mtpserve.runtime.graphs.graphs import StepGraphs
from mtpserve.runtime.runner import Runner
from mtpserve.runtime.sampling.sampling import SamplingFeatures
from mtpserve.spec.draft.passes import DraftPasses
from mtpserve.tools.prove.proof import Proof, prove
from tests.models.checkpoints import Tiny
from tests.proof.test_every_family import PROMPTS, write_tokenizer
from tests.runtime.recorders import Watched, blinded

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
VOCAB, BATCH = 24, 500


class Drafted(NamedTuple):
    ids: list[int]  # committed
    depth: int  # drafts before this one
    before: int  # the token before it
    logits: Tensor  # [vocabulary]


def spec_of(name: str, path: Path, steps: int, **options: Any) -> SpecConfig:
    return SpecConfig(
        speculative_algorithm=name, speculative_draft_model_path=str(path), speculative_num_steps=steps,
        **{"speculative_adaptive": False} | options,
    )  # fmt: skip


def engine_of(directory: Path, spec: SpecConfig, tokens: int = 400, backend: str = "auto", page_size: int = 4, **model: Any) -> Engine:
    config = EngineConfig(
        model=ModelConfig(**{"model": str(directory), "device": "cpu", "dtype": "float32", "attention_backend": backend} | model),
        cache=CacheConfig(page_size=page_size, max_total_tokens=tokens),
        spec=spec,
        scheduler=SchedulerConfig(chunked_prefill_size=19, max_running_requests=4, schedule_conservativeness=0.0),
    )
    return build_engine(config, poison=True)


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCAB, (7 + 6 * i,), generator=generator).tolist() for i in range(5)]


def texts(engine: Engine, start: str = "", params: SamplingParams = GREEDY) -> list[list[int]]:
    """What it says to all prompts at once."""
    for i, prompt in enumerate(prompts()):
        engine.add(Request(f"{start}{i}", prompt, params))
    found: dict[str, list[int]] = {f"{start}{i}": [] for i in range(len(prompts()))}
    while engine.has_work:
        for event in engine.step():
            assert event.error is None, event.error
            found[event.id] += event.tokens
    engine.check_integrity()
    return list(found.values())


def passes_of(engine: Engine) -> DraftPasses:
    runner: Any = engine.runner
    assert isinstance(runner, Runner)
    drafter: Any = runner.drafter
    return getattr(drafter, "base", drafter).passes  # type: ignore[no-any-return]


def heard(engine: Engine) -> list[Drafted]:
    """Grows while the engine runs."""
    passes, drafts, fed = passes_of(engine), list[Drafted](), list[Tensor]()
    logits, step = passes.logits, passes.step

    def listen(head: Tensor, depth: int, batch: Batch, req_indices: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor | None]:
        found, columns = logits(head, depth, batch, req_indices, *rest)
        for row, req_idx in enumerate(req_indices.tolist()):
            ids = batch.req_tensors.tokens[req_idx, : batch.req_tensors.num_tokens[req_idx]].tolist()
            drafts.append(Drafted(ids, depth, int(fed[-1][row]) if depth else ids[-1], found[row].clone()))
        return found, columns

    def stepped(rows: Batch, state: Tensor | None, depth: int) -> Hidden:
        fed.append(rows.input_ids.clone())
        return step(rows, state, depth)

    passes.logits, passes.step = listen, stepped  # type: ignore[method-assign]
    return drafts


def first_two(directory: Path, spec: SpecConfig, draws: int, seed: int) -> Counter[tuple[int, ...]]:
    """How often each pair of tokens follows a prompt. The second one is a draft that was kept, or what replaced it."""
    config = EngineConfig(
        model=ModelConfig(model=str(directory), device="cpu", dtype="float32", attention_backend="reference"),
        cache=CacheConfig(page_size=8, max_total_tokens=BATCH * 32),
        spec=spec,
        scheduler=SchedulerConfig(chunked_prefill_size=BATCH * 4, max_running_requests=BATCH),
    )
    engine, counts = build_engine(config), Counter[tuple[int, ...]]()
    for start in range(seed, seed + draws, BATCH):
        # One token more than is counted, or nothing would be drafted for the second.
        for i in range(BATCH):
            engine.add(Request(str(i), [5, 11, 3], SamplingParams(max_tokens=3, temperature=0.7, seed=start + i, ignore_eos=True)))
        found: dict[str, list[int]] = {str(i): [] for i in range(BATCH)}
        while engine.has_work:
            for event in engine.step():
                found[event.id] += event.tokens
        counts.update(tuple(tokens[:2]) for tokens in found.values())
    assert spec.steps == 0 or engine.stats.accepted_tokens_total > draws / 20
    return counts


def proved(trunk: Tiny, directory: Path, name: str, head: Path) -> Proof:
    target = directory / "target"
    shutil.copytree(trunk.directory, target)
    write_tokenizer(target)
    options: dict[str, Any] = {
        "model": str(target), "dtype": "float32", "max_total_tokens": 2048, "max_running_requests": 32, "random_seed": 1,
        "speculative_algorithm": name, "speculative_draft_model_path": str(head), "speculative_num_steps": 3,
    }  # fmt: skip
    return prove(options, PROMPTS[:2], tokens=16, draws=12)


def captured(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> int:
    """Captures every kind of decoding step, and runs each once more, where it may read nothing on the host. → how many these are."""
    runner = blinded(engine, monkeypatch)
    graphs = StepGraphs(runner.step, runner.sampling, Watched(), 4)
    trees = runner.sizes.trees
    graphs.capture_all([SamplingFeatures.of([], False)], trees)
    for recorded in graphs.captured.values():
        assert recorded is not None
        with torch.inference_mode():
            recorded.replay()
    return len(graphs.captured)
