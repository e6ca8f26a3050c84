"""Architectures, by their names in config.json, to family files."""

from __future__ import annotations

from mtpserve.core.errors import UnsupportedModel
from mtpserve.core.registry import Registry
from mtpserve.models.family import Family
from mtpserve.weights.checkpoint.hf_config import HFConfig

FAMILIES: Registry[Family] = Registry(
    "architecture",
    {
        "BailingMoeV2ForCausalLM": "mtpserve.models.bailing_moe_v2:BAILING_MOE_V2",
        "DeepseekV3ForCausalLM": "mtpserve.models.deepseek:DEEPSEEK",
        "DeepseekV3ForCausalLMNextN": "mtpserve.models.deepseek:DEEPSEEK",
        "DeepseekV32ForCausalLM": "mtpserve.models.deepseek_v32:DEEPSEEK_V32",
        "DeepseekV4ForCausalLM": "mtpserve.models.deepseek_v4:DEEPSEEK_V4",
        "Ernie4_5_MoeForCausalLM": "mtpserve.models.ernie4_5_moe:ERNIE4_5_MOE",
        "Gemma4ForCausalLM": "mtpserve.models.gemma4:GEMMA4",
        "Gemma4ForConditionalGeneration": "mtpserve.models.gemma4:GEMMA4",
        "Gemma4UnifiedForCausalLM": "mtpserve.models.gemma4:GEMMA4",
        "Gemma4UnifiedForConditionalGeneration": "mtpserve.models.gemma4:GEMMA4",
        "Glm4MoeForCausalLM": "mtpserve.models.glm4_moe:GLM4_MOE",
        "Glm4MoeLiteForCausalLM": "mtpserve.models.glm4_moe:GLM4_MOE_LITE",
        "GlmMoeDsaForCausalLM": "mtpserve.models.glm_moe_dsa:GLM_MOE_DSA",
        "GptOssForCausalLM": "mtpserve.models.gpt_oss:GPT_OSS",
        "LlamaForCausalLM": "mtpserve.models.llama:LLAMA",
        "LongcatCausalLM": "mtpserve.models.longcat_flash:LONGCAT_FLASH",
        "LongcatFlashForCausalLM": "mtpserve.models.longcat_flash:LONGCAT_FLASH",
        "MiMoForCausalLM": "mtpserve.models.mimo:MIMO",
        "MiMoV2ForCausalLM": "mtpserve.models.mimo_v2:MIMO_V2",
        "MiMoV2FlashForCausalLM": "mtpserve.models.mimo_v2:MIMO_V2",
        "MiniMaxM2ForCausalLM": "mtpserve.models.minimax_m2:MINIMAX_M2",
        "MistralForCausalLM": "mtpserve.models.mistral:MISTRAL",
        "NemotronHForCausalLM": "mtpserve.models.nemotron_h:NEMOTRON_H",
        "Qwen2ForCausalLM": "mtpserve.models.qwen2:QWEN2",
        "Qwen2MoeForCausalLM": "mtpserve.models.qwen2:QWEN2_MOE",
        "Qwen3ForCausalLM": "mtpserve.models.qwen3:QWEN3",
        "Qwen3MoeForCausalLM": "mtpserve.models.qwen3:QWEN3_MOE",
        "Qwen3NextForCausalLM": "mtpserve.models.qwen3_next:QWEN3_NEXT",
        "Qwen3_5ForCausalLM": "mtpserve.models.qwen3_next:QWEN3_5",
        "Qwen3_5ForConditionalGeneration": "mtpserve.models.qwen3_next:QWEN3_5",
        "Qwen3_5MoeForCausalLM": "mtpserve.models.qwen3_next:QWEN3_5_MOE",
        "Qwen3_5MoeForConditionalGeneration": "mtpserve.models.qwen3_next:QWEN3_5_MOE",
        "Step3p5ForCausalLM": "mtpserve.models.step3p5:STEP3P5",
        "Step3p7ForConditionalGeneration": "mtpserve.models.step3p5:STEP3P5",
    },
)


def family_of(config: HFConfig) -> Family:
    architectures = config.raw("architectures")
    name = architectures[0] if isinstance(architectures, list) and architectures else architectures
    if name not in FAMILIES.entries:
        raise (
            config.unsupported("architectures", ", ".join(FAMILIES.names()))
            if architectures
            else UnsupportedModel(
                f"{config.path}: architectures is missing; supported: {', '.join(FAMILIES.names())}"
            )
        )
    return FAMILIES.get(name)
