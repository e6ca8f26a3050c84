"""The whole engine with the kernels, natively where there is a GPU and interpreted elsewhere: the tokens are those of plain torch.

In float32: what rounds more coarsely may choose another token where two are nearly equal.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from mtpserve.config import CacheConfig, EngineConfig, ModelConfig, SpecConfig
from mtpserve.core.errors import ConfigError
from mtpserve.core.sampling import SamplingParams
from mtpserve.engine.startup import build
from mtpserve.engine.startup.build import build_engine
from mtpserve.engine.startup.planning import load_model
from mtpserve.layers.decoder import DecoderModel
from mtpserve.runtime.graphs.capture import CaptureFailed, CudaGraphCapturer
from mtpserve.runtime.graphs.graph_key import GraphOutput
from mtpserve.runtime.sampling.sampling import usual_features
from tests import selection
from tests.runtime.recorders import Again, runner_of
from tests.tiny import prompts, run, tiny_engine, tiny_model

CHAIN = SpecConfig(speculative_algorithm="MTP", speculative_num_steps=2)
TREE = SpecConfig(speculative_algorithm="MTP", speculative_num_steps=2, speculative_eagle_topk=2, speculative_num_draft_tokens=5)
SLOW = pytest.mark.skipif(not torch.cuda.is_available(), reason="the interpreter is slow, and has a tree in the tiny models")
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="captures CUDA graphs")


# What the last two have of their own, norms of heads and mixtures, does not look at the shape. test_selected interprets the sparse one.
FAMILIES = ("deepseek", "sparse", "mimo") if torch.cuda.is_available() else ("deepseek", "mimo")
EACH = [(family, shape) for family in FAMILIES for shape in ("chain", "tree")] + [("glm", "chain"), ("qwen", "tree")]
# These are run by test_replayed_and_late, and with a window by test_windows.
ELSEWHERE = [("deepseek", "chain"), ("mimo", "tree")]


@pytest.mark.parametrize(
    ("family", "shape"), [pytest.param(*case, marks=pytest.mark.thorough if case in ELSEWHERE else ()) for case in EACH]
)
def test_tokens_are_those_of_plain_torch(family: str, shape: str, device: torch.device) -> None:
    asked, spec = prompts(4, longest=6), CHAIN if shape == "chain" else TREE
    params = [
        SamplingParams(max_tokens=4, temperature=0),
        SamplingParams(max_tokens=4, temperature=0.7, seed=5, top_p=0.9),
        SamplingParams(max_tokens=4, temperature=1.0, seed=6, top_k=5, frequency_penalty=0.5, logprobs=2),
        SamplingParams(max_tokens=4, temperature=0, min_tokens=3, logit_bias={3: 4.0}),
    ]
    wanted = run(tiny_engine(tiny_model(family, kernels="torch"), spec, page_size=16, device=device), asked, params)
    engine = tiny_engine(tiny_model(family, kernels="triton"), spec, page_size=16, backend="triton", device=device)
    assert run(engine, asked, params) == wanted
    assert engine.stats.accepted_tokens_total > 0


def test_replayed_and_late(device: torch.device) -> None:
    """Padding rows and all, through the kernels; a graph's replay is the step called again."""
    params = [SamplingParams(max_tokens=4, temperature=0.7 * (i % 2), seed=i) for i in range(3)]
    wanted = run(tiny_engine(tiny_model(kernels="torch"), CHAIN, page_size=16, device=device), prompts(3, longest=6), params)
    recorder = Again()
    model = tiny_model(kernels="triton")
    engine = tiny_engine(model, CHAIN, page_size=16, backend="triton", overlap=1, recorder=recorder, seats=4, device=device)
    assert run(engine, prompts(3, longest=6), params) == wanted
    assert 4 in recorder.replayed


