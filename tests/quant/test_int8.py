"""int8: a lossless way to draft, and by choice a rounded trunk."""

from __future__ import annotations

import logging

import pytest
import torch
from mtpserve_kernels.cpu.library import Unavailable, library
from mtpserve_kernels.quant.reference import quantize_int8

from mtpserve.config import CacheConfig, EngineConfig, ModelConfig, SpecConfig
from mtpserve.core.errors import ConfigError
from mtpserve.core.sampling import SamplingParams
from mtpserve.engine.startup.build import build_engine
from mtpserve.engine.startup.planning import plan
from mtpserve.engine.startup.storage import int8_of
from mtpserve.layers.kernels import KERNELS
from mtpserve.layers.linear import Linear
from mtpserve.quant.int8 import Int8
from tests.tiny import run, tiny_arch

ASKED, GREEDY = [[40, 41, 300], [270], [7, 8, 9, 10]], SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)


@pytest.fixture
def cpu() -> None:
    try:
        library()
    except Unavailable as reason:
        pytest.skip(str(reason))


def config(quantization: str = "auto", draft: str = "auto", drafts: int = 3, backend: str = "auto", dtype: str = "auto") -> EngineConfig:
    model = ModelConfig(quantization=quantization, attention_backend=backend, device="cpu", dtype=dtype)
    spec = SpecConfig(speculative_algorithm="MTP", speculative_num_steps=drafts, speculative_draft_model_quantization=draft)
    return EngineConfig(model=model, cache=CacheConfig(max_total_tokens=2048), spec=spec)


@pytest.mark.parametrize("kernels", ["torch", "cpu"])
def test_a_layer_is_off_by_what_rounding_explains(kernels: str, request: pytest.FixtureRequest) -> None:
    if kernels == "cpu":
        request.getfixturevalue("cpu")
    torch.manual_seed(0)
    method = Int8(KERNELS.get(kernels)())
    layer = Linear(96, (48, 16), method, bias=True)
    exact, bias = torch.randn(64, 96), torch.randn(64)
    layer.weight.data, layer.bias.data = exact.clone(), bias
    layer.finish_loading()
    weight, scale = quantize_int8(exact)
    torch.testing.assert_close(layer.rows(torch.arange(64)), weight * scale.unsqueeze(1))
    x = torch.randn(5, 96)
    wanted = x @ exact.T + bias
    assert 0 < (layer(x) - wanted).abs().max() < 0.05 * wanted.abs().max()
    assert 0.001 < method.errors[0] < 0.02


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_weight_itself_stays_as_it_is(dtype: torch.dtype) -> None:
    """It may be somebody else's too: a draft head is a copy of the trunk's."""
    exact = torch.randn(64, 96).to(dtype)
    layer = Linear(96, (64,), Int8(KERNELS.get("torch")()))
    layer.weight.data = weight = exact.clone()
    layer.finish_loading()
    assert torch.equal(weight, exact)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.usefixtures("cpu")
def test_drafting_in_int8_changes_no_text(dtype: str, caplog: pytest.LogCaptureFixture) -> None:
    plain = run(build_engine(config(draft="none", drafts=0, dtype=dtype), poison=True), ASKED, GREEDY)
    with caplog.at_level(logging.INFO, "mtpserve.engine.startup.build"):
        drafting = build_engine(config(draft="int8", dtype=dtype), poison=True)
    assert "int8, the draft model: rounding error of the matrices: " in caplog.text
    assert run(drafting, ASKED, GREEDY) == plain
    exactly = build_engine(config(draft="none", dtype=dtype), poison=True)
    run(exactly, ASKED, GREEDY)
    lengths = [each.stats.accept_length() or 0 for each in (drafting, exactly)]
    assert lengths[0] > 0.8 * lengths[1] > 0.8


@pytest.mark.usefixtures("cpu")
def test_an_int8_trunk_verifies_its_own_drafts() -> None:
    texts = [run(build_engine(config("int8", drafts=drafts), poison=True), ASKED, GREEDY) for drafts in (0, 3)]
    assert texts[0] == texts[1]


@pytest.mark.usefixtures("cpu")
def test_the_plan_counts_one_byte_for_each_weight() -> None:
    def total(quantization: str, draft: str) -> int:
        return plan(config(quantization, draft)).memory.total

    plain = total("none", "none")
    assert total("int8", "none") < plain
    head = 2048 * 256  # one byte for each number of a copy for drafting
    assert abs(total("none", "int8") - plain) < head


@pytest.mark.parametrize("options", [{"quantization": "int8"}, {"draft": "int8"}])
def test_without_the_kernels_it_is_refused(options: dict[str, str]) -> None:
    name = "quantization" if "quantization" in options else "speculative-draft-model-quantization"
    with pytest.raises(ConfigError, match=f"--{name} int8 needs the CPU kernels, and this engine uses the kernels torch"):
        plan(config(backend="reference", **options))


def test_a_trunk_in_int8_has_a_draft_model_in_int8_however_small() -> None:
    small, found = tiny_arch("mimo"), {}
    for weights in ("int8", "auto"):
        for draft in ("auto", "int8", "none"):
            found[weights, draft] = int8_of(config(weights, draft), small, torch.float32, "cpu")
    assert found["int8", "auto"] == found["int8", "int8"] == (True, True) and found["int8", "none"] == (True, False)
    assert found["auto", "auto"] == found["auto", "none"] == (False, False) and found["auto", "int8"] == (False, True)
