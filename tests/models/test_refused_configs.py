"""Configs of families that are not computed, or that are wrong: the error names the key, its value and what would be accepted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mtpserve.config import EngineConfig, ModelConfig
from mtpserve.core.errors import LoadError
from mtpserve.engine.startup.planning import describe
from tests.models.chained import FULL, SLIDING, step
from tests.models.checkpoints import glm4_moe, glm4_moe_lite, llama, qwen2_moe, qwen3_moe
from tests.models.compressed_checkpoints import HEAVY, SPARSE, deepseek_v4
from tests.models.gemmas import gemma4
from tests.models.hybrids import nemotron_h
from tests.models.ling import ling
from tests.models.longcat import longcat
from tests.models.own_layouts import ernie, gpt_oss, minimax_m2
from tests.models.sparse_checkpoints import deepseek_v32, glm_dsa
from tests.models.test_families import LLAMA3, Make


@pytest.mark.parametrize(
    ("make", "wrong", "message"),
    [
        (llama, {"mlp_bias": True}, "mlp_bias = true is not supported; supported: false"),
        (llama, {"hidden_act": "gelu"}, "hidden_act must be one of silu"),
        (llama, {"sliding_window": 8}, "sliding_window = 8 is not supported; supported: null"),
        (llama, {"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "high_freq_factor must be more than low_freq_factor = 1, got 1.0"),
        (llama, {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, 'rope_type = "dynamic" is not supported'),
        (ernie, {"use_bias": True}, "use_bias = true is not supported; supported: false"),
        (ernie, {"moe_k": 9}, "moe_k must be at most moe_num_experts = 8, got 9"),
        (minimax_m2, {"use_qk_norm": False}, "use_qk_norm = false is not supported; supported: true"),
        (minimax_m2, {"qk_norm_type": "per_head"}, "qk_norm_type must be one of per_layer"),
        (minimax_m2, {"shared_intermediate_size": 8}, "shared_intermediate_size = 8 is not supported; supported: 0"),
        (minimax_m2, {"attn_type_list": [1, 0, 1]}, r"attn_type_list = \[1, 0, 1\] is not supported; supported: 1 for each layer"),
        (minimax_m2, {"num_experts_per_tok": 9}, "num_experts_per_tok must be at most num_local_experts = 8, got 9"),
        (minimax_m2, {"rotary_dim": 14}, "rotary_dim must be an even number up to head_dim = 12, got 14"),
        (gpt_oss, {"num_experts_per_tok": 9}, "num_experts_per_tok must be at most num_local_experts = 8, got 9"),
        (gpt_oss, {"layer_types": ["full"] * 3}, "layer_types must be a list of num_hidden_layers = 3 names"),
        (gemma4, {"enable_moe_block": True}, "enable_moe_block = true is not supported; supported: false: the dense Gemma 4 models"),
        (gemma4, {"use_bidirectional_attention": "all"}, 'use_bidirectional_attention = "all" is not supported; supported: "vision" or'),
        (gemma4, {"hidden_activation": "silu"}, "hidden_activation must be one of gelu_pytorch_tanh"),
        (gemma4, {"num_kv_shared_layers": 3}, "num_kv_shared_layers must be such that the other layers, of 4, have all kinds"),
        (gemma4, {"num_global_key_value_heads": 3}, "num_attention_heads must be a multiple of its 3 key heads, got 4"),
        (gemma4, {"rope_parameters": {FULL: {"rope_type": "yarn"}}}, "full_attention.rope_type must be one of default, proportional"),
        (gpt_oss, {"swiglu_limit": 0}, "swiglu_limit must be a number above 0, got 0"),
        (step, {"attention_bias": True}, "attention_bias = true is not supported; supported: false"),
        (step, {"use_head_wise_attn_gate": False}, "use_head_wise_attn_gate = false is not supported; supported: true"),
        (step, {"use_rope_layers": [1, 0]}, "use_rope_layers = .* is not supported; supported: a rotation in every layer"),
        (step, {"layer_types": [FULL] * 4}, r"layer_types must be a list of a name for each of 5 \+ 0 layers"),
        (
            step,
            {"rope_theta": [1e4, 2e4, 3e4, 2e4, 1e4]},
            "rope_theta must be a number for each layer, the same for all of sliding_attention",
        ),
        (step, {"yarn_only_types": [SLIDING]}, r'yarn_only_types = .* is not supported; supported: \["full_attention"\]'),
        (step, {"moe_layers_enum": "1,x"}, "moe_layers_enum must be numbers of layers, in a list or between commas"),
        (step, {"mlp_layer_types": ["dense"]}, "mlp_layer_types must be a list of at least num_hidden_layers = 5 names"),
        (step, {"swiglu_limits": [-1] * 5}, "swiglu_limits must be a list of at least num_hidden_layers = 5 numbers"),
        (step, {"moe_top_k": 9}, "moe_top_k must be at most n_routed_experts = 8, got 9"),
        (
            step,
            {"attention_other_setting": {"head_dim": 16, "num_attention_heads": 6}},
            "attention_other_setting.head_dim = 16 is not supported; supported: 12",
        ),
        (
            step,
            {"attention_other_setting": {"num_attention_heads": 5}},
            "attention_other_setting.num_attention_heads must be a multiple of num_attention_groups = 2, got 5",
        ),
        (qwen2_moe, {"use_sliding_window": True}, "use_sliding_window = true is not supported; supported: false, or true with layer_types"),
        (qwen3_moe, {"num_experts_per_tok": 9}, "num_experts_per_tok must be at most num_experts = 8, got 9"),
        (qwen3_moe, {"mlp_only_layers": ["0"]}, "mlp_only_layers must be a list of numbers of layers"),
        (glm4_moe, {"partial_rotary_factor": 0.1}, "partial_rotary_factor must be such that an even part of a head's 12 is rotated"),
        (nemotron_h, {"mlp_bias": True}, "mlp_bias = true is not supported; supported: false"),
        (nemotron_h, {"hybrid_override_pattern": "MXM*-*E"}, "hybrid_override_pattern must be of the letters M [*] E -, got"),
        (nemotron_h, {"hybrid_override_pattern": "MEM-MEE"}, "hybrid_override_pattern must be such that there is attention: pages"),
        (nemotron_h, {"num_hidden_layers": 3}, "num_hidden_layers must be as many as there are blocks, 7, got 3"),
        (nemotron_h, {"n_groups": 3}, "n_groups must be a divisor of mamba_num_heads = 4, got 3"),
        (nemotron_h, {"n_shared_experts": 2}, "n_shared_experts = 2 is not supported; supported: 1"),
        (nemotron_h, {"time_step_limit": [0.0, "none"]}, "time_step_limit = .* is not supported; supported: 0 and infinity"),
        (nemotron_h, {"time_step_limit": [0.001, 1e30]}, "time_step_limit = .* is not supported; supported: 0 and infinity"),
        (deepseek_v32, {"index_head_dim": 4}, "index_head_dim must be an integer of at least 8, got 4"),
        (deepseek_v32, {"index_topk": 0}, "index_topk must be an integer of at least 1, got 0"),
        (deepseek_v32, {"q_lora_rank": None}, "q_lora_rank is missing"),
        (
            glm_dsa,
            {"indexer_types": ["shared", "full", "full"]},
            "indexer_types must be a list of num_hidden_layers = 3 names",
        ),
        (glm_dsa, {"indexer_types": None, "index_topk_pattern": "FFX"}, "index_topk_pattern must be a list of num_hidden_layers = 3"),
        (deepseek_v4, {"layer_types": [HEAVY, "full_attention"]}, "layer_types must be a list of num_hidden_layers = 4 names"),
        (
            deepseek_v4,
            {"layer_types": None, "compress_ratios": [0, 4, 8, 0]},
            "compress_ratios must be a list of at least num_hidden_layers",
        ),
        (
            deepseek_v4,
            {"compress_rates": {SPARSE: 0}},
            "compress_rates.compressed_sparse_attention must be an integer of at least 1, got 0",
        ),
        (deepseek_v4, {"index_head_dim": 4}, "index_head_dim must be an integer of at least 8, got 4"),
        (deepseek_v4, {"o_groups": 3}, "o_groups must be a divisor of num_attention_heads = 4, got 3"),
        (deepseek_v4, {"n_shared_experts": 2}, "n_shared_experts = 2 is not supported; supported: 1"),
        (deepseek_v4, {"scoring_func": "softmax"}, "scoring_func must be one of sqrtsoftplus, sigmoid"),
        (glm4_moe_lite, {"mlp_layer_types": ["dense"]}, "mlp_layer_types must be a list of num_hidden_layers = 3 names"),
        (longcat, {"moe_topk": 13}, r"moe_topk must be at most n_routed_experts \+ zero_expert_num = 12, got 13"),
        (longcat, {"attention_method": "LSA"}, 'attention_method = "LSA" is not supported; supported: mla'),
        (longcat, {"oe_vocab_size_ratio": 78}, "oe_vocab_size_ratio = 78 is not supported; supported: none"),
        (longcat, {"zero_expert_type": "drop"}, 'zero_expert_type = "drop" is not supported; supported: identity'),
        (longcat, {"q_lora_rank": None}, "q_lora_rank is missing"),
        (longcat, {"architectures": ["LongcatFlashNgramForCausalLM"]}, "architectures = .*Ngram.* is not supported"),
        (ling, {"use_bias": True}, "use_bias = true is not supported; supported: false"),
        (ling, {"score_function": "softmax"}, 'score_function = "softmax" is not supported; supported: sigmoid'),
        (ling, {"moe_router_enable_expert_bias": False}, "moe_router_enable_expert_bias = false is not supported; supported: true"),
        (ling, {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 1]}}, 'type = "mrope" is not supported'),
        (ling, {"architectures": ["BailingMoeV2_5ForCausalLM"]}, 'architectures = .*"BailingMoeV2_5ForCausalLM".* is not supported'),
    ],
)
def test_what_is_wrong_with_a_config_is_said(tmp_path: Path, make: Make, wrong: dict[str, Any], message: str) -> None:
    config = make(tmp_path).config | wrong
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(LoadError, match=message):
        describe(EngineConfig(model=ModelConfig(model=str(tmp_path))), want_mtp=False)
