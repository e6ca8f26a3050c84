"""Tiny random checkpoints of families whose tensors are laid out or named as nobody else's, beside those in checkpoints.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Ernie4_5_MoeConfig, Ernie4_5_MoeForCausalLM, GptOssConfig, GptOssForCausalLM
from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeDecoderLayer

from mtpserve.quant.mxfp4 import dequantize_mxfp4
from tests.models.checkpoints import LLAMA, MTP, Tiny, randomise, renamed, settings, stored, write

OSS_YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 16,
}
GPT_OSS: dict[str, Any] = LLAMA | {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 64,
    "intermediate_size": 32,
    "attention_bias": True,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "sliding_window": 9,
    "rope_theta": 150000.0,
    "rope_scaling": OSS_YARN,
}

ERNIE: dict[str, Any] = LLAMA | {
    "architectures": ["Ernie4_5_MoeForCausalLM"],
    "model_type": "ernie4_5_moe",
    "num_nextn_predict_layers": 1,
    "use_bias": False,
    "moe_num_experts": 8,
    "moe_k": 3,
    "moe_intermediate_size": 20,
    "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1,
    "moe_layer_end_index": -1,
    "moe_layer_interval": 1,
}


def gpt_oss(directory: Path, mxfp4: bool = False, seed: int = 0, **options: Any) -> Tiny:
    """`options` replace entries of GPT_OSS; `mxfp4`: the experts as they are published, and the judge's are what that loses nothing of."""
    config = GPT_OSS | options
    trunk = GptOssForCausalLM(GptOssConfig(**settings(config), attn_implementation="eager")).float().eval()
    randomise(trunk, seed=seed)
    tensors: dict[str, Tensor] = {}
    for name, tensor in trunk.state_dict().items():
        if mxfp4 and name.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = tensor.shape
            blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
            scales = torch.randint(122, 126, (experts, outputs, inputs // 32), dtype=torch.uint8)
            tensor.copy_(dequantize_mxfp4(blocks, scales).mT)
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        else:
            tensors[name] = tensor.clone()
    if mxfp4:
        config |= {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}}
    if config["tie_word_embeddings"]:
        del tensors["lm_head.weight"]
    write(directory, config, tensors)
    return Tiny(directory, config, trunk, None, "embedding-hidden", "post", tensors, "")


def ernie(directory: Path, seed: int = 0, **options: Any) -> Tiny:
    """`options` replace entries of ERNIE."""
    config = {key: value for key, value in (ERNIE | options).items() if key != "attention_bias"}
    ours = Ernie4_5_MoeConfig(**settings(config), attn_implementation="eager")
    trunk = Ernie4_5_MoeForCausalLM(ours).float().eval()
    # A layer that comes before those with experts is dense.
    dense = Ernie4_5_MoeConfig(**settings(config | {"moe_layer_start_index": 1}), attn_implementation="eager")
    mtp = MTP(Ernie4_5_MoeDecoderLayer(dense, 0), config["hidden_size"], config["rms_norm_eps"]).eval()
    mtp.norm = trunk.model.norm
    randomise(trunk, mtp, seed=seed)
    names = {"embedding_norm": "emb_norm.0", "hidden_norm": "hidden_norm.0", "project": "linear_proj.0"}
    own = {name: tensor for name, tensor in mtp.state_dict().items() if not name.startswith("norm.")}
    parts = renamed(own, "model.mtp_", names, block="block.0.")
    tensors: dict[str, Tensor] = {}
    for name, tensor in (trunk.state_dict() | parts).items():
        tensors |= stored(name.replace("mlp.gate.moe_statics", "mlp.moe_statics"), tensor, False)
    if config["tie_word_embeddings"]:
        del tensors["lm_head.weight"]
    write(directory, config, tensors)
    return Tiny(directory, config, trunk, mtp, "embedding-hidden", "pre", tensors, "model.mtp_")
