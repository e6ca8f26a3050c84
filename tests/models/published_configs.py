"""config.json of models as they are published, without what nobody reads."""

from __future__ import annotations

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
MISTRAL_7B = {
    "architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32768, "rms_norm_eps": 1e-5,
    "rope_theta": 1000000.0, "sliding_window": None, "max_position_embeddings": 32768, "tie_word_embeddings": False, "eos_token_id": 2,
    "torch_dtype": "bfloat16",
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
GPT_OSS_20B = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880,
    "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "attention_bias": True,
    "attention_dropout": 0.0, "experts_per_token": 4, "num_experts_per_tok": 4, "num_local_experts": 32, "hidden_act": "silu",
    "swiglu_limit": 7.0, "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 12,
    "initial_context_length": 4096, "rope_theta": 150000, "rope_scaling": {
        "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096, "rope_type": "yarn",
        "truncate": False,
    },
    "quantization_config": {
        "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
        ],
        "quant_method": "mxfp4",
    },
    "max_position_embeddings": 131072, "vocab_size": 201088, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "eos_token_id": 200002,
    "pad_token_id": 199999, "torch_dtype": "bfloat16",
}  # fmt: skip
GPT_OSS_120B = GPT_OSS_20B | {
    "num_hidden_layers": 36, "num_local_experts": 128, "layer_types": ["sliding_attention", "full_attention"] * 18,
}  # fmt: skip


