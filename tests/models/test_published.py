"""Published configs, with headers of all their tensors: each tensor has its place, of its shape, and none is missing. No weight is there.

Names and shapes are those of transformers' models, experts one by one as they are published; the numbers of parameters are the published
ones.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32DecoderLayer
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeDecoderLayer
from transformers.models.glm4_moe_lite.modeling_glm4_moe_lite import Glm4MoeLiteDecoderLayer
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaDecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextDecoderLayer

from mtpserve.config import EngineConfig, ModelConfig, SpecConfig
from mtpserve.engine.startup.planning import describe, empty_model, sources
from mtpserve.engine.startup.storage import Storage
from mtpserve.weights.plan import plan
from tests import selection
from tests.models.chained import STEP35_FLASH, Text, step_modules, step_names
from tests.models.checkpoints import MTP, renamed
from tests.models.compressed_checkpoints import MATRICES, V4MTP, longer, published_name
from tests.models.ling import LING_MINI, Whole, ling_next
from tests.models.longcat import LONGCAT_FLASH_CHAT, longcat_next
from tests.models.published_configs import (
    DEEPSEEK_V3,
    DEEPSEEK_V4_FLASH,
    DEEPSEEK_V32,
    ERNIE_21B_A3B,
    GLM5,
    GLM45_AIR,
    GLM47_FLASH,
    GPT_OSS_20B,
    GPT_OSS_120B,
    LLAMA31_8B,
    MIMO_7B,
    MIMO_V2_FLASH,
    MINIMAX_M25,
    MISTRAL_7B,
    NEMOTRON_3_NANO,
    NEMOTRON_3_SUPER,
    QWEN3_8B,
    QWEN3_30B_A3B,
    QWEN3_NEXT_80B,
    QWEN15_MOE,
    QWEN25_7B,
    QWEN35_9B,
    SMOLLM2,
)

Shapes = dict[str, tuple[int, ...]]


def numbered(layer_of: Any, config: Any, trunk: Shapes) -> Shapes:
    """Transformers' decoder layer with the first number after the trunk's, the tensors that fuse, and copies of embedding and head."""
    number = config.num_hidden_layers
    if getattr(config, "mlp_layer_types", None) is not None:
        config.mlp_layer_types = [*config.mlp_layer_types, "sparse"]
    if getattr(config, "indexer_types", None) is not None:
        config.indexer_types = [*config.indexer_types, "full"]
    layer: nn.Module = layer_of(config, number)
    prefix = f"model.layers.{number}."
    names = {"embedding_norm": "enorm", "hidden_norm": "hnorm", "project": "eh_proj", "norm": "shared_head.norm"}
    own = renamed(MTP(layer, config.hidden_size, config.rms_norm_eps).state_dict(), prefix, names)
    copies = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
    return {name: tuple(tensor.shape) for name, tensor in own.items()} | {prefix + copy: trunk[name] for copy, name in copies.items()}


def ernie(config: Any, trunk: Shapes) -> Shapes:
    """As the trunk's first layer, which is dense; without a norm of its own after it."""
    start, hidden = "model.layers.0.", config.hidden_size
    block = {"model.mtp_block.0." + name.removeprefix(start): shape for name, shape in trunk.items() if name.startswith(start)}
    norms = {f"model.mtp_{name}_norm.0.weight": (hidden,) for name in ("emb", "hidden")}
    return block | norms | {"model.mtp_linear_proj.0.weight": (hidden, 2 * hidden)}


def mimo_v2(config: Any, trunk: Shapes) -> Shapes:
    """Three layers: attention as the trunk's with a window, feed-forward block as that of its first layer, which is dense."""
    windowed, hidden = "model.layers.1.", config.hidden_size
    block = {name.removeprefix(windowed): trunk[name] for name in trunk if name.startswith(windowed) and ".mlp." not in name}
    block |= {"mlp." + name.removeprefix("model.layers.0.mlp."): trunk[name] for name in trunk if name.startswith("model.layers.0.mlp.")}
    block["pre_mlp_layernorm.weight"] = block.pop("post_attention_layernorm.weight")
    block |= {f"{name}.weight": (hidden,) for name in ("enorm", "hnorm", "final_layernorm")} | {"eh_proj.weight": (hidden, 2 * hidden)}
    return {f"model.mtp.layers.{i}.{name}": shape for i in range(3) for name, shape in block.items()}


