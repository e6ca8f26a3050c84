"""Qwen2 and Qwen2.5, dense and with experts: a bias for queries, keys and values; some layers may have a
sliding window. A router's weights are a softmax over all experts; a shared expert has a gate
(https://arxiv.org/abs/2407.10671)."""

from __future__ import annotations

from mtpserve.core.arch.model import ModelArch, MoEArch
from mtpserve.models import gqa
from mtpserve.models.family import Family, gated, trunk_layers
from mtpserve.weights.checkpoint.hf_config import HFConfig
from mtpserve.weights.rules import Copy, Rule


def arch(config: HFConfig, mtp_layers: int) -> ModelArch:
    return gqa.arch(config, "qwen2", positions=32768, qkv_bias=True, trunk=gqa.windowed)


def moe_arch(config: HFConfig, mtp_layers: int) -> ModelArch:
    if config.get_bool("use_sliding_window", False) and not config.has("layer_types"):
        raise config.unsupported("use_sliding_window", "false, or true with layer_types")
    moe = experts(config, config.get_int("shared_expert_intermediate_size", 5632, at_least=1))
    return gqa.arch(
        config,
        "qwen2_moe",
        positions=32768,
        qkv_bias=config.get_bool("qkv_bias", True),
        trunk=gqa.windowed,
        moe=moe,
    )


def experts(config: HFConfig, shared: int = 0) -> MoEArch:
    """`shared`: size of an expert that all tokens go to, and which has a gate of its own."""
    number = config.get_int("num_experts", at_least=1)
    top_k = config.get_int("num_experts_per_tok", at_least=1)
    config.require(top_k <= number, "num_experts_per_tok", f"at most num_experts = {number}")
    layers, every = (
        config.get_int("num_hidden_layers", at_least=1),
        config.get_int("decoder_sparse_step", 1, at_least=1),
    )
    dense = config.raw("mlp_only_layers") or []
    is_valid = isinstance(dense, list) and all(type(layer) is int for layer in dense)
    config.require(is_valid, "mlp_only_layers", "a list of numbers of layers")
    return MoEArch(
        experts=number,
        top_k=top_k,
        size=config.get_int("moe_intermediate_size", at_least=1),
        shared=shared,
        dense=tuple(layer for layer in range(layers) if layer in dense or (layer + 1) % every),
        groups=1,
        top_groups=1,
        scale=1.0,
        renormalise=config.get_bool("norm_topk_prob", False),
        scores="softmax",
        router_bias=None,
        shared_gate=shared > 0,
    )


def moe_rules(arch: ModelArch) -> list[Rule]:
    names = [
        *gated(r"mlp\.shared_expert", "mlp.shared"),
        (r"mlp\.shared_expert_gate\.weight", "mlp.shared_gate.weight", Copy()),
    ]
    return gqa.trunk_rules(arch) + trunk_layers(arch, names)


QWEN2 = Family(arch, gqa.build, gqa.trunk_rules, tool_call_parser="hermes")
QWEN2_MOE = Family(moe_arch, gqa.build, moe_rules, tool_call_parser="hermes")
