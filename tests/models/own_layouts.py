"""Tiny random checkpoints of families whose tensors are laid out or named as nobody else's, beside those in checkpoints.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GptOssConfig, GptOssForCausalLM

from mtpserve.quant.mxfp4 import dequantize_mxfp4
from tests.models.checkpoints import LLAMA, Tiny, randomise, settings, write

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
