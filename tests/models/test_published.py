"""Published configs, with headers of all their tensors: each tensor has its place, of its shape, and none is missing. No weight is there.

Names and shapes are those of transformers' models, experts one by one as they are published; the numbers of parameters are the published
ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeDecoderLayer
from transformers.models.glm4_moe_lite.modeling_glm4_moe_lite import Glm4MoeLiteDecoderLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer

from mtpserve.config import EngineConfig, ModelConfig
from mtpserve.engine.planning import describe, empty_model, sources
from mtpserve.engine.storage import Storage
from mtpserve.weights.plan import plan
from tests.models.checkpoints import MTP, renamed

SMOLLM2 = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "rms_norm_eps": 1e-5, "rope_theta": 100000,
    "max_position_embeddings": 8192, "tie_word_embeddings": True, "eos_token_id": 2, "torch_dtype": "bfloat16",
}  # fmt: skip
LLAMA31_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "rms_norm_eps": 1e-5, "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192, "rope_type": "llama3",
    },
    "max_position_embeddings": 131072, "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False,
    "eos_token_id": [128001, 128008, 128009], "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN25_7B = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
    "max_position_embeddings": 32768, "max_window_layers": 28, "sliding_window": 131072, "use_sliding_window": False,
    "tie_word_embeddings": False, "eos_token_id": 151645, "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN3_8B = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936, "rms_norm_eps": 1e-6,
    "rope_theta": 1000000, "rope_scaling": None, "max_position_embeddings": 40960, "max_window_layers": 36, "sliding_window": None,
    "use_sliding_window": False, "attention_bias": False, "tie_word_embeddings": False, "eos_token_id": 151645, "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN3_30B_A3B = QWEN3_8B | {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144,
    "num_hidden_layers": 48, "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True, "max_window_layers": 48,
}  # fmt: skip
GLM45_AIR = {
    "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "hidden_size": 4096, "intermediate_size": 10944,
    "num_hidden_layers": 46, "num_nextn_predict_layers": 1, "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128,
    "attention_bias": True, "use_qk_norm": False, "partial_rotary_factor": 0.5, "rope_theta": 1000000, "rope_scaling": None,
    "moe_intermediate_size": 1408, "n_routed_experts": 128, "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0, "vocab_size": 151552, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072, "tie_word_embeddings": False, "eos_token_id": [151329, 151336, 151338], "torch_dtype": "bfloat16",
}  # fmt: skip
GLM47_FLASH = {
    "architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite", "hidden_size": 2048, "intermediate_size": 10240,
    "num_hidden_layers": 47, "num_nextn_predict_layers": 1, "num_attention_heads": 20, "num_key_value_heads": 20, "q_lora_rank": 768,
    "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256, "attention_bias": False,
    "moe_intermediate_size": 1536, "n_routed_experts": 64, "num_experts_per_tok": 4, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc", "norm_topk_prob": True, "routed_scaling_factor": 1.8, "rope_theta": 1000000,
    "vocab_size": 154880, "rms_norm_eps": 1e-5, "max_position_embeddings": 202752, "tie_word_embeddings": False,
    "eos_token_id": [154820, 154827, 154829], "dtype": "bfloat16",
}  # fmt: skip
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "hidden_size": 7168, "intermediate_size": 18432,
    "num_hidden_layers": 61, "num_nextn_predict_layers": 1, "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "moe_intermediate_size": 2048,
    "moe_layer_freq": 1, "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 3, "n_group": 8,
    "topk_group": 4, "topk_method": "noaux_tc", "norm_topk_prob": True, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid",
    "rope_theta": 10000, "rope_scaling": {
        "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "vocab_size": 129280, "rms_norm_eps": 1e-6, "max_position_embeddings": 163840, "tie_word_embeddings": False, "attention_bias": False,
    "eos_token_id": 1, "torch_dtype": "bfloat16",
}  # fmt: skip
MIMO_7B = {
    "architectures": ["MiMoForCausalLM"], "model_type": "mimo", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 36,
    "num_nextn_predict_layers": 1, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "attention_bias": True,
    "vocab_size": 151680, "rms_norm_eps": 1e-5, "rope_theta": 640000, "rope_scaling": None, "max_position_embeddings": 32768,
    "use_sliding_window": False, "tie_word_embeddings": False, "eos_token_id": 151645, "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN15_MOE = {
    "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "hidden_size": 2048, "intermediate_size": 5632,
    "num_hidden_layers": 24, "num_attention_heads": 16, "num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632, "decoder_sparse_step": 1, "norm_topk_prob": False,
    "vocab_size": 151936, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "max_position_embeddings": 8192, "max_window_layers": 21,
    "sliding_window": 32768, "use_sliding_window": False, "tie_word_embeddings": False, "eos_token_id": 151643, "torch_dtype": "bfloat16",
}  # fmt: skip


class Published(NamedTuple):
    config: dict[str, Any]
    parameters: int | None  # of the trunk
    layer: Any = None  # transformers' decoder layer, of which the MTP layer is made
    like: str | None = None  # model_type of the same trunk in transformers, which does not have the family's own

    @property
    def mtp_prefix(self) -> str | None:
        numbered = f"model.layers.{self.config['num_hidden_layers']}."
        return None if self.layer is None else "model.mtp_layers.0." if self.like else numbered


PUBLISHED = {
    "SmolLM2-135M": Published(SMOLLM2, 134_515_008),
    "Llama-3.1-8B": Published(LLAMA31_8B, 8_030_261_248),
    "Qwen2.5-7B": Published(QWEN25_7B, 7_615_616_512),
    "Qwen3-8B": Published(QWEN3_8B, 8_190_735_360),
    "Qwen3-30B-A3B": Published(QWEN3_30B_A3B, 30_532_122_624),
    "GLM-4.5-Air": Published(GLM45_AIR, None, Glm4MoeDecoderLayer),
    "GLM-4.7-Flash": Published(GLM47_FLASH, None, Glm4MoeLiteDecoderLayer),
    "DeepSeek-V3": Published(DEEPSEEK_V3, 671_026_419_200, DeepseekV3DecoderLayer),
    "MiMo-7B": Published(MIMO_7B, None, Qwen2DecoderLayer, like="qwen2"),
    "Qwen1.5-MoE-A2.7B": Published(QWEN15_MOE, 14_315_784_192),
}


def tensors(published: Published) -> dict[str, tuple[int, ...]]:
    """Names and shapes."""
    known = {key: value for key, value in published.config.items() if key not in ("architectures", "model_type")}
    config = AutoConfig.for_model(published.like or published.config["model_type"], **known)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        found = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        if published.layer is not None:
            found |= mtp(published, config, found)
    if config.tie_word_embeddings:
        del found["lm_head.weight"]
    return dict(part for name, shape in found.items() for part in parts(name, shape))


def mtp(published: Published, config: Any, trunk: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    number, prefix = config.num_hidden_layers, published.mtp_prefix
    assert prefix is not None
    if getattr(config, "mlp_layer_types", None) is not None:
        config.mlp_layer_types = [*config.mlp_layer_types, "sparse"]
    layer: nn.Module = published.layer(config, number - (published.like is not None))
    names = {"embedding_norm": "enorm", "hidden_norm": "hnorm", "project": "eh_proj", "norm": "shared_head.norm"}
    copies = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
    if published.like is not None:
        names = {
            "embedding_norm": "token_layernorm", "hidden_norm": "hidden_layernorm", "project": "input_proj", "norm": "final_layernorm"
        }  # fmt: skip
        copies = {}
    own = renamed(MTP(layer, config.hidden_size, config.rms_norm_eps), prefix, names)
    return {name: tuple(tensor.shape) for name, tensor in own.items()} | {prefix + copy: trunk[name] for copy, name in copies.items()}


def parts(name: str, shape: tuple[int, ...]) -> list[tuple[str, tuple[int, ...]]]:
    """transformers keeps all experts in two tensors."""
    start, dot, kind = name.partition(".experts.")
    if not dot:
        return [(name, shape)]
    experts, rows, columns = shape
    matrices = {"gate_proj": rows // 2, "up_proj": rows // 2} if kind == "gate_up_proj" else {"down_proj": rows}
    return [(f"{start}.experts.{i}.{part}.weight", (size, columns)) for i in range(experts) for part, size in matrices.items()]


BYTES = {"BF16": 2, "F8_E4M3": 1, "F32": 4}


def write(
    directory: Path, config: dict[str, Any], shapes: dict[str, tuple[int, ...]], dtype: Callable[[str], str] = lambda name: "BF16"
) -> None:
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
    shapes = tensors(published)
    write(tmp_path, published.config, shapes)
    for want_mtp in [False] + [True] * (published.layer is not None):
        described = describe(EngineConfig(model=ModelConfig(model=str(tmp_path))), want_mtp)
        assert (described.layout is not None) == (published.layer is not None)
        model = empty_model(described, torch.bfloat16, 64, Storage(False, torch.bfloat16))
        placed = plan(model, sources(described))  # raises for a tensor without a place, and for a place without a tensor
        layer = [name for name in shapes if published.mtp_prefix is not None and name.startswith(published.mtp_prefix)]
        copies = [name for name in layer if name.endswith(("embed_tokens.weight", "shared_head.head.weight"))]
        assert len(placed) == len(shapes) - len(copies if want_mtp else layer)
        if published.parameters is not None and not want_mtp:
            assert sum(parameter.numel() for parameter in model.parameters()) == published.parameters


@pytest.mark.parametrize("published", PUBLISHED.values(), ids=PUBLISHED.keys())
def test_without_a_checkpoint(tmp_path: Path, published: Published) -> None:
    (tmp_path / "config.json").write_text(json.dumps(published.config))
    config = EngineConfig(model=ModelConfig(model=str(tmp_path), load_format="dummy"))
    described = describe(config, want_mtp=published.layer is not None)
    assert (described.layout is not None) == (published.layer is not None)
    model = empty_model(described, torch.bfloat16, 64, Storage(False, torch.bfloat16))
    assert (model.mtp_head is not None) == (published.layer is not None)
