"""Float8 that stays float8: which matrices, what they hold, and that the model computes what the expanded one does."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from mtpserve.config import CacheConfig, EngineConfig, ModelConfig, SpecConfig
from mtpserve.core.errors import ConfigError, LoadError
from mtpserve.core.sampling import SamplingParams
from mtpserve.engine.startup import storage
from mtpserve.engine.startup.build import build_engine
from mtpserve.engine.startup.planning import describe, fixed, load_model, plan
from mtpserve.layers.devices.torch_kernels import torch_kernels
from mtpserve.quant.fp8 import FP8
from tests.models.chained import step
from tests.models.checkpoints import Tiny, deepseek, write
from tests.models.harness import CPU, Harness
from tests.tiny import run

# Everything begins where blocks begin: q_a | kv_a, gate | up, experts and the shared one.
LINED_UP: dict[str, Any] = {"hidden_size": 160, "q_lora_rank": 128, "intermediate_size": 256, "moe_intermediate_size": 128}
ODD: dict[str, Any] = {"hidden_size": 160, "intermediate_size": 200, "kv_lora_rank": 132}
MTP = SpecConfig(speculative_algorithm="MTP", speculative_num_steps=3)
Part = bool | Literal["trunk", "mtp"]


def config(tiny: Tiny, quantization: str = "fp8", spec: SpecConfig = MTP) -> EngineConfig:
    model = ModelConfig(model=str(tiny.directory), quantization=quantization, device="cpu", context_length=60)
    return EngineConfig(model=model, cache=CacheConfig(max_total_tokens=1024), spec=spec)


def kept(tiny: Tiny) -> dict[str, bool]:
    """Every matrix of the loaded model, and whether it is float8; the plan's count of bytes is right."""
    found = describe(config(tiny), want_mtp=True)
    model = load_model(found, torch.float32, CPU, 64, torch_kernels(), progress=False, storage=storage.Storage(True, torch.float32))
    sizes = fixed(found, torch.float32, 64, storage.Storage(True, torch.float32))
    assert sizes.trunk + sizes.draft == sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    return {name: parameter.dtype == FP8 for name, parameter in model.named_parameters() if parameter.dim() > 1 and "scale" not in name}


@pytest.mark.parametrize("part", [True, "trunk", "mtp"])
def test_each_matrix_decides_for_itself(tmp_path: Path, part: Part) -> None:
    for name, stays in kept(deepseek(tmp_path, fp8=part, **LINED_UP)).items():
        stored = part is True or (part == "mtp") == name.startswith("mtp_head.")
        plain = any(word in name for word in ("kv_up", "router", "embed", "fusion")) or name == "head.weight"
        assert stays == (stored and not plain), name


def test_what_does_not_line_up_is_expanded_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "mtpserve.weights.blocks"):
        found = kept(deepseek(tmp_path, fp8=True, **ODD))
    assert not found["layers.0.mlp.gate_up.weight"] and not found["layers.0.attention.down.weight"]
    assert found["layers.0.mlp.down.weight"] and found["layers.1.mlp.experts.gate_up"] and found["mtp_head.layer.mlp.experts.gate_up"]
    assert (
        "layers.0.mlp.gate_up.weight is expanded to --dtype: its parts of (200, 200) rows do not begin at multiples of 128" in caplog.text
    )


def test_a_fused_matrix_of_two_kinds_is_expanded(tmp_path: Path) -> None:
    tiny = deepseek(tmp_path / "whole", fp8=True, **LINED_UP)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors = tiny.tensors | {name: tiny.trunk.state_dict()[name].clone()}
    del tensors[name + "_scale_inv"]
    write(tmp_path / "mixed", tiny.config, tensors)
    mixed = Tiny(tmp_path / "mixed", *(getattr(tiny, field) for field in ("config", "trunk", "mtp", "order", "fed", "tensors", "prefix")))
    found = kept(mixed)
    assert not found["layers.0.mlp.gate_up.weight"] and found["layers.0.mlp.down.weight"]


