"""Published models' shapes, for random weights, and the memory that they take. Standard library alone.

What a step reads is common/shapes.py's StepBytes: weights and KV cache, without activations, norms, biases, and rows of the embedding.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from common.shapes import StepBytes

Config = dict[str, Any]
WEIGHT_BYTES = 2  # bfloat16, of weights, keys and values

COMMON: dict[str, Any] = {
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0, "torch_dtype": "bfloat16", "hidden_act": "silu",
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
QWEN2 = COMMON | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3 = COMMON | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "attention_bias": False}
# transformers does not know MiMo's own model_type. vLLM and mtpserve choose by the architecture.
MIMO = COMMON | {"architectures": ["MiMoForCausalLM"], "model_type": "qwen2", "num_nextn_predict_layers": 1, "attention_bias": True}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": QWEN2 | {
        "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "head_dim": 64,
        "intermediate_size": 4864, "vocab_size": 151936, "tie_word_embeddings": True,
    },
    "mimo-7b": MIMO | {
        "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "intermediate_size": 11008, "vocab_size": 151680, "tie_word_embeddings": False,
    },
    "qwen3-8b": QWEN3 | {
        "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "intermediate_size": 12288, "vocab_size": 151936, "tie_word_embeddings": False,
    },
}  # fmt: skip
TOY = {
    "num_hidden_layers": 2, "hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "intermediate_size": 512, "vocab_size": 1024,
}  # fmt: skip


def shape(model: str, toy: bool = False) -> dict[str, Any]:
    """config.json of a published model; `toy`: of two narrow layers in its layout."""
    return SHAPES[model] | (TOY if toy else {})


def read_config(directory: Path) -> dict[str, Any]:
    return dict(json.loads((directory / "config.json").read_text(encoding="utf-8")))


def has_mtp_layer(config: Config) -> bool:
    return bool(config.get("num_nextn_predict_layers"))


def kv_bytes(config: Config, drafts: int) -> int:
    """Of one token in all layers, the MTP layer's included where it drafts."""
    return int(WEIGHT_BYTES * StepBytes(config).cache(1, 1) * (config["num_hidden_layers"] + bool(drafts)))


def weight_bytes(config: Config) -> int:
    """Of all weights of a dense model, the embedding and the MTP layer included."""
    layers = config["num_hidden_layers"] + has_mtp_layer(config)
    tables = config["hidden_size"] * config["vocab_size"] * (1 if config["tie_word_embeddings"] else 2)
    return int(WEIGHT_BYTES * (layers * StepBytes(config).layer(1, dense=True) + tables))
