"""Qwen3, dense and with experts: each head of queries and keys is normed. A router's weights are a softmax
over all experts, renormalised over the chosen ones where the config says so
(https://arxiv.org/abs/2505.09388)."""

from __future__ import annotations

from mtpserve.core.arch.model import ModelArch, MoEArch
from mtpserve.models import gqa, qwen2
from mtpserve.models.family import Family
from mtpserve.weights.checkpoint.hf_config import HFConfig


def arch(config: HFConfig, mtp_layers: int) -> ModelArch:
    return common(config, None)


def moe_arch(config: HFConfig, mtp_layers: int) -> ModelArch:
    return common(config, qwen2.experts(config))


def common(config: HFConfig, moe: MoEArch | None) -> ModelArch:
    bias = config.get_bool("attention_bias", False)
    return gqa.arch(
        config,
        "qwen3",
        positions=32768,
        qkv_bias=bias,
        out_bias=bias,
        head_norms=True,
        trunk=gqa.windowed,
        moe=moe,
    )


QWEN3 = Family(arch, gqa.build, gqa.trunk_rules, tool_call_parser="hermes", reasoning_parser="qwen3")
QWEN3_MOE = Family(moe_arch, gqa.build, gqa.trunk_rules, tool_call_parser="hermes", reasoning_parser="qwen3")
