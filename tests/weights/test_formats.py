"""Quantised checkpoints in their published layouts: one matrix, and whole models of which a part is quantised."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mtpserve.config import CacheConfig, EngineConfig, ModelConfig
from mtpserve.core.errors import ConfigError, LoadError
from mtpserve.core.sampling import SamplingParams
from mtpserve.engine.startup.build import build_engine
from mtpserve.engine.startup.planning import Described, describe, fixed, load_model
from mtpserve.engine.startup.storage import Storage, storage_of
from mtpserve.layers.devices.torch_kernels import torch_kernels
from mtpserve.quant.e2m1 import dequantize_e2m1
from mtpserve.quant.published import in_chunks
from mtpserve.tools.inspect.checkpoint import inspect_model
from mtpserve.weights.checkpoint.checkpoint import Checkpoint
from mtpserve.weights.checkpoint.schemes import QuantConfig
from mtpserve.weights.checkpoint.tensor_entry import TensorEntry
from mtpserve.weights.loader import load
from mtpserve.weights.quantised import formats
from mtpserve.weights.rules import Arranged, Expert, Rule, Stack
from tests.models import checkpoints
from tests.models.harness import Harness
from tests.tiny import run, spec_of
from tests.weights.published import LAYOUTS, Writer, awq, converted, float8, gptq, mxfp4, nvfp4, packed, write

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_experts_in_one_tensor(tmp_path: Path, dtype: torch.dtype) -> None:
    """As gpt-oss stores them, beside a bias of the same name."""
    blocks, exponents = torch.randint(256, (2, 96, K // 32, 16), dtype=torch.uint8), torch.randint(120, 130, (2, 96, K // 32)).byte()
    source = tensors() | {"gate_proj_blocks": blocks, "gate_proj_scales": exponents, "gate_proj_bias": torch.ones(2)}
    source = {name: tensor for name, tensor in source.items() if "experts" not in name}
    module, rules = Fused().to(dtype), [*RULES[:2], Rule(r"gate_proj", "experts"), Rule(r"gate_proj_bias", "bias")]
    module.register_parameter("bias", nn.Parameter(torch.zeros(2, dtype=dtype)))
    load(module, Checkpoint.open(write(tmp_path, {}, source)), rules, dtype=dtype, device="cpu")
    assert torch.equal(module.experts, dequantize_e2m1(blocks.flatten(-2), exponents.view(torch.float8_e8m0fnu)).to(dtype))
    for change, message in (
        ({"gate_proj_scales": exponents[:, :, :1]}, r"gate_proj_scales has shape \[2, 96, 1\] .*needs \[2, 96, 3\] in U8, F8_E8M0"),
        ({"gate_proj_blocks": blocks[:1]}, r"gate_proj_blocks has shape \[1, 96, 3, 16\] .*needs \[2, 96, 3, 16\] in U8"),
        ({"gate_proj_scales": None}, r"gate_proj_blocks has no scale: gate_proj_scales is not in the checkpoint"),
        ({"gate_proj_blocks": None}, r"gate_proj_scales is the scale of gate_proj, which is not in the checkpoint"),
    ):
        wrong = {name: tensor for name, tensor in (source | change).items() if tensor is not None}
        with pytest.raises(LoadError, match=message):
            load(module, Checkpoint.open(write(tmp_path, {}, wrong)), rules, dtype=dtype, device="cpu")


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
        (to("up.weight_scale", torch.ones(160, 6)), nvfp4, r"up\.weight_scale has shape .*F32, it needs \[160, 6\] in F8_E4M3"),
        (to("up.weight_scale_2", torch.ones(160, 1)), nvfp4, r"up\.weight_scale_2 has shape .* needs \[\] or \[1\] in F32"),
        (to("up.weight_scale_2", torch.tensor(torch.inf)), nvfp4, r"up\.weight holds NaN or infinite numbers"),
        (without("up.weight_scale_2"), nvfp4, r"up\.weight has shape .* it needs weight_scale_2 beside it"),
        (to("up.weight_scale_2", torch.tensor(1.0)), mxfp4, r"up\.weight_scale_2 does not belong beside up\.weight_packed"),
        (to("up.pre_quant_scale", torch.ones(96)), float8, r"up\.pre_quant_scale: the model has no parameter"),
        (to("up.bias", torch.ones(160)), gptq, r"up\.bias: the model has no parameter"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(tmp_path: Path, change: Callable[[dict[str, Tensor]], object], writer: Writer, message: str) -> None:
    refused(tmp_path, change, writer, message)


def test_tensors_without_a_use_are_left_out_with_a_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    source, worth = converted(tensors(), lambda _: True, gptq)
    source |= {"up.bias": torch.zeros(160)}
    names = ("self_attn.k_scale", "down.input_scale", "self_attn.v_zero_point", "self_attn.prob_output_scale")
    source |= {name: torch.ones(1) for name in (*names, "rotary_emb.inv_freq", "layers.0.rotary_emb.cos_cached")}
    with caplog.at_level("INFO", "mtpserve.weights.plan"):
        check(loaded(tmp_path, source, {}), worth)
    for reason in (
        "AutoGPTQ writes a bias of zeros",
        "keys are stored as --kv-cache-dtype says",
        "activations are not quantised with fixed",
        "values are stored as --kv-cache-dtype says",
        "attention's queries and weights are not quantised",
    ):
        assert f"tensors not loaded: 1 ({reason}" in caplog.text
    assert "tensors not loaded: 2 (the rotation is computed)" in caplog.text


@pytest.mark.parametrize(("rows", "chunks", "scales"), [(13568, 4, 108), (14848, 4, 116), (27136, 8, 216)])
def test_chunks_as_mimo_v25_and_pro_publish_them(rows: int, chunks: int, scales: int) -> None:
    """Of layers without a window and with one, and of Pro's."""
    shapes = {"qkv_proj.weight": ("F8_E4M3", (rows, 4096)), "qkv_proj.weight_scale_inv": ("F32", (scales, 32))}
    entries = {name: TensorEntry(Path(), dtype, shape, 0, 0) for name, (dtype, shape) in shapes.items()}
    found = formats.format_of(formats.groups(entries)[0], entries, (rows, 4096), QuantConfig(), chunks)
    assert found is not None and (found.bits, found.groups) == (8, 32)


