"""The log-probabilities that a trainer gets: of the sampled tokens, by transformers' own forward pass in float32 over the same ids.

Raw ones are the model's; processed ones are those of the law that was sampled from. Drafts of any shape, refused or accepted, change none.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper, TopPLogitsWarper

from mtpserve.config import CacheConfig, EngineConfig, ModelConfig, SamplingConfig, SchedulerConfig, SpecConfig
from mtpserve.core.request import Request
from mtpserve.core.sampling import SamplingParams
from mtpserve.engine.engine import Engine
from mtpserve.engine.startup import build
from mtpserve.engine.startup.build import build_engine
from mtpserve.runtime.graphs.graphs import StepGraphs
from tests import selection
from tests.models.checkpoints import Tiny, deepseek
from tests.runtime.recorders import Again

MTP = SpecConfig(speculative_algorithm="MTP", speculative_num_steps=3, speculative_adaptive=False)
MODES = ("raw_logprobs", "processed_logprobs")
SHAPES = {
    "plain": SpecConfig(speculative_algorithm="none"),
    "chain": MTP,
    "tree": replace(MTP, speculative_eagle_topk=2, speculative_num_draft_tokens=8),
    "n-gram": SpecConfig(speculative_algorithm="NGRAM", speculative_adaptive=False),
    "thresholds": replace(MTP, speculative_accept_threshold_single=0.2, speculative_accept_threshold_acc=0.5),
    "adaptive": replace(MTP, speculative_adaptive=True),
}
LAWS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "greedy, penalties": {"temperature": 0, "repetition_penalty": 1.3, "presence_penalty": 0.2},
    "T": {"temperature": 0.8},
    "T, top_p": {"temperature": 0.8, "top_p": 0.9},
    "T, top_p, penalties": {
        "temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.2, "frequency_penalty": 0.4, "presence_penalty": 0.3,
    },
}  # fmt: skip
PROMPTS = [[3, 7, 5, 3, 7, 5, 3, 7, 5, 9], [4, 8, 4, 8, 4, 8, 4], [11, 2, 19]]


def engine_of(tiny: Tiny, spec: SpecConfig, mode: str, backend: str = "auto") -> Engine:
    return build_engine(
        EngineConfig(
            model=ModelConfig(model=str(tiny.directory), device="cpu", dtype="float32", attention_backend=backend),
            cache=CacheConfig(page_size=4, max_total_tokens=1200),
            spec=spec,
            sampling=SamplingConfig(logprobs_mode=mode),
            scheduler=SchedulerConfig(max_running_requests=16, chunked_prefill_size=64),
        ),
        poison=True,
    )


def requests() -> list[Request]:
    return [
        Request(f"{name} {number}", prompt, SamplingParams(max_tokens=24, logprobs=0, seed=number, ignore_eos=True, **law))
        for name, law in LAWS.items()
        for number, prompt in enumerate(PROMPTS)
    ]


def law_of(logits: Tensor, ids: list[int], prompt: int, params: SamplingParams, processed: bool) -> Tensor:
    """logits [vocabulary] after `ids`, the first `prompt` of them the prompt's → log-probabilities, by transformers' own processors."""
    if not processed:
        return logits.log_softmax(-1)
    said, row, before = torch.tensor(ids[prompt:], dtype=torch.int64), logits[None].clone(), torch.tensor([ids])
    if params.repetition_penalty != 1:
        row = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(before, row)
    counts = torch.bincount(said, minlength=row.shape[1])
    row = row - params.frequency_penalty * counts - params.presence_penalty * (counts > 0)
    if params.temperature > 0:
        row = TopPLogitsWarper(params.top_p)(before, TemperatureLogitsWarper(params.temperature)(before, row))
    return row[0].log_softmax(-1)


def check(engine: Engine, tiny: Tiny, processed: bool) -> None:
    asked = {request.id: request for request in requests()}
    tokens: dict[str, list[int]] = {id: [] for id in asked}
    found: dict[str, list[float]] = {id: [] for id in asked}
    for request in asked.values():
        engine.add(request)
    while engine.has_work:
        for event in engine.step():
            assert event.error is None, event.error
            tokens[event.id] += event.tokens
            found[event.id] += [score.logprob for score in event.logprobs or []]
    for id, request in asked.items():
        ids, start = [*request.prompt, *tokens[id]], len(request.prompt)
        with torch.no_grad():
            logits = tiny.trunk(torch.tensor([ids])).logits[0].float()
        wanted = [
            float(law_of(logits[place - 1], ids[:place], start, request.sampling, processed)[ids[place]])
            for place in range(start, len(ids))
        ]
        assert len(found[id]) == len(wanted) == 24
        assert max(abs(a - b) for a, b in zip(found[id], wanted, strict=True)) <= 1e-4, id


# Thresholds accept drafts that the law forbids: there the model's own log-probabilities alone are promised.
CASES = [(shape, mode) for shape in SHAPES for mode in MODES if (shape, mode) != ("thresholds", "processed_logprobs")]


@pytest.mark.parametrize(("shape", "mode"), CASES)
def test_they_are_of_transformers_law(tmp_path: Path, shape: str, mode: str) -> None:
    tiny = deepseek(tmp_path)
    engine = engine_of(tiny, SHAPES[shape], mode)
    check(engine, tiny, mode == "processed_logprobs")
    if shape not in ("plain", "adaptive"):
        assert engine.stats.accepted_tokens_total > 0 and engine.stats.draft_tokens_total > engine.stats.accepted_tokens_total


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", ["plain", "chain", "tree"] if selection.ALL else ["chain"])
def test_captured_steps(tmp_path: Path, shape: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny, recorder = deepseek(tmp_path, max_position_embeddings=512), Again()  # room for the rows that pad prompts
    monkeypatch.setattr(build, "make_graphs", lambda config, step, sampling, running: StepGraphs(step, sampling, recorder, running))
    check(engine_of(tiny, SHAPES[shape], mode, "reference"), tiny, mode == "processed_logprobs")
    assert recorder.replayed
