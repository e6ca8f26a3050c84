"""Qwen3, dense and with experts: each head of queries and keys is normed. A router's weights are a softmax over all experts, renormalised
over the chosen ones where the config says so (https://arxiv.org/abs/2505.09388)."""

from __future__ import annotations

from mtpserve.core.arch import ModelArch, MoEArch
from mtpserve.models import gqa
from mtpserve.models.family import Family
from mtpserve.weights.hf import HFConfig


def arch(config: HFConfig, mtp_layers: int) -> ModelArch:
    return common(config, None)


def moe_arch(config: HFConfig, mtp_layers: int) -> ModelArch:
    return common(config, experts(config))


def common(config: HFConfig, moe: MoEArch | None) -> ModelArch:
    bias = config.get_bool("attention_bias", False)
    return gqa.arch(config, "qwen3", positions=32768, qkv_bias=bias, out_bias=bias, head_norms=True, windows=True, moe=moe)


def experts(config: HFConfig) -> MoEArch:
    number = config.get_int("num_experts", at_least=1)
    top_k = config.get_int("num_experts_per_tok", at_least=1)
    config.require(top_k <= number, "num_experts_per_tok", f"at most num_experts = {number}")
    layers, every = config.get_int("num_hidden_layers", at_least=1), config.get_int("decoder_sparse_step", 1, at_least=1)
    dense = config.raw("mlp_only_layers") or []
    known = isinstance(dense, list) and all(type(layer) is int for layer in dense)
    config.require(known, "mlp_only_layers", "a list of numbers of layers")
    return MoEArch(
        experts=number,
        top_k=top_k,
        size=config.get_int("moe_intermediate_size", at_least=1),
        shared=0,
        dense=tuple(layer for layer in range(layers) if layer in dense or (layer + 1) % every),
        groups=1,
        top_groups=1,
        scale=1.0,
        renormalise=config.get_bool("norm_topk_prob", False),
        scores="softmax",
    )


QWEN3 = Family(arch, gqa.build, gqa.trunk_rules)
QWEN3_MOE = Family(moe_arch, gqa.build, gqa.trunk_rules)
