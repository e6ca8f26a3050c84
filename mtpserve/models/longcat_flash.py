"""LongCat-Flash: two blocks of DeepSeek-V3's latent attention and two feed-forward blocks in each layer, and
experts beside the first feed-forward block (layers/shortcut), of which some compute nothing
(https://arxiv.org/abs/2509.01322). The MTP layer is dense, and has one attention block.

A layer of the checkpoint is two here: each has keys and values of its own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from mtpserve.core.arch.model import ModelArch, MoEArch
from mtpserve.layers.decoder import DecoderLayer, DecoderModel, Methods
from mtpserve.layers.kernels import Kernels
from mtpserve.layers.mixers.mla import MLA
from mtpserve.layers.mlp import MLP
from mtpserve.layers.moe import MoE
from mtpserve.layers.mtp_modules import decoder
from mtpserve.layers.shortcut import ShortcutEnd, ShortcutStart
from mtpserve.models import deepseek
from mtpserve.models.family import Family, Names, ends, gated, one_layer
from mtpserve.weights.checkpoint.hf_config import HFConfig
from mtpserve.weights.rules import Copy, Drop, Expert, Rule

# LongCat-Flash-Lite, LongCat-2.0 and others have other values: sparse or linear attention, embeddings of
# several tokens, routing in groups.
ONLY: dict[str, Any] = {
    "attention_method": "MLA", "zero_expert_type": "identity", "router_bias": False, "nextn_use_scmoe": False,
    "moe_group_size": 1, "linear_method": None, "ngram_vocab_size_ratio": None, "oe_vocab_size_ratio": None,
    "use_ngram_embedding": False, "index_topk": None,
}  # fmt: skip


def arch(config: HFConfig, mtp_layers: int) -> ModelArch:
    for name, supported in ONLY.items():
        if config.has(name) and config.raw(name) != supported:
            raise config.unsupported(name, "none" if supported is None else str(supported).lower())
    config.get_int("q_lora_rank", at_least=1)
    name = "num_layers" if config.has("num_layers") else "num_hidden_layers"
    layers = config.get_int(name, at_least=1)
    values = config.values | {"num_hidden_layers": 2 * layers, config.key("n_routed_experts"): None}
    dense = HFConfig(config.path, values, config.prefix)
    dense = dense.with_default("intermediate_size", config.raw("ffn_hidden_size"))
    base = deepseek.arch(dense.with_default("rms_norm_eps", 1e-5), mtp_layers, "longcat_flash")
    assert base.mla is not None and base.mla.q_rank is not None
    q_scale, latent_scale = (
        (base.hidden / rank) ** 0.5 if config.get_bool(f"mla_scale_{name}_lora", True) else 1.0
        for name, rank in (("q", base.mla.q_rank), ("kv", base.mla.kv_rank))
    )
    return replace(
        base,
        scale=base.scale * q_scale,
        mla=replace(base.mla, latent_scale=latent_scale),
        moe=routed(config, layers, mtp_layers),
    )


def routed(config: HFConfig, layers: int, mtp_layers: int) -> MoEArch:
    """`layers`: of the checkpoint's trunk."""
    number, zero = (
        config.get_int("n_routed_experts", at_least=1),
        config.get_int("zero_expert_num", 0, at_least=0),
    )
    top_k = config.get_int("moe_topk", at_least=1)
    config.require(
        top_k <= number + zero, "moe_topk", f"at most n_routed_experts + zero_expert_num = {number + zero}"
    )
    return MoEArch(
        experts=number,
        top_k=top_k,
        size=config.get_int("expert_ffn_hidden_size", at_least=1),
        shared=0,
        dense=(*range(1, 2 * layers, 2), *range(2 * layers, 2 * layers + mtp_layers)),
        groups=1,
        top_groups=1,
        scale=config.get_float("routed_scaling_factor", 1.0, above=0),
        renormalise=config.get_bool("norm_topk_prob", False),
        scores="softmax",
        zero_experts=zero,
    )


def build(
    arch: ModelArch, methods: Methods, dtype: torch.dtype, positions: int, kernels: Kernels
) -> DecoderModel:
    def block(layer: int) -> tuple[nn.Module, nn.Module]:
        method = methods.of(drafts=layer >= arch.num_layers)
        return MLA(arch, method, kernels), MLP(arch.hidden, arch.intermediate, method, kernels)

    def trunk_layer(layer: int) -> DecoderLayer:
        assert arch.moe is not None
        if layer in arch.moe.dense:
            return ShortcutEnd(arch, *block(layer), kernels)
        experts = MoE(arch.hidden, arch.moe, layer, methods.layers, kernels)
        return ShortcutStart(arch, *block(layer), experts, kernels)

    return decoder(arch, block, methods, dtype, positions, kernels, trunk_layer)


def experts(moe: MoEArch) -> Names:
    idle = moe.zero_experts  # transformers writes the first matrices of these, too
    return [
        (r"mlp\.router\.classifier\.weight", "shortcut.router.weight", Copy()),
        (r"mlp\.router\.e_score_correction_bias", "shortcut.router.bias", Copy()),
        (r"mlp\.experts\.(?P<expert>\d+)\.gate_proj\.weight", "shortcut.experts.gate_up", Expert(0, idle)),
        (r"mlp\.experts\.(?P<expert>\d+)\.up_proj\.weight", "shortcut.experts.gate_up", Expert(1, idle)),
        (r"mlp\.experts\.(?P<expert>\d+)\.down_proj\.weight", "shortcut.experts.down", Expert(0)),
    ]


def trunk_rules(arch: ModelArch) -> list[Rule]:
    assert arch.moe is not None
    rules = ends(arch)
    for layer in range(arch.num_layers):
        number, block = divmod(layer, 2)
        names = deepseek.attention_names(arch, rf"\.{block}") + gated(rf"mlps\.{block}", "mlp")
        rules += one_layer(
            f"model.layers.{number}.", f"layers.{layer}.", names + experts(arch.moe) * (not block)
        )
    return rules


def mtp_rules(arch: ModelArch, prefix: str) -> list[Rule]:
    inside = deepseek.attention_names(arch) + gated(r"transformer_layer\.mlp", "mlp")
    return [
        *one_layer(prefix + "layers.0.", "mtp_head.layer.", inside),
        *one_layer(
            prefix + "layers.0.",
            "mtp_head.fusion.",
            [
                (r"enorm\.m\.weight", "embedding_norm.weight", Copy()),
                (r"hnorm\.m\.weight", "hidden_norm.weight", Copy()),
                (r"eh_proj\.weight", "project.weight", Copy()),
            ],
        ),
        *one_layer(
            prefix,
            "mtp_head.",
            [
                (r"norm\.weight", "norm.weight", Copy()),
                (r"embed_tokens\.weight", "", Drop("a copy of the trunk's embedding")),
            ],
        ),
    ]


LONGCAT_FLASH = Family(
    arch, build, trunk_rules, mtp_rules, uncounted=1, tool_call_parser="longcat", reasoning_parser="longcat"
)
