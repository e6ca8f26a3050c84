"""Published models' shapes with one MTP layer each, for engines with random weights, and a lower bound on the bytes that a step moves."""

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

# a: Llama-3.2-1B's, b: MiMo-7B's, c: DeepSeek-V2-Lite's with a NextN layer.
SHAPES: dict[str, dict[str, Any]] = {
    "1b": DENSE | {
        "num_hidden_layers": 16, "hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 64, "vocab_size": 128256, "tie_word_embeddings": True, "attention_bias": False,
    },
    "7b": DENSE | {
        "num_hidden_layers": 36, "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "vocab_size": 151680,
    },
    "moe": LATENT | {
        "num_hidden_layers": 27, "hidden_size": 2048, "intermediate_size": 10944, "moe_intermediate_size": 1408, "num_attention_heads": 16,
        "num_key_value_heads": 16, "n_routed_experts": 64, "num_experts_per_tok": 6, "n_shared_experts": 2, "vocab_size": 102400,
    },
}  # fmt: skip
SMALL = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "vocab_size": 256}
TOYS: dict[str, dict[str, Any]] = {
    "1b": SHAPES["1b"] | SMALL | {"num_key_value_heads": 1, "head_dim": 32},
    "7b": SHAPES["7b"] | SMALL | {"num_key_value_heads": 1, "head_dim": 32},
    "moe": SHAPES["moe"] | SMALL | {"num_key_value_heads": 2, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
}


def write_config(directory: Path, config: dict[str, Any]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@dataclass(frozen=True, slots=True)
class Traffic:
    """Numbers that a pass reads in any case; two bytes each."""

    config: dict[str, Any]

    def layer(self, rows: int, dense: bool) -> float:
        """Weights of one layer; of the experts, those that `rows` rows use if each row chooses uniformly."""
        c = self.config
        hidden = c["hidden_size"]
        if "kv_lora_rank" in c:
            heads, nope, rope, value, rank = (
                c[k] for k in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")
            )
            attention = hidden * heads * (nope + rope) + hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden
        else:
            attention = hidden * c["head_dim"] * (2 * c["num_attention_heads"] + 2 * c["num_key_value_heads"])
        if dense or "n_routed_experts" not in c:
            return attention + 3 * hidden * c["intermediate_size"]
        number, chosen = c["n_routed_experts"], c["num_experts_per_tok"]
        hit = number * (1 - (1 - chosen / number) ** rows)
        return attention + 3 * hidden * c["moe_intermediate_size"] * (hit + c["n_shared_experts"]) + number * hidden

    def cache(self, requests: int, context: int) -> float:
        """Keys and values of one layer."""
        c = self.config
        token = c["kv_lora_rank"] + c["qk_rope_head_dim"] if "kv_lora_rank" in c else 2 * c["num_key_value_heads"] * c["head_dim"]
        return float(requests * context * token)

    def step(self, requests: int, context: int, drafts: int, hot: int | None = None) -> float:
        """Bytes of one step: the trunk and its head over all rows, then the passes of the MTP layer, each with the whole head or `hot` of
        its rows."""
        c = self.config
        rows, layers, head = requests * (drafts + 1), c["num_hidden_layers"], c["hidden_size"] * c["vocab_size"]
        dense = c.get("first_k_dense_replace", layers)
        numbers = head + sum(self.layer(rows, i < dense) + self.cache(requests, context) for i in range(layers))
        passes = [rows] + [requests] * (drafts - 1) if drafts else []
        draft_head = c["hidden_size"] * (hot or c["vocab_size"])
        for each in passes:
            numbers += self.layer(each, dense >= layers) + self.cache(requests, context) + 2 * c["hidden_size"] ** 2 + draft_head
        return 2 * numbers