@GPU
@pytest.mark.parametrize("shape", [0, CHAIN, TREE], ids=["plain", "chain", "tree"])
@pytest.mark.parametrize("family", ["deepseek", "mimo"])
def test_captured_launched_and_in_plain_torch(family: str, shape: int | SpecConfig, device: torch.device) -> None:
    """All sizes are captured first, as at start."""
    params = [SamplingParams(max_tokens=20 + i, temperature=0.7 * (i % 2), top_p=1 - 0.1 * (i % 3), seed=i) for i in range(11)]
    asked = prompts(11, longest=40)
    wanted = run(tiny_engine(tiny_model(family, kernels="torch"), shape, page_size=16, device=device), asked, params)
    given: dict[str, Any] = {"page_size": 16, "backend": "triton", "device": device}
    assert run(tiny_engine(tiny_model(family, kernels="triton"), shape, **given), asked, params) == wanted
    engine = tiny_engine(tiny_model(family, kernels="triton"), shape, overlap=1, recorder=CudaGraphCapturer(), seats=12, **given)
    runner = runner_of(engine)
    assert runner.graphs is not None
    runner.graphs.capture_all(usual_features(runner.drafter.coupled), trees=shape is TREE, prompts=64, shared=True)
    made = len(runner.graphs.captured)
    assert run(engine, asked, params) == wanted
    assert len(runner.graphs.captured) == made and all(runner.graphs.captured.values()), "not everything was captured at start"


@GPU
def test_a_failed_capture_spoils_nothing(device: torch.device) -> None:
    numbers, recorder, stream = torch.arange(4.0, device=device), CudaGraphCapturer(), torch.cuda.current_stream()

    def body(reads: bool) -> GraphOutput:
        doubled = numbers * 2
        return GraphOutput(doubled + doubled.sum().item() if reads else doubled, None, False)

    for _ in range(2):
        with pytest.raises(CaptureFailed):
            recorder.capture(lambda: body(True))
        assert torch.cuda.current_stream() == stream
        made, again = recorder.capture(lambda: body(False))
        numbers += 1
        again()
        assert made.table.tolist() == (numbers * 2).tolist()
    torch.cuda.empty_cache()


@pytest.mark.thorough  # random weights go the same way above
@pytest.mark.parametrize("shape", [CHAIN, pytest.param(TREE, marks=SLOW)], ids=["chain", "tree"])
def test_the_demo_model(shape: SpecConfig) -> None:
    """Real weights through attention, experts, acceptance and compaction; greedy. Few tokens: the interpreter is slow."""
    texts = []
    for backend in ("reference", "triton"):
        model = ModelConfig(dtype="float32", attention_backend=backend)
        engine = build_engine(EngineConfig(model=model, cache=CacheConfig(max_total_tokens=1024), spec=shape), poison=True)
        texts.append(run(engine, [[40, 41]], SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)))
    assert texts[0] == texts[1] and engine.stats.draft_tokens_total > 0


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
    for backend, quantization, spec in (("reference", "none", SpecConfig(speculative_algorithm="none")), ("triton", "fp8", CHAIN)):
        model = ModelConfig(model=str(tmp_path), dtype="float32", attention_backend=backend, quantization=quantization, context_length=40)
        engine = build_engine(EngineConfig(model=model, cache=CacheConfig(max_total_tokens=256), spec=spec), poison=True)
        texts.append(run(engine, [[4, 11, 7]], SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)))
    assert kept == [False, True]
    assert texts[0] == texts[1] and engine.stats.draft_tokens_total > 0