def mimo(config: Any, trunk: Shapes) -> Shapes:
    layer, prefix = Qwen2DecoderLayer(config, config.num_hidden_layers - 1), "model.mtp_layers.0."
    names = {"embedding_norm": "token_layernorm", "hidden_norm": "hidden_layernorm", "project": "input_proj", "norm": "final_layernorm"}
    own = renamed(MTP(layer, config.hidden_size, config.rms_norm_eps).state_dict(), prefix, names)
    return {name: tuple(tensor.shape) for name, tensor in own.items()}


def streams(config: Any, trunk: Shapes) -> Shapes:
    """DeepSeek-V4's, by transformers' names for all but what fuses."""
    found = {"mtp.0." + name.removeprefix("layer."): tuple(tensor.shape) for name, tensor in V4MTP(longer(config)).state_dict().items()}
    return found | {"mtp.0.emb.tok_emb.weight": trunk["model.embed_tokens.weight"], "mtp.0.head.weight": trunk["lm_head.weight"]}


def qwen(layer_of: Any, config: Any, trunk: Shapes) -> Shapes:
    """A layer that attends, and what fuses one level above it."""
    layer: nn.Module = layer_of(config, config.layer_types.index("full_attention"))
    own = {f"mtp.layers.0.{name}": tuple(tensor.shape) for name, tensor in layer.state_dict().items()}
    norms = {f"mtp.{name}.weight": (config.hidden_size,) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")}
    return own | norms | {"mtp.fc.weight": (config.hidden_size, 2 * config.hidden_size)}


def nemotron(config: Any, trunk: Shapes) -> Shapes:
    """Two blocks, as the trunk's first ones of their kinds; the first fuses, the last has the final norm."""
    kinds, hidden, found = config.layers_block_type, config.hidden_size, {}
    for i, kind in enumerate(("full_attention", "moe")):
        start = f"model.layers.{kinds.index(kind)}."
        found |= {f"mtp.layers.{i}." + name.removeprefix(start): shape for name, shape in trunk.items() if name.startswith(start)}
    norms = {f"mtp.layers.{name}.weight": (hidden,) for name in ("0.enorm", "0.hnorm", "1.final_layernorm")}
    return found | norms | {"mtp.layers.0.eh_proj.weight": (hidden, 2 * hidden)}


class Published(NamedTuple):
    config: dict[str, Any]
    parameters: int | None  # of the trunk
    mtp: Callable[[Any, Shapes], Shapes] | None = None  # of transformers' config and the trunk's tensors
    like: str | None = None  # model_type of the same trunk in transformers, which does not have the family's own


def with_few_experts(published: Published) -> Published:
    """These tests take their time by the number of experts, each of which has its own tensors."""
    few = {key: FEW for key in ("n_routed_experts", "num_experts", "num_local_experts") if published.config.get(key, 0) >= 64}
    return published._replace(config=published.config | few, parameters=None) if few else published


FEW = 24
AS_PUBLISHED = {
    "SmolLM2-135M": Published(SMOLLM2, 134_515_008),
    "Llama-3.1-8B": Published(LLAMA31_8B, 8_030_261_248),
    "Mistral-7B-v0.3": Published(MISTRAL_7B, 7_248_023_552),
    "Qwen2.5-7B": Published(QWEN25_7B, 7_615_616_512),
    "Qwen3-8B": Published(QWEN3_8B, 8_190_735_360),
    "Qwen3-30B-A3B": Published(QWEN3_30B_A3B, 30_532_122_624),
    "gpt-oss-20b": Published(GPT_OSS_20B, 20_914_757_184),
    "gpt-oss-120b": Published(GPT_OSS_120B, 116_829_156_672),
    "DeepSeek-V3.2": Published(DEEPSEEK_V32, None, partial(numbered, DeepseekV32DecoderLayer)),
    "DeepSeek-V4-Flash": Published(DEEPSEEK_V4_FLASH, None, streams),
    "GLM-5": Published(GLM5, None, partial(numbered, GlmMoeDsaDecoderLayer)),
    "GLM-4.5-Air": Published(GLM45_AIR, None, partial(numbered, Glm4MoeDecoderLayer)),
    "GLM-4.7-Flash": Published(GLM47_FLASH, None, partial(numbered, Glm4MoeLiteDecoderLayer)),
    "ERNIE-4.5-21B-A3B": Published(ERNIE_21B_A3B, None, ernie),
    "MiMo-V2-Flash": Published(MIMO_V2_FLASH, None, mimo_v2),
    "Step-3.5-Flash": Published(STEP35_FLASH, None, step_modules),
    "DeepSeek-V3": Published(DEEPSEEK_V3, 671_026_419_200, partial(numbered, DeepseekV3DecoderLayer)),
    "Qwen3-Next-80B-A3B": Published(QWEN3_NEXT_80B, None, partial(qwen, Qwen3NextDecoderLayer)),
    "Qwen3.5-9B": Published(QWEN35_9B, None, partial(qwen, Qwen3_5DecoderLayer)),
    "Nemotron-3-Nano-30B-A3B": Published(NEMOTRON_3_NANO, None),
    "Nemotron-3-Super-120B-A12B, 11 layers": Published(NEMOTRON_3_SUPER, None, nemotron),
    "MiniMax-M2.5": Published(MINIMAX_M25, 228_689_764_864),
    "MiMo-7B": Published(MIMO_7B, None, mimo, like="qwen2"),
    "LongCat-Flash-Chat": Published(LONGCAT_FLASH_CHAT, None, longcat_next),
    "Ling-mini-2.0": Published(LING_MINI, 16_255_643_392, ling_next),
    "Qwen1.5-MoE-A2.7B": Published(QWEN15_MOE, 14_315_784_192),
}
PUBLISHED = AS_PUBLISHED if selection.ALL else {name: with_few_experts(published) for name, published in AS_PUBLISHED.items()}


# Of Step-3.5 transformers has the text model as a part of one that sees pictures, and nothing of Ling 2.0.
OURS: dict[str, Any] = {"bailing_moe": Whole}
MODELS = OURS | {"step3p5": Text}


def tensors(published: Published) -> tuple[Shapes, Shapes]:
    """Names and shapes of the trunk's, and of the MTP layers'."""
    known = {key: value for key, value in published.config.items() if key not in ("architectures", "model_type")}
    kind = published.like or published.config["model_type"]
    config: Any = SimpleNamespace(model_type=kind, **known) if kind in OURS else AutoConfig.for_model(kind, **known)
    with torch.device("meta"):
        model = MODELS[kind](config) if kind in MODELS else AutoModelForCausalLM.from_config(config)
        found = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        own = {} if published.mtp is None else published.mtp(config, found)
        found = {name: shape for name, shape in found.items() if name not in own}
    if config.tie_word_embeddings:
        del found["lm_head.weight"]
    if kind == "longcat_flash":  # transformers has a first matrix for experts that compute nothing, too
        kept = config.n_routed_experts
        found = {name: (kept, *shape[1:]) if name.endswith("experts.gate_up_proj") else shape for name, shape in found.items()}
    names = {"gpt_oss": in_mxfp4, "step3p5": step_names, "deepseek_v4": of_v4, "minimax_m2": of_minimax}.get(kind, parts)
    trunk, mtp = (dict(part for name, shape in shapes.items() for part in names(name, shape)) for shapes in (found, own))
    return trunk, mtp


RENAMED = {
    r"mlp\.gate\.moe_statics": "mlp.moe_statics",
    r"self_attn\.sinks": "self_attn.attention_sink_bias",
    r"^model\.(embeddings|norm_f|layers\.\d+\.(?:norm|mixer))\.": r"backbone.\1.",
}


def parts(name: str, shape: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
    """transformers keeps all experts in two tensors."""
    for ours, published in RENAMED.items():
        name = re.sub(ours, published, name)
    start, dot, kind = name.partition(".experts.")
    if not dot or len(shape) < 3:
        return [(name, shape)]
    experts, rows, columns = shape
    matrices = {"gate_proj": rows // 2, "up_proj": rows // 2} if kind == "gate_up_proj" else {kind: rows}
    return [(f"{start}.experts.{i}.{part}.weight", (size, columns)) for i in range(experts) for part, size in matrices.items()]


def in_mxfp4(name: str, shape: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
    """gpt-oss: transformers has the experts' matrices as [inputs, outputs]."""
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return [(name, shape)]
    experts, inputs, outputs = shape
    return [(f"{name}_blocks", (experts, outputs, inputs // 32, 16)), (f"{name}_scales", (experts, outputs, inputs // 32))]


def of_minimax(name: str, shape: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
    matrices = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    return [
        (re.sub(r"(?<=\d\.)(gate|up|down)_proj", lambda found: matrices[found[0]], part).replace(".mlp.", ".block_sparse_moe."), each)
        for part, each in parts(name, shape)
    ]


def of_v4(name: str, shape: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
    start, dot, kind = published_name(name).partition(".experts.")
    if not dot:
        return [(start, shape)]
    experts, rows, columns = shape
    each = rows // len(MATRICES[kind]), columns
    return [(f"{start}.experts.{i}.{part}.weight", each) for i in range(experts) for part in MATRICES[kind]]


BYTES = {"BF16": 2, "F8_E4M3": 1, "F32": 4, "U8": 1, "I32": 4, "I8": 1, "F8_E8M0": 1}
COPIES = ("embed_tokens.weight", "tok_emb.weight", ".head.weight")  # in an MTP layer, of the trunk's


def usual(name: str) -> str:
    return "I32" if name.endswith("tid2eid") else "U8" if name.endswith(("_blocks", "_scales")) else "BF16"


def write(directory: Path, config: dict[str, Any], shapes: Shapes, dtype: Callable[[str], str] = usual) -> None:
    """A shard whose data is a hole. `dtype`: a tensor's, by its name."""
    (directory / "config.json").write_text(json.dumps(config))
    header, end = {}, 0
    for name, shape in shapes.items():
        size = BYTES[dtype(name)] * torch.Size(shape).numel()
        header[name] = {"dtype": dtype(name), "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


@pytest.mark.parametrize("published", PUBLISHED.values(), ids=PUBLISHED.keys())
def test_every_tensor_has_its_place(tmp_path: Path, published: Published) -> None:
    trunk, mtp = tensors(published)
    write(tmp_path, published.config, trunk | mtp)
    for want_mtp in [False] + [True] * (published.mtp is not None):
        spec = SpecConfig(speculative_algorithm="MTP") if want_mtp else SpecConfig(speculative_algorithm="none")
        described = describe(EngineConfig(model=ModelConfig(model=str(tmp_path)), spec=spec), want_mtp)
        assert (described.layout is not None) == (published.mtp is not None)
        model = empty_model(described, torch.bfloat16, 64, Storage(False, torch.bfloat16))
        placed = {placement.name for placement in plan(model, sources(described))}  # raises for a tensor without a place, and vice versa
        # Scales are placed with their matrices.
        own = {name for name in mtp if want_mtp and not name.endswith(COPIES)}
        assert placed == {name for name in (*trunk, *own) if not name.endswith("_scales")}
        if published.parameters is not None and not want_mtp:
            assert sum(parameter.numel() for parameter in model.parameters()) == published.parameters


@pytest.mark.thorough  # the same models, and those of test_published_commands.py have no checkpoint, either
@pytest.mark.parametrize("published", PUBLISHED.values(), ids=PUBLISHED.keys())
def test_without_a_checkpoint(tmp_path: Path, published: Published) -> None:
    (tmp_path / "config.json").write_text(json.dumps(published.config))
    config = EngineConfig(model=ModelConfig(model=str(tmp_path), load_format="dummy"))
    described = describe(config, want_mtp=published.mtp is not None)
    assert (described.layout is not None) == (published.mtp is not None)
    model = empty_model(described, torch.bfloat16, 64, Storage(False, torch.bfloat16))
    assert (model.mtp_head is not None) == (published.mtp is not None)


def test_mimo_v25s_fused_matrices_have_their_places(tmp_path: Path) -> None:
    """A layer without a window, one with a window, and the MTP layers: shapes and scales are the published ones."""
    short = MIMO_V2_FLASH | {"num_hidden_layers": 2, "hybrid_layer_pattern": [0, 1], "moe_layer_freq": [0, 1], "n_routed_experts": 8}
    trunk, mtp = tensors(Published(short, None, mimo_v2))
    shapes: Shapes = {}
    for name, shape in (trunk | mtp).items():
        if name.endswith("q_proj.weight"):
            fused, (rows, scales) = name.replace("q_proj", "qkv_proj"), (13568, 108) if "model.layers.0." in name else (14848, 116)
            shapes |= {fused: (rows, 4096), f"{fused}_scale_inv": (scales, 32)}
        elif not name.endswith(("k_proj.weight", "v_proj.weight")):
            shapes[name] = shape

    def dtype(name: str) -> str:
        return "F32" if name.endswith("_scale_inv") else "F8_E4M3" if "qkv_proj" in name else "BF16"

    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128], "ignored_layers": []}
    write(tmp_path, short | {"architectures": ["MiMoV2ForCausalLM"], "model_type": "mimo_v2", "quantization_config": fp8}, shapes, dtype)
    spec = SpecConfig(speculative_algorithm="MTP", speculative_num_steps=3)
    described = describe(EngineConfig(model=ModelConfig(model=str(tmp_path)), spec=spec), want_mtp=True)
    model = empty_model(described, torch.bfloat16, 64, Storage(False, torch.bfloat16))
    placed = {placement.name for placement in plan(model, sources(described))}
    assert placed == {name for name in shapes if not name.endswith("_scale_inv")}
