"""Tiny checkpoints of families with recurrent layers, as tests/models/checkpoints.py has them of the others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeDecoderLayer
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextDecoderLayer

from tests.models.checkpoints import LLAMA, MTP, QWEN3_EXPERTS, Tiny, randomise, renamed, settings, stored, write

LAYERS = 4
NAMES = {"embedding_norm": "pre_fc_norm_embedding", "hidden_norm": "pre_fc_norm_hidden", "project": "fc", "norm": "norm"}
HYBRID: dict[str, Any] = LLAMA | {
    "num_hidden_layers": LAYERS,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 4,
    "head_dim": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
    "eos_token_id": 1,
}
EXPERTS = QWEN3_EXPERTS | {"shared_expert_intermediate_size": 28}


def qwen3_next(directory: Path, **options: Any) -> Tiny:
    config = HYBRID | EXPERTS | {"architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next"} | options
    return hybrid(directory, config, Qwen3NextConfig, Qwen3NextForCausalLM, Qwen3NextDecoderLayer)


def qwen3_5(directory: Path, *, pictures: bool = False, **options: Any) -> Tiny:
    config = HYBRID | {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1} | options
    return hybrid(directory, config, Qwen3_5TextConfig, Qwen3_5ForCausalLM, Qwen3_5DecoderLayer, pictures)


def qwen3_5_moe(directory: Path, *, pictures: bool = False, **options: Any) -> Tiny:
    """With pictures the experts are stored side by side, as they are published."""
    experts = {key: value for key, value in EXPERTS.items() if key != "norm_topk_prob"}
    config = {key: value for key, value in HYBRID.items() if key != "intermediate_size"} | experts
    config |= {"architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text", "mtp_num_hidden_layers": 1} | options
    return hybrid(directory, config, Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM, Qwen3_5MoeDecoderLayer, pictures)


def hybrid(directory: Path, config: dict[str, Any], config_of: Any, trunk_of: Any, layer_of: Any, pictures: bool = False) -> Tiny:
    """`seed` may be among the options. `pictures`: the layout of a model that sees them, whose text model is inside."""
    seed = config.pop("seed", 0)
    ours = config_of(**settings(config), attn_implementation="eager")
    trunk = trunk_of(ours).float().eval()
    attends = ours.layer_types.index("full_attention")
    mtp = MTP(layer_of(ours, attends), config["hidden_size"], config["rms_norm_eps"]).eval()
    for name in ("embedding_norm", "hidden_norm", "norm"):
        setattr(mtp, name, Qwen3_5RMSNorm(config["hidden_size"], eps=config["rms_norm_eps"]))
    randomise(trunk, mtp, seed=seed)
    plus_one(trunk, mtp)
    tensors: dict[str, Tensor] = {}
    for name, tensor in trunk.state_dict().items():
        tensors |= {name: tensor.clone()} if pictures else stored(name, tensor, False)
    for name, tensor in renamed(mtp.state_dict(), "mtp.layers.0.", NAMES).items():
        # What is the layer's own is one level above it.
        outside = name.removeprefix("mtp.layers.0.").split(".")[0] in NAMES.values()
        name = name.replace("layers.0.", "") if outside else name
        tensors |= {name: tensor.clone()} if pictures else stored(name, tensor, False)
    if config["tie_word_embeddings"]:
        del tensors["lm_head.weight"]
    published = config
    if pictures:
        tensors = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
        tensors["model.visual.blocks.0.attn.qkv.weight"] = torch.zeros(3, 2)
        architecture = config["architectures"][0].replace("ForCausalLM", "ForConditionalGeneration")
        text = {key: value for key, value in config.items() if key != "architectures"}
        published = {"architectures": [architecture], "text_config": text, "vision_config": {"depth": 1}}
    write(directory, published, tensors)
    return Tiny(directory, config, trunk, mtp, "embedding-hidden", "post", tensors, "mtp.")


def plus_one(*modules: Any) -> None:
    """Gains around one: these norms multiply by one more than their weight."""
    for name, tensor in (pair for module in modules for pair in module.state_dict().items()):
        if "norm" in name and "linear_attn" not in name:
            tensor -= 1