@pytest.mark.parametrize("options", [LINED_UP, ODD, ODD | {"q_lora_rank": None, "n_shared_experts": 0}], ids=["lined up", "odd", "no q_a"])
def test_logits_are_the_expanded_models(tmp_path: Path, options: dict[str, Any]) -> None:
    tiny = deepseek(tmp_path, fp8=True, **options)
    ids = [torch.randint(24, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (30, 17)]
    for ours, each in zip(Harness(tmp_path, ids, 4, keep_blocks=True).all_logits((9, 1)), ids, strict=True):
        torch.testing.assert_close(ours, tiny.logits(each), atol=1e-4, rtol=1e-4)


def test_experts_in_one_tensor_stay_too(tmp_path: Path) -> None:
    tiny = step(tmp_path, fp8=True, hidden_size=160, moe_intermediate_size=136)
    assert kept(tiny)["layers.1.mlp.experts.gate_up"] and kept(tiny)["layers.1.mlp.experts.down"]
    [ours] = Harness(tmp_path, [list(range(20))], 4, keep_blocks=True).all_logits((9,))
    torch.testing.assert_close(ours, tiny.logits(list(range(20))), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("part", [True, "trunk", "mtp"])
def test_greedy_text_is_the_same_with_and_without_drafts(tmp_path: Path, part: Part) -> None:
    tiny = deepseek(tmp_path, fp8=part, **LINED_UP)
    asked = [torch.randint(24, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (3, 20, 8)]
    params = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
    trees = SpecConfig(speculative_algorithm="MTP", speculative_num_steps=2, speculative_eagle_topk=2, speculative_num_draft_tokens=5)
    wanted = run(build_engine(config(tiny, "none", SpecConfig(speculative_algorithm="none")), poison=True), asked, params)
    for spec in (SpecConfig(speculative_algorithm="none"), MTP, trees):
        assert run(build_engine(config(tiny, "fp8", spec), poison=True), asked, params) == wanted


def test_nan_in_float8_is_named(tmp_path: Path) -> None:
    tiny = deepseek(tmp_path / "whole", fp8=True, **LINED_UP)
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    tiny.tensors[name].view(torch.uint8)[5, 7] = 0xFF
    write(tmp_path, tiny.config, tiny.tensors)
    found = describe(EngineConfig(model=ModelConfig(model=str(tmp_path))), want_mtp=True)
    with pytest.raises(LoadError, match=rf"{name} holds NaN".replace(".", r"\.")):
        load_model(found, torch.float32, CPU, 64, torch_kernels(), progress=False, storage=storage.Storage(True, torch.float32))


def test_auto_expands_where_no_kernels_run(tmp_path: Path) -> None:
    tiny = deepseek(tmp_path, fp8=True, **LINED_UP)
    auto, none, fp8 = (plan(config(tiny, asked)).memory.rows[0][1] for asked in ("auto", "none", "fp8"))
    assert auto == none > 2 * fp8


def storage_of(tiny: Tiny, quantization: str = "auto", cache: str = "auto", kernels: bool = True) -> storage.Storage:
    asked = EngineConfig(model=ModelConfig(model=str(tiny.directory), quantization=quantization), cache=CacheConfig(kv_cache_dtype=cache))
    return storage.storage_of(asked, [describe(asked, want_mtp=False).checkpoint], torch.float16, torch.device("cuda"), kernels)


def test_an_older_gpu_expands_or_says_why_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = deepseek(tmp_path, fp8=True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert storage_of(tiny, cache="fp8") == storage.Storage(True, FP8)
    assert storage_of(tiny, kernels=False) == storage.Storage(False, torch.float16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert storage_of(tiny, cache="bfloat16") == storage.Storage(False, torch.bfloat16)
    assert storage_of(tiny, "fp8", "fp8_e4m3", kernels=False) == storage.Storage(True, FP8)
    with pytest.raises(ConfigError, match=r"--quantization fp8: float8 .* kernels need compute capability 8.9"):
        storage_of(tiny, "fp8")
    with pytest.raises(ConfigError, match=r"--kv-cache-dtype fp8_e4m3: float8 .* kernels need"):
        storage_of(tiny, cache="fp8_e4m3")


def test_keeping_what_is_not_there_is_refused(tmp_path: Path) -> None:
    tiny = deepseek(tmp_path)
    stated = tiny.config | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (tmp_path / "config.json").write_text(json.dumps(stated))  # what the config says does not count
    with pytest.raises(ConfigError, match=r"--quantization fp8: .* has no matrix in float8 .*mtpserve\.weights\.quantise"):
        build_engine(config(tiny))