def test_rows_of_chunks_in_order() -> None:
    arranged = Arranged(parts=(8, 4, 2), chunks=2)
    assert arranged.order() == [0, 1, 2, 3, 7, 8, 9, 10, 4, 5, 11, 12, 6, 13]
    scale = torch.tensor([[1.0], [2.0], [3.0], [4.0]])
    matrix = in_chunks(torch.ones(400, 8).to(torch.float8_e4m3fn), scale, 2)
    assert matrix.scale[:, 0].tolist() == [1.0] * 128 + [2.0] * 72 + [3.0] * 128 + [4.0] * 72


def test_a_rule_for_such_a_name_counts(tmp_path: Path) -> None:
    """A family whose own parameter is called like a scale."""
    source = tensors() | {"x.k_scale": torch.randn(32, K)}
    del source["down.weight"]
    found = loaded(tmp_path, source, {}, [*RULES, Rule(r"x\.k_scale", "weight", Stack(1))])
    assert torch.equal(found.weight[160:], source["x.k_scale"])


SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64}
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


@pytest.mark.covering(1)
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("layout", ["float8 per channel", "ModelOpt", "AWQ", "GPTQ", "packed", "MXFP4", "NVFP4"])
def test_logits_are_those_of_the_dequantised_model(tmp_path: Path, layout: str, part: str) -> None:
    here, there = both(tmp_path, layout, part)
    ids = [torch.randint(24, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (30, 17)]
    wanted = Harness(there, ids, 4, with_mtp=True).all_logits((9, 1))
    for keep, tolerance in ((False, 0.0), (True, 1e-4)):
        ours = Harness(here, ids, 4, with_mtp=True, keep_blocks=keep).all_logits((9, 1))
        for mine, other in zip(ours, wanted, strict=True):
            torch.testing.assert_close(mine, other, atol=tolerance, rtol=tolerance)


@pytest.mark.covering(1)  # mostly the one with experts
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_fused_projections_with_biases_and_experts(tmp_path: Path, layout: str, family: str) -> None:
    """The head and embedding stay as they are, as tools leave them."""
    sizes = {name: size for name, size in SIZES.items() if name.endswith("_size")} | {"head_dim": 16}
    tiny = getattr(checkpoints, family)(tmp_path / "source", **sizes)
    config, writer = LAYOUTS[layout]
    quantised, worth = converted(tiny.tensors, matrix, writer)
    here = write(tmp_path / "here", tiny.config | {"quantization_config": config}, quantised)
    ids = [[5, 3, 1, 22, 7, 7, 2, 9]]
    wanted = Harness(write(tmp_path / "there", tiny.config, worth), ids, 4).all_logits((3,))[0]
    assert torch.equal(Harness(here, ids, 4).all_logits((3,))[0], wanted)
    kept = Harness(here, ids, 4, keep_blocks=True)
    torch.testing.assert_close(kept.all_logits((3,))[0], wanted, atol=1e-4, rtol=1e-4)
    found = {name: parameter.dtype for name, parameter in kept.model.named_parameters()}
    assert found["layers.0.attention.qkv.weight"] == KEPT.get(layout, torch.float32)


FLOAT8 = ("float8 per tensor", "float8 per channel", "float8 in groups", "MXFP8", "fp8 without blocks", "ModelOpt")
INT4 = ("AWQ", "GPTQ", "GPTQ, zeros", "GPTQ, second version", "GPTQ, one group", "packed", "packed, zeros", "packed per channel")
INT4 += ("MXFP4", "NVFP4", "NVFP4, packed")
# Not in blocks: these parts do not begin where blocks do.
KEPT = dict.fromkeys(FLOAT8, torch.float8_e4m3fn) | dict.fromkeys(INT4, torch.uint8)


def described(directory: Path) -> Described:
    return describe(EngineConfig(model=ModelConfig(model=str(directory), device="cpu")), want_mtp=True)


@pytest.mark.covering(1)
@pytest.mark.parametrize("layout", ["float8 per channel", "AWQ", "packed", "NVFP4"])
@pytest.mark.parametrize("part", PARTS)
def test_what_is_kept_is_planned(tmp_path: Path, layout: str, part: str) -> None:
    """Matrix by matrix; the plan's count of bytes is that of the model in memory."""
    found, storage = described(both(tmp_path, layout, part)[0]), Storage(True, torch.float32, keep_int4=True)
    model = load_model(found, torch.float32, torch.device("cpu"), 64, torch_kernels(), progress=False, storage=storage)
    sizes = fixed(found, torch.float32, 64, storage)
    assert sizes.trunk + sizes.draft == sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    for name, parameter in model.named_parameters():
        drafts, routed = name.startswith("mtp_head."), ".experts." in name
        there = {"all": True, "trunk": not drafts, "MTP layer": drafts, "experts": routed}[part]
        plain = any(word in name for word in ("kv_up", "router", "embed", "fusion", "norm", "scale", "zeros", "head.weight"))
        assert plain or (parameter.dtype == KEPT[layout]) == there, name


def test_order_that_the_config_does_not_tell(tmp_path: Path) -> None:
    """Widened it loads; kept it is refused, in words that say what to do."""
    tiny = checkpoints.llama(tmp_path / "source", hidden_size=64, head_dim=16)
    quantised, _ = converted(tiny.tensors, matrix, LAYOUTS["GPTQ in act order"][1])
    here = write(tmp_path, tiny.config | {"quantization_config": LAYOUTS["GPTQ"][0]}, quantised)
    Harness(here, [[1]], 4)
    with pytest.raises(LoadError, match=r"\.qweight has its columns in groups out of order, .*--quantization none widens it"):
        Harness(here, [[1]], 4, keep_blocks=True)


def test_a_head_that_is_the_embedding(tmp_path: Path) -> None:
    tiny = checkpoints.qwen2(tmp_path / "source", hidden_size=64, head_dim=16, tie_word_embeddings=True)
    quantised, worth = converted(tiny.tensors, matrix, awq)
    here = write(tmp_path / "here", tiny.config | {"quantization_config": LAYOUTS["AWQ"][0]}, quantised)
    ours, wanted = Harness(here, [[3, 5, 9]], 4, keep_blocks=True), Harness(write(tmp_path / "there", tiny.config, worth), [[3, 5, 9]], 4)
    torch.testing.assert_close(ours.all_logits((3,))[0], wanted.all_logits((3,))[0], atol=1e-4, rtol=1e-4)


def storage_for(directory: Path, quantization: str, kernels: bool) -> Storage:
    asked = EngineConfig(model=ModelConfig(model=str(directory), quantization=quantization))
    return storage_of(asked, [described(directory).checkpoint], torch.bfloat16, torch.device("cuda"), kernels)


def test_what_stays_as_it_is_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An older GPU reads four bits, and no float8. int8 and none keep nothing."""
    int4, fp8 = both(tmp_path / "int4", "GPTQ", "all")[0], both(tmp_path / "fp8", "ModelOpt", "all")[0]
    for capability, reads in (((8, 9), {"fp8"}), ((8, 0), set())):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        assert storage_for(int4, "auto", True).kinds == storage_for(int4, "int4", False).kinds == {"int4"}
        assert storage_for(fp8, "auto", True).kinds == reads
    for quantization in ("auto", "none", "int8"):
        assert not storage_for(int4, quantization, False).kinds and not storage_for(fp8, quantization, False).kinds
    nvfp4 = both(tmp_path / "nvfp4", "NVFP4", "all")[0]
    assert storage_for(nvfp4, "auto", True).kinds == {"int4"}
    with pytest.raises(ConfigError, match=r"--quantization int4: .* has no 4-bit matrix; known formats: AWQ, GPTQ, compr"):
        storage_for(fp8, "int4", False)


@pytest.mark.covering(1)
@pytest.mark.parametrize("layout", ["float8 per tensor", "AWQ", "GPTQ in act order", "NVFP4", "NVFP4, packed"])
@pytest.mark.parametrize("part", ["trunk", "MTP layer"])
def test_greedy_text_with_drafts(tmp_path: Path, layout: str, part: str) -> None:
    """A quantised trunk with an MTP layer that is not, and the reverse: all of it is loaded, and drafts change nothing."""
    texts = []
    here, there = both(tmp_path, layout, part)
    kept = {"GPTQ in act order": "none", "float8 per tensor": "fp8"}.get(layout, "int4")
    for directory, drafts, quantization in ((here, 2, "auto"), (here, 2, kept), (here, 0, kept), (there, 0, "auto")):
        model = ModelConfig(model=str(directory), device="cpu", dtype="float32", quantization=quantization, context_length=60)
        engine = build_engine(EngineConfig(model=model, cache=CacheConfig(max_total_tokens=512), spec=spec_of(drafts)), poison=True)
        texts.append(run(engine, [[3, 5, 7], [1]], SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)))
    assert texts[0] == texts[1] == texts[2] == texts[3]


@pytest.mark.parametrize(("layout", "label", "bits"), [
    ("float8 per tensor", "float8, one scale", 8),
    ("float8 per channel", "float8, a scale per row", 8),
    ("float8 in groups", "float8, groups of 32", 8),
    ("int8", "int8, a scale per row", 8),
    ("AWQ", "int4 (AWQ), groups of 32", 4),
    ("GPTQ, 8 bits", "int8 (GPTQ), groups of 32", 8),
    ("packed", "int4 (packed), groups of 32", 4),
    ("MXFP4", "MXFP4", 4),
    ("NVFP4", "NVFP4", 4),
])  # fmt: skip
def test_inspect_shows_formats(tmp_path: Path, layout: str, label: str, bits: int) -> None:
    """A quantised matrix counts with its own numbers, and the bytes of all of its tensors."""
    here, there = both(tmp_path, layout, "experts")
    ours, wanted = (inspect_model(EngineConfig(model=ModelConfig(model=str(directory), device="cpu"))) for directory in (here, there))
    found = {(group, kind): row for group, _, *row, kind, size in ours.weights for row in [[*row, size]]}
    plain = {group: row for group, _, *row, kind, size in wanted.weights for row in [[*row, size]]}
    assert found["experts", label][0] == plain["experts"][0]
    assert plain["experts"][0] * bits // 8 < found["experts", label][1] < plain["experts"][1] / (32 / bits) * 1.7
    assert sum(row[-1] for row in ours.weights) == sum(entry.size for entry in Checkpoint.open(here).tensors.values())


def test_dummy_weights_for_a_config_that_says_so(tmp_path: Path) -> None:
    here = both(tmp_path, "AWQ", "all")[0]
    (here / "model.safetensors").unlink()
    model = ModelConfig(model=str(here), device="cpu", dtype="float32", load_format="dummy", context_length=60)
    engine = build_engine(EngineConfig(model=model, cache=CacheConfig(max_total_tokens=512), spec=spec_of(1)), poison=True)
    assert len(run(engine, [[3, 5, 7]], SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))[0]) == 4
