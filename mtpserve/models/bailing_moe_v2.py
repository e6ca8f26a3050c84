"""Ling 2.0 and Ring 2.0 (Bailing MoE V2): grouped-query attention whose heads are normed and of each head the
first half rotated; experts and MTP layer as DeepSeek-V3's, in other names (https://arxiv.org/abs/2510.22115).

Queries, keys and values are one matrix in the checkpoint. Ling and Ring 2.5 and later are of other
architectures, most of whose layers have linear attention.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from mtpserve.core.arch.model import ModelArch, MoEArch, MTPArch
from mtpserve.models import deepseek, gqa
from mtpserve.models.family import Family, Names, ends, experts, gated, trunk_layers
from mtpserve.weights.checkpoint.hf_config import HFConfig
from mtpserve.weights.rules import Copy, Rule

# What nobody publishes otherwise.
ONLY: dict[str, Any] = {
    "use_bias": False, "norm_head": False, "use_sliding_window": False, "score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}  # fmt: skip


def arch(config: HFConfig, mtp_layers: int) -> ModelArch:
    for name, supported in ONLY.items():
        if config.has(name) and config.raw(name) != supported:
            raise config.unsupported(name, str(supported).lower())
    mtp = MTPArch(mtp_layers, "embedding-hidden", hidden_in="post", recycle="post") if mtp_layers else None
    return gqa.arch(
        config,
        "bailing_moe_v2",
        positions=16384,
        qkv_bias=config.get_bool("use_qkv_bias", False),
        head_norms=config.get_bool("use_qk_norm", False),
        moe=routed(config),
        mtp=mtp,
    )


def routed(config: HFConfig) -> MoEArch | None:
    moe = deepseek.experts(config)
    if moe is None:
        return None
    size = config.get_int("moe_shared_expert_intermediate_size", moe.size, at_least=1)
    return replace(moe, shared=size * config.get_int("num_shared_experts", 0, at_least=0))


def layer_names(arch: ModelArch) -> Names:
    names: Names = [
        (r"input_layernorm\.weight", "attention_norm.weight", Copy()),
        (r"post_attention_layernorm\.weight", "mlp_norm.weight", Copy()),
        (r"attention\.query_key_value\.weight", "attention.qkv.weight", Copy()),
        (r"attention\.dense\.weight", "attention.out.weight", Copy()),
        *gated("mlp", "mlp"),
    ]
    if arch.qkv_bias:
        names.append((r"attention\.query_key_value\.bias", "attention.qkv.bias", Copy()))
    if arch.head_norms:
        names += [
            (rf"attention\.{name}_layernorm\.weight", f"attention.{name[0]}_norm.weight", Copy())
            for name in ("query", "key")
        ]
    if arch.moe is None:
        return names
    bias = r"mlp\.gate\.expert_bias"
    return [*names, *experts(arch.moe, correction=False), (bias, "mlp.router.bias", Copy())]


def trunk_rules(arch: ModelArch) -> list[Rule]:
    embed, *rest = ends(arch)
    return [
        replace(embed, pattern=r"model\.word_embeddings\.weight"),
        *rest,
        *trunk_layers(arch, layer_names(arch)),
    ]


def mtp_rules(arch: ModelArch, prefix: str) -> list[Rule]:
    return deepseek.mtp_layer(prefix, layer_names(arch), norm="final_layernorm")


BAILING_MOE_V2 = Family(
    arch, gqa.build, trunk_rules, mtp_rules, tool_call_parser="hermes", reasoning_parser="qwen3"
)