ERNIE_21B_A3B = {
    "architectures": ["Ernie4_5_MoeForCausalLM"], "model_type": "ernie4_5_moe", "hidden_size": 2560, "intermediate_size": 12288,
    "num_hidden_layers": 28, "num_nextn_predict_layers": 1, "num_attention_heads": 20, "num_key_value_heads": 4, "head_dim": 128,
    "use_bias": False, "moe_num_experts": 64, "moe_k": 6, "moe_intermediate_size": 1536, "moe_num_shared_experts": 2,
    "moe_layer_start_index": 1, "moe_layer_end_index": 27, "moe_layer_interval": 1, "moe_capacity": [64, 64, 64], "moe_gate": "topk",
    "moe_use_aux_free": True, "rope_theta": 500000.0, "rope_scaling": None, "max_position_embeddings": 131072, "vocab_size": 103424,
    "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "torch_dtype": "bfloat16",
}  # fmt: skip
MIMO_V2_FLASH = {
    "architectures": ["MiMoV2FlashForCausalLM"], "model_type": "mimo_v2_flash", "hidden_size": 4096, "intermediate_size": 16384,
    "num_hidden_layers": 48, "hybrid_layer_pattern": [int(i > 0 and (i + 1) % 6 > 0) for i in range(48)],
    "moe_layer_freq": [int(i > 0) for i in range(48)], "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 192,
    "v_head_dim": 128, "swa_num_attention_heads": 64, "swa_num_key_value_heads": 8, "swa_head_dim": 192, "swa_v_head_dim": 128,
    "sliding_window": 128, "sliding_window_size": 128, "attention_chunk_size": 128, "hybrid_block_size": None, "rope_theta": 5000000,
    "swa_rope_theta": 10000, "partial_rotary_factor": 0.334, "attention_value_scale": 0.707, "attention_bias": False,
    "add_full_attention_sink_bias": False, "add_swa_attention_sink_bias": True, "n_routed_experts": 256, "n_shared_experts": None,
    "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc",
    "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": None, "hidden_act": "silu", "layernorm_epsilon": 1e-5,
    "max_position_embeddings": 262144, "vocab_size": 152576, "tie_word_embeddings": False, "eos_token_id": 151645,
    "torch_dtype": "bfloat16",
}  # fmt: skip
DEEPSEEK_V32 = {
    "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "hidden_size": 7168, "intermediate_size": 18432,
    "num_hidden_layers": 61, "num_nextn_predict_layers": 1, "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "attention_bias": False,
    "index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048, "moe_intermediate_size": 2048, "n_routed_experts": 256,
    "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4, "topk_method": "noaux_tc",
    "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.5, "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "quantization_config": {
        "quant_method": "fp8", "fmt": "e4m3", "scale_fmt": "ue8m0", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
    },
    "vocab_size": 129280, "rms_norm_eps": 1e-6, "max_position_embeddings": 163840, "tie_word_embeddings": False, "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}  # fmt: skip
GLM5 = {
    "architectures": ["GlmMoeDsaForCausalLM"], "model_type": "glm_moe_dsa", "hidden_size": 6144, "intermediate_size": 12288,
    "num_hidden_layers": 78, "num_nextn_predict_layers": 1, "num_attention_heads": 64, "num_key_value_heads": 64, "q_lora_rank": 2048,
    "kv_lora_rank": 512, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256, "attention_bias": False,
    "index_head_dim": 128, "index_n_heads": 32, "index_topk": 2048, "indexer_rope_interleave": True, "rope_interleave": True,
    "moe_intermediate_size": 2048, "n_routed_experts": 256, "num_experts_per_tok": 8, "n_shared_experts": 1, "first_k_dense_replace": 3,
    "n_group": 1, "topk_group": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True,
    "routed_scaling_factor": 2.5, "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}, "vocab_size": 154880,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 202752, "tie_word_embeddings": False, "eos_token_id": [154820, 154827, 154829],
    "dtype": "bfloat16",
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
QWEN3_NEXT_80B = {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "hidden_size": 2048, "intermediate_size": 5120,
    "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_value_head_dim": 128, "num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "partial_rotary_factor": 0.25, "rope_theta": 10000000, "rope_scaling": None, "hidden_act": "silu", "attention_bias": False,
    "vocab_size": 151936, "rms_norm_eps": 1e-6, "max_position_embeddings": 262144, "tie_word_embeddings": False,
    "eos_token_id": 151645, "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN35_9B = {
    "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "hidden_size": 4096, "intermediate_size": 12288,
    "num_hidden_layers": 32, "mtp_num_hidden_layers": 1, "num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 256,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_value_head_dim": 128, "layer_types": [*["linear_attention"] * 3, "full_attention"] * 8, "hidden_act": "silu",
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25, "mrope_section": [11, 11, 10],
        "mrope_interleaved": True,
    },
    "attention_bias": False, "vocab_size": 248320, "rms_norm_eps": 1e-6, "max_position_embeddings": 262144, "tie_word_embeddings": False,
    "eos_token_id": 248044, "dtype": "bfloat16",
}  # fmt: skip
MINIMAX_M25 = {
    "architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2", "hidden_size": 3072, "intermediate_size": 1536,
    "num_hidden_layers": 62, "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "rotary_dim": 64,
    "attn_type_list": [1] * 62, "use_qk_norm": True, "qk_norm_type": "per_layer", "num_local_experts": 256, "num_experts_per_tok": 8,
    "use_routing_bias": True, "scoring_func": "sigmoid", "shared_intermediate_size": 0, "use_mtp": True, "num_mtp_modules": 3,
    "mtp_transformer_layers": 1, "hidden_act": "silu", "rope_theta": 5000000, "max_position_embeddings": 196608, "vocab_size": 200064,
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "eos_token_id": 200020, "dtype": "bfloat16",
}  # fmt: skip
NEMOTRON_3_NANO = {
    "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "hidden_size": 2688, "intermediate_size": 1856,
    "num_hidden_layers": 52, "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
    "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128, "attention_bias": False, "sliding_window": None,
    "mamba_num_heads": 64, "mamba_head_dim": 64, "mamba_hidden_act": "silu", "mamba_proj_bias": False, "ssm_state_size": 128, "n_groups": 8,
    "conv_kernel": 4, "use_conv_bias": True, "use_bias": False, "expand": 2, "chunk_size": 128, "n_routed_experts": 128,
    "num_experts_per_tok": 6, "n_shared_experts": 1, "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712,
    "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "mlp_hidden_act": "relu2", "mlp_bias": False,
    "partial_rotary_factor": 1.0, "rope_theta": 10000, "layer_norm_epsilon": 1e-5, "norm_eps": 1e-5, "max_position_embeddings": 262144,
    "vocab_size": 131072, "tie_word_embeddings": False, "eos_token_id": 2, "torch_dtype": "bfloat16",
}  # fmt: skip
NEMOTRON_3_SUPER = NEMOTRON_3_NANO | {  # the first 11 of its 88 layers: all have 42,000 tensors, which take seconds
    "hidden_size": 4096, "intermediate_size": 2688, "num_hidden_layers": 11, "hybrid_override_pattern": "MEMEMEM*EME",
    "num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E", "mamba_num_heads": 128, "n_routed_experts": 512,
    "num_experts_per_tok": 22, "moe_intermediate_size": 2688, "moe_shared_expert_intermediate_size": 5376, "moe_latent_size": 1024,
    "routed_scaling_factor": 5.0, "eos_token_id": [2, 11],
}  # fmt: skip
# But for the experts, of which there are 256: the test takes its time by their number.
DEEPSEEK_V4_FLASH = {
    "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "hidden_size": 4096, "moe_intermediate_size": 2048,
    "num_hidden_layers": 43, "num_nextn_predict_layers": 1, "num_attention_heads": 64, "num_key_value_heads": 1, "head_dim": 512,
    "qk_rope_head_dim": 64, "q_lora_rank": 1024, "o_groups": 8, "o_lora_rank": 1024, "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0],
    "sliding_window": 128, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 512, "hc_mult": 4, "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6, "n_routed_experts": 32, "num_experts_per_tok": 6, "n_shared_experts": 1, "norm_topk_prob": True, "num_hash_layers": 3,
    "routed_scaling_factor": 1.5, "scoring_func": "sqrtsoftplus", "topk_method": "noaux_tc", "swiglu_limit": 10.0, "rope_theta": 10000,
    "compress_rope_theta": 160000, "rope_scaling": {
        "type": "yarn", "factor": 16, "original_max_position_embeddings": 65536, "beta_fast": 32, "beta_slow": 1,
    },
    "attention_bias": False, "hidden_act": "silu", "vocab_size": 129280, "rms_norm_eps": 1e-6, "max_position_embeddings": 1048576,
    "tie_word_embeddings": False, "eos_token_id": 1, "torch_dtype": "bfloat16",
}  # fmt: skip
