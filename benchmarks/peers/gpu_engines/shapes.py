"""Published models' shapes, for random weights, and the bytes that a decoding step must read. Standard library alone.

The bound of a step is these bytes over the device's read bandwidth. It leaves out activations, norms, biases, and rows of the embedding.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Config = Mapping[str, Any]
WEIGHT_BYTES = 2  # bfloat16, of weights, keys and values
DEMO_FOLDER = Path(__file__).parents[3] / "mtpserve" / "demo"

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
# What common/inflate.py changes in the demo's config for the 475 M parameters of never_slower.py.
INFLATED = {
    "num_hidden_layers": 36, "hidden_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 8, "n_routed_experts": 32,
    "num_experts_per_tok": 4, "n_group": 8, "topk_group": 4,
}  # fmt: skip


def shape(model: str, toy: bool = False) -> dict[str, Any]:
    """config.json of a published model; `toy`: of two narrow layers in its layout."""
    return SHAPES[model] | (TOY if toy else {})


def inflated_demo() -> dict[str, Any]:
    """config.json of the model with 475 M parameters that never_slower.py measures."""
    return read_config(DEMO_FOLDER) | INFLATED


def read_config(directory: Path) -> dict[str, Any]:
    return dict(json.loads((directory / "config.json").read_text(encoding="utf-8")))


def has_mtp_layer(config: Config) -> bool:
    return bool(config.get("num_nextn_predict_layers"))


@dataclass(frozen=True, slots=True)
class StepTraffic:
    """Numbers of one model's step. Layers of grouped-query or latent attention, dense or with experts."""

    config: Config

    def attention(self) -> int:
        """Weights of one layer's attention."""
        c = self.config
        hidden, heads = c["hidden_size"], c["num_attention_heads"]
        if "kv_lora_rank" not in c:
            return int(hidden * c["head_dim"] * (2 * heads + 2 * c["num_key_value_heads"]))
        nope, rope, value, rank = (c[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank"))
        query_rank = c.get("q_lora_rank")
        query = heads * (nope + rope)
        queries = hidden * query if query_rank is None else hidden * query_rank + query_rank * query
        return int(queries + hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden)

    def mlp(self, rows: int, dense: bool) -> float:
        """Weights of one layer's MLP; of the experts, those that `rows` rows hit on average when each row chooses independently."""
        c = self.config
        if dense:
            return float(3 * c["hidden_size"] * c["intermediate_size"])
        num_experts, top_k = c["n_routed_experts"], c["num_experts_per_tok"]
        hit = num_experts * (1 - (1 - top_k / num_experts) ** rows)
        # The router's weights are float32: they count twice.
        return float(3 * c["hidden_size"] * c["moe_intermediate_size"] * (hit + c["n_shared_experts"]) + 2 * num_experts * c["hidden_size"])

    def kv(self) -> int:
        """Keys and values of one token in one layer."""
        c = self.config
        return int(c["kv_lora_rank"] + c["qk_rope_head_dim"] if "kv_lora_rank" in c else 2 * c["num_key_value_heads"] * c["head_dim"])

    def step_bytes(self, requests: int, context: float, drafts: int) -> float:
        """Of the trunk over all rows and its head, and of `drafts` passes of the MTP layer, each with the whole head. `context`: tokens
        of each request."""
        c = self.config
        layers, hidden, rows = c["num_hidden_layers"], c["hidden_size"], requests * (drafts + 1)
        num_dense = c.get("first_k_dense_replace", 0) if "n_routed_experts" in c else layers
        head, kv = hidden * c["vocab_size"], requests * context * self.kv()
        trunk = head + sum(self.attention() + self.mlp(rows, layer < num_dense) + kv for layer in range(layers))
        # Rows of the first pass are all rows of the step, those of the further passes one for each request.
        passes = [rows] + [requests] * (drafts - 1) if drafts else []
        projection = 2 * hidden * hidden  # eh_proj
        drafting = sum(self.attention() + self.mlp(n, num_dense >= layers) + kv + projection + head for n in passes)
        return WEIGHT_BYTES * (trunk + drafting)

    def kv_bytes(self, drafts: int) -> int:
        """Of one token in all layers, the MTP layer's included where it drafts."""
        return WEIGHT_BYTES * self.kv() * (self.config["num_hidden_layers"] + bool(drafts))

    def weight_bytes(self) -> int:
        """Of all dense weights, the embedding and the MTP layer included."""
        c = self.config
        layers = c["num_hidden_layers"] + has_mtp_layer(c)
        tables = c["hidden_size"] * c["vocab_size"] * (1 if c["tie_word_embeddings"] else 2)
        return int(WEIGHT_BYTES * (layers * (self.attention() + self.mlp(1, True)) + tables))
