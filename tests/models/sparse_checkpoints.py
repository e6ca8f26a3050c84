"""Tiny random checkpoints of the families that attend to selected tokens: see checkpoints.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from transformers import DeepseekV32Config, DeepseekV32ForCausalLM, GlmMoeDsaConfig, GlmMoeDsaForCausalLM
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32DecoderLayer
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaDecoderLayer

from tests.models.checkpoints import DEEPSEEK, Tiny, numbered

# Contexts of the tests are longer than index_topk, and shorter. With so many heads no two scores are equal.
DEEPSEEK_V32: dict[str, Any] = DEEPSEEK | {
    "architectures": ["DeepseekV32ForCausalLM"],
    "model_type": "deepseek_v32",
    "index_n_heads": 16,
    "index_head_dim": 20,
    "index_topk": 9,
}
GLM_DSA: dict[str, Any] = DEEPSEEK_V32 | {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "indexer_types": ["full", "shared", "full"],
}


def deepseek_v32(directory: Path, *, fp8: bool | Literal["trunk", "mtp"] = False, seed: int = 0, **options: Any) -> Tiny:
    """`options` replace entries of DEEPSEEK_V32."""
    config = DEEPSEEK_V32 | options
    return numbered(directory, config, DeepseekV32Config, DeepseekV32ForCausalLM, DeepseekV32DecoderLayer, fp8, True, seed)


def glm_dsa(directory: Path, *, seed: int = 0, **options: Any) -> Tiny:
    """`options` replace entries of GLM_DSA."""
    config = GLM_DSA | options
    return numbered(directory, config, GlmMoeDsaConfig, GlmMoeDsaForCausalLM, GlmMoeDsaDecoderLayer, False, True, seed)
