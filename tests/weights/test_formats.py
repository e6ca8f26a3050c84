"""Quantised checkpoints in their published layouts: one matrix, and whole models of which a part is quantised."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mtpserve.config import CacheConfig, EngineConfig, ModelConfig
from mtpserve.core.errors import LoadError
from mtpserve.core.sampling import SamplingParams
from mtpserve.engine.build import build_engine
from mtpserve.weights.checkpoint import Checkpoint
from mtpserve.weights.loader import load
from mtpserve.weights.rules import Expert, Rule, Stack
from tests.models import checkpoints
from tests.models.harness import Harness
from tests.tiny import run, spec_of
from tests.weights.published import LAYOUTS, Writer, awq, converted, float8, gptq, packed, write

K = 96
RULES = [
    Rule(r"up\.weight", "weight", Stack(0)),
    Rule(r"down\.weight", "weight", Stack(1)),
    Rule(r"experts\.(?P<expert>\d+)\.up\.weight", "experts", Expert(0)),
    Rule(r"experts\.(?P<expert>\d+)\.down\.weight", "experts", Expert(1)),
]


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = {"weight": (160, 32), "experts": (64, 32)}
        self.weight = nn.Parameter(torch.full((192, K), torch.nan))
        self.experts = nn.Parameter(torch.full((2, 96, K), torch.nan))


def tensors() -> dict[str, Tensor]:
    dice = torch.Generator().manual_seed(0)
    sizes = {"up": 160, "down": 32} | {f"experts.{i}.{name}": rows for i in range(2) for name, rows in (("up", 64), ("down", 32))}
    return {f"{name}.weight": torch.randn(rows, K, generator=dice) for name, rows in sizes.items()}


def loaded(directory: Path, source: dict[str, Tensor], config: dict[str, Any], rules: list[Rule] = RULES) -> Fused:
    module = Fused()
    checkpoint = Checkpoint.open(write(directory, {"quantization_config": config}, source))
    load(module, checkpoint, rules, dtype=torch.float32, device="cpu")
    return module


def check(module: Fused, worth: dict[str, Tensor]) -> None:
    assert torch.equal(module.weight, torch.cat([worth["up.weight"], worth["down.weight"]]))
    experts = [torch.cat([worth[f"experts.{i}.up.weight"], worth[f"experts.{i}.down.weight"]]) for i in range(2)]
    assert torch.equal(module.experts, torch.stack(experts))


@pytest.mark.parametrize("name", LAYOUTS)
def test_parts_and_experts_are_what_the_formula_says(tmp_path: Path, name: str) -> None:
    config, writer = LAYOUTS[name]
    source, worth = converted(tensors(), lambda _: True, writer)
    check(loaded(tmp_path, source, config), worth)


def test_each_matrix_decides_for_itself(tmp_path: Path) -> None:
    """Every format in one checkpoint, whatever the config says."""
    writers: dict[str, Writer] = {"up.weight": awq, "experts.0.up.weight": gptq, "experts.1.down.weight": packed, "down.weight": float8}
    source, worth = dict(tensors()), dict(tensors())
    for name, writer in writers.items():
        one = converted({name: source.pop(name)}, lambda _: True, writer)
        source |= one[0]
        worth |= one[1]
    check(loaded(tmp_path, source, {}), worth)


def refused(directory: Path, change: Callable[[dict[str, Tensor]], object], writer: Writer, message: str) -> None:
    source, _ = converted(tensors(), lambda name: name == "up.weight", writer)
    change(source)
    with pytest.raises(LoadError, match=message):
        loaded(directory, source, {})


def to(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], object]:
    return lambda source: source.update({name: tensor})


def without(*names: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda source: [source.pop(name) for name in names]


@pytest.mark.parametrize(
    ("change", "writer", "message"),
    [
        (without("up.scales"), gptq, r"up\.qweight has no scale: up\.scales is not in the checkpoint"),
        (without("up.weight_scale"), packed, r"up\.weight_packed has no scale: up\.weight_scale is not in the checkpoint"),
        (without("up.qweight"), awq, r"up\.(scales|qzeros) is the (scale|zeros) of up\.weight, which is not in the checkpoint"),
        (to("up.qweight", torch.zeros(3, 160).int()), gptq, r"shape \[3, 160\] .* needs \[12, 160\] or \[24, 160\] or \[96, 20\]"),
        (to("up.qweight", torch.zeros(12, 160)), gptq, r"up\.qweight has shape \[12, 160\] and dtype F32, it needs .* in I32"),
        (to("up.qzeros", torch.zeros(3, 19).int()), gptq, r"up\.qzeros has shape \[3, 19\] .*it needs \[3, 20\] in I32"),
        (to("up.scales", torch.zeros(5, 160)), awq, r"up\.scales has shape .* it needs groups of equal size in rows of 96 numbers"),
        (to("up.g_idx", torch.zeros(95).int()), gptq, r"up\.g_idx has shape \[95\] and dtype I32, it needs \[96\]"),
        (to("up.weight", torch.zeros(160, 96)), awq, r"up\.(qweight|scales|qzeros) does not belong beside up\.weight"),
        (to("up.weight_scale", torch.ones(160, 7)), float8, r"up\.weight_scale has shape .* \[2, 1\] \(blocks .*\[160, 1\] or \[1\]"),
        (to("up.weight_scale_inv", torch.ones(2, 1)), float8, r"up\.weight_scale(_inv)? and up\.weight_scale(_inv)? are both there"),
        (to("up.weight_scale", torch.tensor(torch.nan)), float8, r"up\.weight holds NaN"),
        (to("up.weight_packed", torch.zeros(160, 48).byte()), packed, r"up\.weight_scale has shape .* in U8, F8_E8M0"),
        (to("up.pre_quant_scale", torch.ones(96)), float8, r"up\.pre_quant_scale: the model has no parameter"),
        (to("up.bias", torch.ones(160)), gptq, r"up\.bias: the model has no parameter"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(tmp_path: Path, change: Callable[[dict[str, Tensor]], object], writer: Writer, message: str) -> None:
    refused(tmp_path, change, writer, message)


def test_tensors_without_a_use_are_left_out_with_a_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source, worth = converted(tensors(), lambda _: True, gptq)
    source |= {"up.bias": torch.zeros(160), "self_attn.k_scale": torch.ones(1), "down.input_scale": torch.ones(1)}
    with caplog.at_level("INFO", "mtpserve.weights.plan"):
        check(loaded(tmp_path, source, {}), worth)
    for reason in (
        "AutoGPTQ writes a bias of zeros",
        "keys are stored as --kv-cache-dtype says",
        "activations are not quantised with fixed",
    ):
        assert f"1 tensors are left out: {reason}" in caplog.text


def test_a_rule_for_such_a_name_counts(tmp_path: Path) -> None:
    """A family whose own parameter is called like a scale."""
    source = tensors() | {"x.k_scale": torch.randn(32, K)}
    del source["down.weight"]
    found = loaded(tmp_path, source, {}, [*RULES, Rule(r"x\.k_scale", "weight", Stack(1))])
    assert torch.equal(found.weight[160:], source["x.k_scale"])


SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 32}
SIZES |= {"q_lora_rank": 32, "kv_lora_rank": 32, "v_head_dim": 32}
Part = Callable[[str, str], bool]  # the MTP layer's prefix and a name


def matrix(name: str) -> bool:
    return name.endswith(("_proj.weight", "_proj_with_mqa.weight")) and "eh_proj" not in name


PARTS: dict[str, Part] = {
    "all": lambda prefix, name: matrix(name),
    "trunk": lambda prefix, name: matrix(name) and not name.startswith(prefix),
    "MTP layer": lambda prefix, name: matrix(name) and name.startswith(prefix),
    "experts": lambda prefix, name: matrix(name) and ".experts." in name,
}


def both(directory: Path, layout: str, part: str) -> tuple[Path, Path]:
    """A tiny DeepSeek with experts and an MTP layer, of which a part is quantised; the same with what its matrices are worth."""
    config, writer = LAYOUTS[layout]
    tiny = checkpoints.deepseek(directory / "source", **SIZES)
    quantised, worth = converted(tiny.tensors, lambda name: PARTS[part](tiny.prefix, name), writer)
    scales = {f"model.layers.{i}.self_attn.{kind}_scale": torch.ones(1) for i in range(2) for kind in "kv"}
    here = write(directory / "quantised", tiny.config | {"quantization_config": config}, quantised | scales)
    return here, write(directory / "worth", tiny.config, worth)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("layout", ["float8 per channel", "ModelOpt", "AWQ", "GPTQ", "packed", "MXFP4"])
def test_logits_are_those_of_the_dequantised_model(tmp_path: Path, layout: str, part: str) -> None:
    here, there = both(tmp_path, layout, part)
    ids = [torch.randint(24, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (30, 17)]
    ours, wanted = (Harness(directory, ids, 4, with_mtp=True).all_logits((9, 1)) for directory in (here, there))
    for mine, other in zip(ours, wanted, strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fused_projections_with_biases_and_experts(tmp_path: Path, layout: str, family: str) -> None:
    """The head and embedding stay as they are, as tools leave them."""
    sizes = {name: size for name, size in SIZES.items() if name.endswith("_size")} | {"head_dim": 16}
    tiny = getattr(checkpoints, family)(tmp_path / "source", **sizes)
    config, writer = LAYOUTS[layout]
    quantised, worth = converted(tiny.tensors, matrix, writer)
    here = write(tmp_path / "here", tiny.config | {"quantization_config": config}, quantised)
    ids = [[5, 3, 1, 22, 7, 7, 2, 9]]
    ours, wanted = (Harness(directory, ids, 4).all_logits((3,)) for directory in (here, write(tmp_path / "there", tiny.config, worth)))
    assert torch.equal(ours[0], wanted[0])


@pytest.mark.parametrize("layout", ["float8 per tensor", "AWQ", "GPTQ in act order"])
@pytest.mark.parametrize("part", ["trunk", "MTP layer"])
def test_greedy_text_with_drafts(tmp_path: Path, layout: str, part: str) -> None:
    """A quantised trunk with an MTP layer that is not, and the reverse: all of it is loaded, and drafts change nothing."""
    texts = []
    for directory, drafts in zip((*both(tmp_path, layout, part), tmp_path / "quantised"), (2, 0, 0), strict=True):
        model = ModelConfig(model=str(directory), device="cpu", dtype="float32", context_length=60)
        engine = build_engine(EngineConfig(model=model, cache=CacheConfig(max_total_tokens=512), spec=spec_of(drafts)), poison=True)
        texts.append(run(engine, [[3, 5, 7], [1]], SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)))
    assert texts[0] == texts[1] == texts[2]
