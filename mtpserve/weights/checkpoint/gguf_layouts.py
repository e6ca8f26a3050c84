"""llama.cpp's architectures: their names of tensors and keys, and those of Hugging Face's checkpoints, which
family files know.

Sources: gguf's constants.py and tensor_mapping.py, and llama.cpp's convert_hf_to_gguf.py, which made the
files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

OUTSIDE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
ROPE_FACTORS = "rope_freqs.weight"  # of Llama 3's scaling: read with the config
BLOCK = {  # the tensors blk.N.….weight and blk.N.….bias; below, a name with its end is that tensor alone
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
EXPERTS = {  # all experts of a layer in one tensor: {} is the expert's number
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.{}.gate_proj",
    "ffn_up_exps": "mlp.experts.{}.up_proj",
    "ffn_down_exps": "mlp.experts.{}.down_proj",
}
NEXTN = {
    "nextn.eh_proj": "eh_proj",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.embed_tokens": "embed_tokens",
    "nextn.shared_head_head": "shared_head.head",
    "nextn.shared_head_norm": "shared_head.norm",
}
KEYS = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
EXPERT_KEYS = {
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
DEFAULTS: dict[str, object] = {
    "first_k_dense_replace": 0,
    "num_nextn_predict_layers": 0,
    "norm_topk_prob": False,
}


@dataclass(frozen=True, slots=True)
class GGUFLayout:
    """`keys`: config.json's → the file's, without its architecture; those in DEFAULTS may be missing. `set`:
    config.json's, for which the file has no keys. `paired`: the file has each head's rows of queries and keys
    in pairs that are rotated together; in Hugging Face's checkpoints the second of each pair is half a head
    later."""

    architecture: str
    names: Mapping[str, str]
    keys: Mapping[str, str]
    set: Mapping[str, object] = field(default_factory=dict)
    paired: bool = False


LAYOUTS = {
    "llama": GGUFLayout("LlamaForCausalLM", BLOCK, KEYS, paired=True),
    "qwen2": GGUFLayout("Qwen2ForCausalLM", BLOCK, KEYS),
    "qwen2moe": GGUFLayout(
        "Qwen2MoeForCausalLM",
        {**BLOCK, **EXPERTS, "ffn_gate_inp_shexp": "mlp.shared_expert_gate"}
        | {f"ffn_{part}_shexp": f"mlp.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
        {**KEYS, **EXPERT_KEYS, "shared_expert_intermediate_size": "expert_shared_feed_forward_length"},
        {"norm_topk_prob": False},
    ),
    "qwen3": GGUFLayout("Qwen3ForCausalLM", BLOCK | HEAD_NORMS, KEYS),
    "qwen3moe": GGUFLayout(
        "Qwen3MoeForCausalLM",
        {**BLOCK, **HEAD_NORMS, **EXPERTS},
        KEYS | EXPERT_KEYS,
        {"norm_topk_prob": True},
    ),
    "glm4moe": GGUFLayout(
        "Glm4MoeForCausalLM",
        {**BLOCK, **HEAD_NORMS, **EXPERTS, **NEXTN, "post_attention_norm": "post_attention_layernorm"}
        | {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}
        | {f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")},
        KEYS
        | {
            "n_routed_experts": "expert_count",
            "num_experts_per_tok": "expert_used_count",
            "moe_intermediate_size": "expert_feed_forward_length",
            "n_shared_experts": "expert_shared_count",
            "first_k_dense_replace": "leading_dense_block_count",
            "routed_scaling_factor": "expert_weights_scale",
            "norm_topk_prob": "expert_weights_norm",
            "num_nextn_predict_layers": "nextn_predict_layers",
        },
    ),
}