@pytest.mark.parametrize("layout", ["float8 per channel", "AWQ"])
def test_weights_with_scales_by_row(tmp_path: Path, layout: str) -> None:
    """Kept, with drafts and kernels, against widened, without drafts in plain torch. Prompts longer than the rows that a kernel takes."""
    from tests.models.checkpoints import deepseek
    from tests.weights.published import LAYOUTS, converted, write

    sizes = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2}
    sizes |= {"q_lora_rank": 32, "kv_lora_rank": 32, "v_head_dim": 32, "num_hidden_layers": 2, "max_position_embeddings": 128}
    tiny = deepseek(tmp_path / "source", **sizes)
    config, writer = LAYOUTS[layout]
    quantised, _ = converted(tiny.tensors, lambda name: "_proj" in name and "eh_proj" not in name, writer)
    directory = str(write(tmp_path / "quantised", tiny.config | {"quantization_config": config}, quantised))
    texts, longest = [], 65 if selection.ALL or layout == "AWQ" else 5
    kept = "fp8" if layout.startswith("float8") else "int4"
    for backend, quantization, spec in (("reference", "none", SpecConfig(speculative_algorithm="none")), ("triton", kept, CHAIN)):
        model = ModelConfig(model=directory, dtype="float32", attention_backend=backend, quantization=quantization, context_length=90)
        engine = build_engine(EngineConfig(model=model, cache=CacheConfig(max_total_tokens=512), spec=spec), poison=True)
        params = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)  # with 2 no draft would be verified
        texts.append(run(engine, [[i % 24 for i in range(longest)]], params))
    assert texts[0] == texts[1] and engine.stats.draft_tokens_total > 0


@pytest.mark.parametrize("family", ["deepseek", "mimo"])
def test_float8_cache(family: str, device: torch.device) -> None:
    """Against itself without drafts: devices and the interpreter round to float8 each in its own way."""
    model, asked, greedy = tiny_model(family, kernels="triton"), prompts(1, longest=6), SamplingParams(max_tokens=3, temperature=0)
    texts = [
        run(tiny_engine(model, shape, page_size=16, backend="triton", kv_dtype=torch.float8_e4m3fn, device=device), asked, greedy)
        for shape in (0, CHAIN, TREE)
    ]
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_gpu_or_interpreter_the_kernels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ConfigError, match="--attention-backend triton needs a GPU"):
        build_engine(EngineConfig(model=ModelConfig(attention_backend="triton")))


def test_nvfp4_stays_four_bits(tmp_path: Path) -> None:
    """Projections and experts: kept by plain torch and by the kernels, against widened."""
    from tests.models.checkpoints import qwen3_moe
    from tests.models.harness import Harness
    from tests.weights.published import LAYOUTS, converted, write

    tiny = qwen3_moe(tmp_path / "source", hidden_size=64, intermediate_size=48, moe_intermediate_size=80, head_dim=16)
    config, writer = LAYOUTS["NVFP4"]
    quantised, _ = converted(tiny.tensors, lambda name: name.endswith("_proj.weight"), writer)
    here, ids = write(tmp_path / "here", tiny.config | {"quantization_config": config}, quantised), [[3, 7, 1, 20, 4, 4, 11], [5]]
    wanted = Harness(here, ids, 16).all_logits((4, 1))
    for backend in ("reference", "triton"):
        kept = Harness(here, ids, 16, keep_blocks=True, backend=backend)
        matrices = [part for name, part in kept.model.named_parameters() if re.search(r"(gate_up|down|qkv|output)(\.weight)?$", name)]
        assert matrices and all(part.dtype == torch.uint8 for part in matrices)
        for ours, other in zip(kept.all_logits((4, 1)), wanted, strict=True):
            torch.testing.assert_close(ours, other, atol=1e-4, rtol=1e-4)


def test_gpt_oss_experts_stay_four_bits(tmp_path: Path) -> None:
    """In an order of their own, with biases and clamped gates: kept by plain torch and by the kernels, against widened."""
    from tests.models.harness import Harness
    from tests.models.own_layouts import gpt_oss

    gpt_oss(tmp_path, mxfp4=True, hidden_size=96, swiglu_limit=0.7)
    ids = [[3, 7, 1, 20, 4, 4, 11], [5]]
    wanted = Harness(tmp_path, ids, 16).all_logits((4, 1))
    for backend in ("reference", "triton"):
        kept = Harness(tmp_path, ids, 16, keep_blocks=True, backend=backend)
        experts = [part for name, part in kept.model.named_parameters() if name.endswith(("experts.gate_up", "experts.down"))]
        assert experts and all(part.dtype == torch.uint8 for part in experts)
        for ours, other in zip(kept.all_logits((4, 1)), wanted, strict=True):
            torch.testing.assert_close(ours, other, atol=1e-4, rtol=1e-4)
