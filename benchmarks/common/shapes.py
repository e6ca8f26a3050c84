"""Published models' shapes with one MTP layer each, for engines with random weights, and the bytes that a step of them must read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DENSE = {
    "architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_nextn_predict_layers": 1, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5, "rope_theta": 640000, "torch_dtype": "bfloat16", "tie_word_embeddings": False, "attention_bias": True,
    "eos_token_id": 0,
}  # fmt: skip
LATENT = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "num_nextn_predict_layers": 1, "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "torch_dtype": "bfloat16", "tie_word_embeddings": False, "attention_bias": False,
    "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_group": 1,
    "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0, "first_k_dense_replace": 1, "eos_token_id": 0,
}  # fmt: skip

# Each has one MTP layer; where the published model has none it is one more of its layers, as in DeepSeek-V3.
SHAPES: dict[str, dict[str, Any]] = {
    # DeepSeek-V3 in small, which never_slower.py serves as "large".
    "475m": LATENT | {
        "num_hidden_layers": 36, "hidden_size": 1024, "intermediate_size": 512, "moe_intermediate_size": 96, "num_attention_heads": 8,
        "num_key_value_heads": 8, "n_routed_experts": 32, "num_experts_per_tok": 4, "n_shared_experts": 1, "n_group": 8, "topk_group": 4,
        "q_lora_rank": 128, "routed_scaling_factor": 1.5, "vocab_size": 2048,
    },
    # Qwen2.5-0.5B
    "0.5b": DENSE | {
        "num_hidden_layers": 24, "hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2,
        "head_dim": 64, "vocab_size": 151936, "tie_word_embeddings": True,
    },
    # Llama-3.2-1B
    "1b": DENSE | {
        "num_hidden_layers": 16, "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 64, "vocab_size": 128256, "tie_word_embeddings": True, "attention_bias": False,
    },
    # MiMo-7B
    "7b": DENSE | {
        "num_hidden_layers": 36, "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "vocab_size": 151680,
    },
    # DeepSeek-V2-Lite
    "v2-lite": LATENT | {
        "num_hidden_layers": 27, "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_attention_heads": 16,
        "num_key_value_heads": 16, "n_routed_experts": 64, "num_experts_per_tok": 6, "n_shared_experts": 2, "vocab_size": 102400,
    },
    # Qwen3-30B-A3B
    "30b-a3b": DENSE | {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_hidden_layers": 48, "hidden_size": 2048,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
        "attention_bias": False, "vocab_size": 151936,
    },
}  # fmt: skip
SMALL = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "vocab_size": 256}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
TOYS: dict[str, dict[str, Any]] = {
    "475m": SHAPES["475m"] | SMALL | EXPERTS | {
        "num_key_value_heads": 2, "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "q_lora_rank": 32,
    },
    "0.5b": SHAPES["0.5b"] | SMALL | {"num_key_value_heads": 1, "head_dim": 32},
    "1b": SHAPES["1b"] | SMALL | {"num_key_value_heads": 1, "head_dim": 32},
    "7b": SHAPES["7b"] | SMALL | {"num_key_value_heads": 1, "head_dim": 32},
    "v2-lite": SHAPES["v2-lite"] | SMALL | EXPERTS | {"num_key_value_heads": 2, "n_routed_experts": 4},
    "30b-a3b": SHAPES["30b-a3b"] | SMALL | EXPERTS | {"num_key_value_heads": 1, "head_dim": 32, "num_experts": 4},
}  # fmt: skip


def write_config(directory: Path, config: dict[str, Any]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@dataclass(frozen=True, slots=True)
class StepBytes:
    """Bytes that a step reads in any case; two for each number."""

    config: dict[str, Any]

    def attention(self) -> float:
        """Numbers in the matrices of one layer's attention."""
        c = self.config
        hidden, heads = c["hidden_size"], c["num_attention_heads"]
        if "kv_lora_rank" not in c:
            return float(hidden * c["head_dim"] * (2 * heads + 2 * c["num_key_value_heads"]))
        nope, rope, value, rank = (c[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank"))
        q, q_rank = heads * (nope + rope), c["q_lora_rank"]
        queries = hidden * q if q_rank is None else hidden * q_rank + q_rank * q
        return float(queries + hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden)

    def layer(self, rows: int, dense: bool) -> float:
        """Numbers in the weights of one layer; of the experts, those that `rows` rows use if each row chooses uniformly."""
        c = self.config
        hidden, number = c["hidden_size"], c.get("n_routed_experts", c.get("num_experts"))
        if dense or number is None:
            return float(self.attention() + 3 * hidden * c["intermediate_size"])
        hit = number * (1 - (1 - c["num_experts_per_tok"] / number) ** rows)
        # The router is stored in float32.
        mixture = 3 * hidden * c["moe_intermediate_size"] * (hit + c.get("n_shared_experts", 0))
        return float(self.attention() + mixture + 2 * number * hidden)

    def cache(self, requests: int, context: int) -> float:
        """Numbers in the keys and values of one layer."""
        c = self.config
        token = c["kv_lora_rank"] + c["qk_rope_head_dim"] if "kv_lora_rank" in c else 2 * c["num_key_value_heads"] * c["head_dim"]
        return float(requests * context * token)

    def step(self, requests: int, context: int, drafts: int) -> float:
        """Bytes of one step: the trunk and its head over all rows, then the passes of the MTP layer, each with the whole head."""
        c = self.config
        rows, layers, head = requests * (drafts + 1), c["num_hidden_layers"], c["hidden_size"] * c["vocab_size"]
        experts = "moe_intermediate_size" in c
        dense = c.get("first_k_dense_replace", 0) if experts else layers
        numbers = head + sum(self.layer(rows, i < dense) + self.cache(requests, context) for i in range(layers))
        for width in [rows] + [requests] * (drafts - 1) if drafts else []:
            numbers += self.layer(width, not experts) + self.cache(requests, context) + 2 * c["hidden_size"] ** 2 + head
        return float(2 * numbers)
