"""GLM-4.5, 4.6 and 4.7 with experts: grouped-query attention, of each head the first half rotated; experts
and MTP layer as DeepSeek-V3's, in the same names (https://arxiv.org/abs/2508.06471). GLM-4.7-Flash ("lite")
has DeepSeek-V3's latent attention, too."""

from __future__ import annotations

from mtpserve.core.arch.model import ModelArch, MTPArch
from mtpserve.models import deepseek, gqa
from mtpserve.models.family import Family
from mtpserve.weights.checkpoint.hf_config import HFConfig
from mtpserve.weights.rules import Rule


def arch(config: HFConfig, mtp_layers: int) -> ModelArch:
    mtp = MTPArch(mtp_layers, "embedding-hidden", hidden_in="post", recycle="post") if mtp_layers else None
    bias, norms = config.get_bool("attention_bias", False), config.get_bool("use_qk_norm", False)
    moe = deepseek.experts(config, dense=1)
    return gqa.arch(
        config,
        "glm4_moe",
        positions=131072,
        eps=1e-5,
        rotated=0.5,
        qkv_bias=bias,
        head_norms=norms,
        moe=moe,
        mtp=mtp,
    )


def mtp_rules(arch: ModelArch, prefix: str) -> list[Rule]:
    return deepseek.mtp_layer(prefix, gqa.layer_names(arch))


def lite_arch(config: HFConfig, mtp_layers: int) -> ModelArch:
    return deepseek.arch(config, mtp_layers, "glm4_moe_lite", dense=1)


GLM4_MOE = Family(
    arch, gqa.build, gqa.trunk_rules, mtp_rules, tool_call_parser="glm45", reasoning_parser="glm45"
)
GLM4_MOE_LITE = Family(
    lite_arch,
    deepseek.build,
    deepseek.trunk_rules,
    deepseek.mtp_rules,
    tool_call_parser="glm47",
    reasoning_parser="glm45",
)
