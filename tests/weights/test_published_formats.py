"""Headers of quantised checkpoints with the names, shapes and dtypes that are published: every tensor has its place or a reason, and the
model takes as much memory as its files. No weight is there."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from mtpserve.config import CacheConfig, EngineConfig, ModelConfig
from mtpserve.engine.startup.planning import describe, fixed
from mtpserve.engine.startup.storage import Storage
from mtpserve.tools.inspect.checkpoint import inspect_model
from tests import selection
from tests.models import test_published as models
from tests.models.test_published import COPIES
from tests.weights.published import AWQ, GPTQ, MODELOPT, scheme

Shape = tuple[int, ...]
Header = dict[str, tuple[str, Shape]]  # ends of names → dtype and shape
BYTES = {"BF16": 2, "F16": 2, "F32": 4, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "I32": 4, "I64": 8, "U8": 1}


def nvidia(out: int, inputs: int) -> Header:
    """nvidia/Llama-3.1-8B-Instruct-FP8"""
    return {".weight": ("F8_E4M3", (out, inputs)), ".weight_scale": ("F32", ()), ".input_scale": ("F32", ())}


def dynamic(out: int, inputs: int) -> Header:
    """RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8-dynamic"""
    return {".weight": ("F8_E4M3", (out, inputs)), ".weight_scale": ("BF16", (out, 1))}


def awq(out: int, inputs: int) -> Header:
    """Qwen/Qwen2.5-7B-Instruct-AWQ"""
    words, groups = out // 8, inputs // 128
    return {".qweight": ("I32", (inputs, words)), ".qzeros": ("I32", (groups, words)), ".scales": ("F16", (groups, out))}


def gptq(out: int, inputs: int) -> Header:
    """Qwen/Qwen3-30B-A3B-GPTQ-Int4"""
    groups = inputs // 128
    numbers: Header = {".qweight": ("I32", (inputs // 8, out)), ".qzeros": ("I32", (groups, out // 8))}
    return numbers | {".scales": ("F16", (groups, out)), ".g_idx": ("I32", (inputs,))}


def nvfp4(out: int, inputs: int) -> Header:
    """nvidia/Qwen3-30B-A3B-NVFP4"""
    numbers: Header = {".weight": ("U8", (out, inputs // 2)), ".weight_scale": ("F8_E4M3", (out, inputs // 16))}
    return numbers | {".weight_scale_2": ("F32", ()), ".input_scale": ("F32", ())}


def packed(out: int, inputs: int) -> Header:
    """moonshotai/Kimi-K2-Thinking's experts"""
    scale = "BF16", (out, inputs // 32)
    return {".weight_packed": ("I32", (out, inputs // 8)), ".weight_scale": scale, ".weight_shape": ("I32", (2,))}


class Case(NamedTuple):
    model: str  # of tests/models/test_published
    config: dict[str, Any]
    layout: Callable[[int, int], Header]
    chosen: tuple[str, ...]  # parts of quantised matrices' names
    label: str
    beside: tuple[str, ...] = ()  # scales of keys and values, in each layer


LINEAR = (".self_attn.", ".mlp.gate_proj", ".mlp.up_proj", ".mlp.down_proj")
CASES = {
    "FP8 by ModelOpt": Case("Llama-3.1-8B", MODELOPT, nvidia, LINEAR, "float8, one scale", ("k_proj.k_scale", "v_proj.v_scale")),
    "FP8-dynamic": Case("Llama-3.1-8B", scheme("float-quantized", 8, "float", "channel"), dynamic, LINEAR, "float8, a scale per row"),
    "AWQ": Case("Qwen2.5-7B", AWQ | {"group_size": 128}, awq, LINEAR, "int4 (AWQ), groups of 128"),
    "GPTQ, experts": Case("Qwen3-30B-A3B", GPTQ | {"group_size": 128}, gptq, (*LINEAR, ".experts."), "int4 (GPTQ), groups of 128"),
    "NVFP4 by ModelOpt": Case(
        "Qwen3-30B-A3B", MODELOPT | {"quant_algo": "NVFP4"}, nvfp4, (*LINEAR, ".experts."), "NVFP4", ("k_proj.k_scale", "v_proj.v_scale")
    ),
    "packed experts, MTP layer not": Case(
        "GLM-4.5-Air", scheme("pack-quantized", 4, "int", "group", group_size=32), packed, (".experts.",), "int4 (packed), groups of 32"
    ),
}


def model_of(case: Case) -> models.Published:
    published = models.PUBLISHED[case.model]
    return published if selection.ALL else published._replace(config=published.config | {"num_hidden_layers": 8})


def header_of(case: Case) -> Header:
    """Of the whole checkpoint. The MTP layer stays as it is, as third-party tools leave it."""
    published = model_of(case)
    layers, found = published.config["num_hidden_layers"], Header()
    trunk, drafts = models.tensors(published)
    for name, shape in (trunk | drafts).items():
        matrix = len(shape) == 2 and any(part in name for part in case.chosen) and not name.startswith(f"model.layers.{layers}.")
        if not matrix:
            found[name] = "BF16", shape
            continue
        found |= {name.removesuffix(".weight") + end: stored for end, stored in case.layout(*shape).items()}
    return found | {f"model.layers.{i}.self_attn.{name}": ("F32", ()) for i in range(layers) for name in case.beside}


def write(directory: Path, config: dict[str, Any], header: Header) -> int:
    """A shard whose data is a hole → its bytes."""
    (directory / "config.json").write_text(json.dumps(config))
    entries, end = {}, 0
    for name, (dtype, shape) in header.items():
        size = BYTES[dtype] * torch.Size(shape).numel()
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(entries).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return end


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_every_tensor_has_its_place_and_memory_is_that_of_the_files(tmp_path: Path, case: Case) -> None:
    header = header_of(case)
    published = model_of(case).config
    size = write(tmp_path, published | {"quantization_config": case.config}, header)
    model = ModelConfig(model=str(tmp_path), device="cpu", context_length=4096)
    config = EngineConfig(model=model, cache=CacheConfig(max_total_tokens=8192))
    described = describe(config, want_mtp="num_nextn_predict_layers" in published)
    sizes = fixed(described, torch.bfloat16, 64, Storage(True, torch.bfloat16, keep_int4=True))
    copies = sum(2 * torch.Size(shape).numel() for name, (_, shape) in header.items() if name.count("layers") and "_tokens" in name) * 2
    assert abs(sizes.trunk + sizes.draft - (size - copies)) < 0.03 * size
    report = inspect_model(config)
    labels = {kind: parameters for _, _, parameters, kind, _ in report.weights}
    assert case.label in labels and "I32" not in labels and sum(row[4] for row in report.weights) == size


def test_deepseek_v4(tmp_path: Path) -> None:
    """Experts in four bits and other matrices in blocks of float8, with scales of a name of their own."""
    published = models.PUBLISHED["DeepSeek-V4-Flash"]
    trunk, own = models.tensors(published)
    header = Header()
    for name, (rows, *columns) in (trunk | own).items():
        stem = name.removesuffix(".weight")
        if ".experts." in name:
            header |= {name: ("I8", (rows, columns[0] // 2)), f"{stem}.scale": ("F8_E8M0", (rows, columns[0] // 32))}
        elif re.search(r"\.(attn|attn\.indexer)\.w[qko]\w+$|\.shared_experts\.w\d$|\.[eh]_proj$", stem):
            header |= {name: ("F8_E4M3", (rows, *columns)), f"{stem}.scale": ("F8_E8M0", (-(-rows // 128), -(-columns[0] // 128)))}
        else:
            kinds = {"tid2eid": "I32"} | dict.fromkeys(("hc_", "attn_sink", "ape", "gate.bias"), "F32")
            header[name] = next((kind for part, kind in kinds.items() if part in name), "BF16"), (rows, *columns)
    size = write(tmp_path, published.config | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, header)
    config = EngineConfig(
        model=ModelConfig(model=str(tmp_path), device="cpu", context_length=4096), cache=CacheConfig(max_total_tokens=8192)
    )
    sizes = fixed(describe(config, want_mtp=True), torch.bfloat16, 64, Storage(True, torch.bfloat16, keep_int4=True))
    # Two copies are not loaded, and products of groups are in bfloat16.
    numbers = {name: torch.Size(shape).numel() for name, shape in (trunk | own).items()}
    widened = sum(count for name, count in numbers.items() if "wo_a" in name) - 2 * sum(
        numbers[name] for name in own if name.endswith(COPIES)
    )
    assert abs(sizes.trunk + sizes.draft - size - widened) < 0.01 * size
    report = inspect_model(config)
    assert {"MXFP4", "float8, blocks of 128 x 128"} < {row[3] for row in report.weights}
    assert sum(row[4] for row in report.weights) == size
    assert sum(row[2] for row in report.weights) == sum(numbers.values())
    assert any("pages of 128 tokens" in note for note in report.notes)
