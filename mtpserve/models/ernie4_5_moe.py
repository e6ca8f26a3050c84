"""Ernie 4.5 with experts: interleaved rotation; a router's weights are a softmax over all experts,
renormalised over those that it has chosen with a correction; the MTP layer is dense
(https://ernie.baidu.com/blog/publication/ERNIE_Technical_Report.pdf).

In Baidu's training code the MTP layer gets the trunk's hidden state from before the final norm, and its
output goes through the trunk's final norm to the head; in further steps it gets its own raw output.
"""

from __future__ import annotations

from mtpserve.core.arch.model import ModelArch, MoEArch, MTPArch
from mtpserve.models import gqa
from mtpserve.models.family import Family, Names, ends, experts, gated, one_layer, trunk_layers
from mtpserve.weights.checkpoint.hf_config import HFConfig
from mtpserve.weights.rules import Arranged, Copy, Rule


def arch(config: HFConfig, mtp_layers: int) -> ModelArch:
    if config.get_bool("use_bias", False):
        raise config.unsupported("use_bias", "false")
    mtp = (
        MTPArch(mtp_layers, "embedding-hidden", hidden_in="pre", recycle="pre", norm="trunk")
        if mtp_layers
        else None
    )
    return gqa.arch(
        config, "ernie4_5_moe", positions=131072, eps=1e-5, interleaved=True, moe=routed(config), mtp=mtp
    )


def routed(config: HFConfig) -> MoEArch:
    number, top_k = config.get_int("moe_num_experts", 64, at_least=1), config.get_int("moe_k", 6, at_least=1)
    config.require(top_k <= number, "moe_k", f"at most moe_num_experts = {number}")
    layers, every = (
        config.get_int("num_hidden_layers", at_least=1),
        config.get_int("moe_layer_interval", 1, at_least=1),
    )
    first, last = (
        config.get_int("moe_layer_start_index", 1, at_least=0),
        config.get_int("moe_layer_end_index", -1, at_least=-1),
    )
    sparse = range(first, layers if last == -1 else last + 1)
    size = config.get_int("moe_intermediate_size", at_least=1)
    return MoEArch(
        experts=number,
        top_k=top_k,
        size=size,
        shared=size * config.get_int("moe_num_shared_experts", 2, at_least=0),
        dense=(*(layer for layer in range(layers) if layer not in sparse or (layer + 1) % every), layers),
        groups=1,
        top_groups=1,
        scale=1.0,
        renormalise=True,
        scores="softmax",
    )


def layer_names(arch: ModelArch) -> Names:
    assert arch.moe is not None
    bias: Names = [(r"mlp\.moe_statics\.e_score_correction_bias", "mlp.router.bias", Arranged(wrapped=True))]
    return gqa.attention_names(arch) + gated("mlp", "mlp") + experts(arch.moe, correction=False) + bias


def trunk_rules(arch: ModelArch) -> list[Rule]:
    return ends(arch) + trunk_layers(arch, layer_names(arch))


def mtp_rules(arch: ModelArch, prefix: str) -> list[Rule]:
    return one_layer(
        prefix + "block.0.", "mtp_head.layer.", gqa.attention_names(arch) + gated("mlp", "mlp")
    ) + one_layer(
        prefix,
        "mtp_head.fusion.",
        [
            (r"emb_norm\.0\.weight", "embedding_norm.weight", Copy()),
            (r"hidden_norm\.0\.weight", "hidden_norm.weight", Copy()),
            (r"linear_proj\.0\.weight", "project.weight", Copy()),
        ],
    )


ERNIE4_5_MOE = Family(
    arch, gqa.build, trunk_rules, mtp_rules, tool_call_parser="ernie45", reasoning_parser="ernie45"
)
