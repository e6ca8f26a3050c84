"""The whole engine with the kernels, interpreted where there is no GPU: the tokens are those of plain torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from mtpserve.config import CacheConfig, EngineConfig, ModelConfig, SpecConfig
from mtpserve.core.errors import ConfigError
from mtpserve.core.sampling import SamplingParams
from mtpserve.engine import build
from mtpserve.engine.build import build_engine
from mtpserve.engine.planning import load_model
from mtpserve.layers.decoder import DecoderModel
from tests.runtime.test_overlap import Again
from tests.tiny import prompts, run, tiny_engine, tiny_model

CHAIN = SpecConfig(speculative_algorithm="MTP", speculative_num_steps=3)
TREE = SpecConfig(speculative_algorithm="MTP", speculative_num_steps=2, speculative_eagle_topk=2, speculative_num_draft_tokens=5)

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the tiny engine lives on the CPU: interpreted alone")


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("family", ["deepseek", "mimo"])
def test_tokens_are_those_of_plain_torch(family: str, shape: SpecConfig) -> None:
    asked = prompts(4, longest=8)
    params = [
        SamplingParams(max_tokens=5, temperature=0),
        SamplingParams(max_tokens=5, temperature=0.7, seed=5, top_p=0.9),
        SamplingParams(max_tokens=5, temperature=1.0, seed=6, top_k=5, frequency_penalty=0.5, logprobs=2),
        SamplingParams(max_tokens=5, temperature=0, min_tokens=3, logit_bias={3: 4.0}),
    ]
    wanted = run(tiny_engine(tiny_model(family), shape, page_size=16), asked, params)
    engine = tiny_engine(tiny_model(family), shape, page_size=16, kernels=True)
    assert run(engine, asked, params) == wanted
    assert engine.stats.accepted_tokens_total > 0


def test_replayed_and_late() -> None:
    """Padding rows and all, through the kernels."""
    params = [SamplingParams(max_tokens=5, temperature=0.7 * (i % 2), seed=i) for i in range(3)]
    wanted = run(tiny_engine(tiny_model(), CHAIN, page_size=16), prompts(3, longest=6), params)
    recorder = Again()
    engine = tiny_engine(tiny_model(), CHAIN, page_size=16, kernels=True, overlap=1, recorder=recorder, seats=4)
    assert run(engine, prompts(3, longest=6), params) == wanted
    assert 4 in recorder.replayed


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_the_demo_model(shape: SpecConfig) -> None:
    """Real weights through attention, experts, acceptance and compaction; greedy. A few prompts and tokens: the interpreter is slow."""
    texts = []
    for backend in ("reference", "triton"):
        model = ModelConfig(dtype="float32", attention_backend=backend)
        engine = build_engine(EngineConfig(model=model, cache=CacheConfig(max_total_tokens=1024), spec=shape), poison=True)
        texts.append(run(engine, [[40, 41, 300], [270]], SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)))
    assert texts[0] == texts[1]


@pytest.mark.parametrize(("part", "size"), [(True, 128), ("trunk", 96)], ids=["shared expert beside", "trunk alone, shared expert apart"])
def test_float8_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: bool | Literal["trunk"], size: int) -> None:
    """Kept, with drafts and kernels, against expanded, without drafts in plain torch."""
    from tests.models.checkpoints import deepseek

    sizes = {"hidden_size": 144, "intermediate_size": 128, "moe_intermediate_size": size, "n_routed_experts": 4, "num_experts_per_tok": 2}
    deepseek(tmp_path, fp8=part, q_lora_rank=128, num_hidden_layers=2, **sizes)
    texts, kept = [], []

    def load(*given: Any) -> DecoderModel:
        model = load_model(*given)
        kept.append(any(parameter.dtype == torch.float8_e4m3fn for parameter in model.parameters()))
        return model

    monkeypatch.setattr(build, "load_model", load)
    for backend, quantization, spec in (("reference", "none", SpecConfig()), ("triton", "fp8", CHAIN)):
        model = ModelConfig(model=str(tmp_path), dtype="float32", attention_backend=backend, quantization=quantization, context_length=40)
        engine = build_engine(EngineConfig(model=model, cache=CacheConfig(max_total_tokens=256), spec=spec), poison=True)
        texts.append(run(engine, [[4, 11, 7], [20]], SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)))
    assert kept == [False, True]
    assert texts[0] == texts[1]


@pytest.mark.parametrize("family", ["deepseek", "mimo"])
def test_float8_cache(family: str) -> None:
    """Against itself without drafts: the interpreter rounds to float8 in a way of its own."""
    asked, greedy = prompts(2, longest=6), SamplingParams(max_tokens=4, temperature=0)
    texts = [
        run(tiny_engine(tiny_model(family), shape, page_size=16, kernels=True, stored=torch.float8_e4m3fn), asked, greedy)
        for shape in (0, CHAIN, TREE)
    ]
    assert texts[0] == texts[1] == texts[2]


def test_without_gpu_or_interpreter_the_kernels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ConfigError, match="--attention-backend triton needs a GPU"):
        build_engine(EngineConfig(model=ModelConfig(attention_backend="triton")))
