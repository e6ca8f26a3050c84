"""What is refused by the config's words, with key, value and what is supported; and what is said to be left out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mtpserve.core.errors import UnsupportedModel
from mtpserve.weights.checkpoint.hf import quantization, quantization_section, read_config
from mtpserve.weights.checkpoint.hf_config import HFConfig
from mtpserve.weights.checkpoint.schemes import QuantConfig, quant_config_of
from tests.weights.published import AWQ, COMPRESSED, GPTQ, LAYOUTS, MODELOPT, scheme

FP8: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
SPARSE: dict[str, Any] = {"sparsity_config": {"format": "sparse-24-bitmask"}}


def config(directory: Path, section: object, **beside: object) -> HFConfig:
    (directory / "config.json").write_text(json.dumps({"quantization_config": section} if section else {}))
    if beside:
        (directory / "hf_quant_config.json").write_text(json.dumps(beside))
    return read_config(directory)


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_that_load(tmp_path: Path, name: str) -> None:
    section = LAYOUTS[name][0]
    assert quantization(config(tmp_path, section)) == section["quant_method"]


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (FP8 | {"quant_method": "bitsandbytes"}, r'quant_method = "bitsandbytes" is not supported; supported: fp8, fbgemm_fp8, compr'),
        (FP8 | {"quant_method": None}, r"quant_method = null is not supported"),
        (FP8 | {"weight_block_size": [64, 64]}, r"weight_block_size = \[64, 64\] is not supported; supported: \[128, 128\], or none"),
        (FP8 | {"fmt": "e5m2"}, r'fmt = "e5m2" is not supported'),
        (scheme("marlin-24", 4, "int", "group"), r'format = "marlin-24" is not supported'),
        (scheme("pack-quantized", 3, "int", "group"), r"config_groups\.group_0\.weights\.num_bits = 3 is not supported; .* 4 \(int\)"),
        (scheme("float-quantized", 8, "float", "token"), r'strategy = "token" is not supported; supported: tensor, channel, group, block'),
        (scheme("float-quantized", 8, "float", "block", block_structure=[64, 64]), r"block_structure = \[64, 64\] is not supported"),
        (scheme("pack-quantized", 8, "complex", "group"), r'weights\.type = "complex" is not supported; supported: int, float'),
        (COMPRESSED | SPARSE, r'sparsity_config\.format = "sparse-24-bitmask" is not supported; supported: dense'),
        (COMPRESSED | {"transform_config": {"config_groups": {"R3": {}}}}, r"transform_config = .* rotations"),
        (MODELOPT | {"quant_algo": "NVFP4_AWQ"}, r'quant_algo = "NVFP4_AWQ" is not supported; supported: FP8, FP8_PER_CHANNEL_PER_TOKEN'),
        (AWQ | {"bits": 8}, r"bits = 8 is not supported; supported: 4"),
        (AWQ | {"version": "gemv"}, r'version = "gemv" is not supported; supported: gemm'),
        (AWQ | {"zero_point": False}, r"zero_point = false is not supported"),
        (GPTQ | {"bits": 3}, r"bits = 3 is not supported; supported: 4, 8"),
        (GPTQ | {"checkpoint_format": "marlin"}, r'checkpoint_format = "marlin" is not supported; supported: gptq, gptq_v2'),
    ],
)  # fmt: skip
def test_what_is_refused(tmp_path: Path, section: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        quantization(config(tmp_path, section))


def test_modelopts_own_file(tmp_path: Path) -> None:
    """Beside a config.json that says nothing; the names of its file are in the errors."""
    assert quantization(config(tmp_path, None, quantization={"quant_algo": "FP8", "kv_cache_quant_algo": None})) == "modelopt"
    layers = {"model.layers.0.mlp.up_proj": {"quant_algo": "FP8"}, "model.layers.1.mlp.up_proj": {"quant_algo": "W4A8_AWQ"}}
    mixed = config(tmp_path, None, quantization={"quant_algo": "MIXED_PRECISION", "quantized_layers": layers})
    with pytest.raises(UnsupportedModel, match=r'hf_quant_config\.json: .*layers\.1\.mlp\.up_proj\.quant_algo = "W4A8_AWQ" is not'):
        quantization(mixed)


def test_scales_of_a_cache_are_left_out_with_a_message(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "mtpserve.weights.checkpoint.schemes"):
        quantization(config(tmp_path, COMPRESSED | {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}))
    assert "the checkpoint's KV cache scales are not used: --kv-cache-dtype sets the number format" in caplog.text


@pytest.mark.parametrize(
    ("section", "wanted"),
    [
        ({}, QuantConfig(1, False)),
        (GPTQ, QuantConfig(1, False)),
        (GPTQ | {"checkpoint_format": "gptq_v2", "desc_act": True}, QuantConfig(0, True)),
        ({"quant_method": "gptq", "format": "gptq_v2"}, QuantConfig(0, False)),
    ],
)
def test_what_tensors_do_not_show(tmp_path: Path, section: dict[str, Any], wanted: QuantConfig) -> None:
    assert quant_config_of(quantization_section(config(tmp_path, section))) == wanted
