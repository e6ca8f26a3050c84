"""Tiny random Gemma 4 checkpoints, and the models that they were made from, in transformers' code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import Gemma4ForCausalLM, Gemma4TextConfig
from transformers.models.gemma4_unified.configuration_gemma4_unified import Gemma4UnifiedTextConfig
from transformers.models.gemma4_unified.modeling_gemma4_unified import Gemma4UnifiedForCausalLM

from tests.models.checkpoints import LLAMA, Tiny, randomise, write

FULL, SLIDING = "full_attention", "sliding_attention"
GEMMA4: dict[str, Any] = {key: value for key, value in LLAMA.items() if key not in ("head_dim", "rope_theta", "tie_word_embeddings")} | {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "num_hidden_layers": 4,
    "layer_types": [SLIDING, FULL, SLIDING, FULL],
    "head_dim": 12,
    "global_head_dim": 24,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "sliding_window": 9,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "final_logit_softcapping": 7.0,
    "tie_word_embeddings": True,
    "pad_token_id": 0,
}
# As the small models have it.
SMALL: dict[str, Any] = {
    "num_hidden_layers": 6,
    "layer_types": [SLIDING, FULL, SLIDING, FULL, SLIDING, FULL],
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 6,
    "vocab_size_per_layer_input": 24,
    "use_double_wide_mlp": True,
    "attention_k_eq_v": False,
    "num_key_value_heads": 1,
}


def gemma4_small(directory: Path, **options: Any) -> Tiny:
    return gemma4(directory, **SMALL | options)


def gemma4(directory: Path, *, unified: bool = False, pictures: bool = False, seed: int = 0, **options: Any) -> Tiny:
    """`options` replace entries of GEMMA4; `pictures`: the text model in a checkpoint of one that sees them."""
    config = GEMMA4 | options
    makes = (Gemma4UnifiedTextConfig, Gemma4UnifiedForCausalLM) if unified else (Gemma4TextConfig, Gemma4ForCausalLM)
    settings = {key: value for key, value in config.items() if key not in ("architectures", "model_type")}
    trunk = makes[1](makes[0](**settings, attn_implementation="eager")).float().eval()
    randomise(trunk, seed=seed)
    for layer in trunk.model.layers:
        layer.layer_scalar.uniform_(0.6, 1.3)
    tensors: dict[str, Tensor] = {name: tensor.clone() for name, tensor in trunk.state_dict().items()}
    if config["tie_word_embeddings"]:
        del tensors["lm_head.weight"]
    if unified:
        config |= {"architectures": ["Gemma4UnifiedForCausalLM"], "model_type": "gemma4_unified_text"}
    if pictures:
        tensors = {name.replace("model.", "model.language_model.", 1): tensor for name, tensor in tensors.items()}
        tensors["model.vision_tower.patch_embedder.input_proj.weight"] = tensors["model.language_model.norm.weight"].clone()
        config = {"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "text_config": config}
    write(directory, config, tensors)
    return Tiny(directory, config.get("text_config", config), trunk, None, "embedding-hidden", "post", tensors, "")
