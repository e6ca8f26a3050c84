"""Qwen3-Next, and Qwen3.5 to 3.8, dense and with experts: most layers are gated delta-nets, every fourth
attends, with a gate for each head. Norms multiply by one more than their weight. The MTP layer always attends
(https://qwen.ai/blog?id=qwen3-next).

If a checkpoint sees pictures, its text model is loaded.
"""

from __future__ import annotations

import re
from dataclasses import replace

import torch
from torch import nn

from mtpserve.core.arch.model import LayerKind, ModelArch, MoEArch, MTPArch, Recurrent
from mtpserve.layers.decoder import DecoderModel, Methods
from mtpserve.layers.kernels import Kernels
from mtpserve.layers.mixers.attention import GQA
from mtpserve.layers.mixers.delta_net import GatedDeltaNet
from mtpserve.layers.mtp_modules import decoder
from mtpserve.models import gqa, qwen2
from mtpserve.models.family import Family, Names, dropped, feed_forward, gated, one_layer, rule_of
from mtpserve.weights.checkpoint.hf_config import HFConfig
from mtpserve.weights.rules import Copy, Drop, Expert, Rule, Stack

PLUS_ONE = Copy(plus=1.0)
LINEAR, FULL = "linear_attention", "full_attention"


def next_arch(config: HFConfig, mtp_layers: int) -> ModelArch:
    moe = qwen2.experts(config, config.get_int("shared_expert_intermediate_size", 512, at_least=0))
    return common(
        config,
        mtp_layers,
        "qwen3_next",
        replace(moe, renormalise=config.get_bool("norm_topk_prob", True)),
        grouped=True,
    )


def dense_arch(config: HFConfig, mtp_layers: int) -> ModelArch:
    return common(config, mtp_layers, "qwen3_5", None)


def moe_arch(config: HFConfig, mtp_layers: int) -> ModelArch:
    moe = qwen2.experts(config, config.get_int("shared_expert_intermediate_size", 512, at_least=0))
    return common(config, mtp_layers, "qwen3_5_moe", replace(moe, renormalise=True))


def common(
    config: HFConfig, mtp_layers: int, family: str, moe: MoEArch | None, grouped: bool = False
) -> ModelArch:
    """`grouped`: as in Recurrent."""
    config = config.with_default("intermediate_size", moe.size) if moe is not None else config
    bias = config.get_bool("attention_bias", False)
    mtp = MTPArch(mtp_layers, "embedding-hidden", hidden_in="post", recycle="post") if mtp_layers else None
    config = config.with_default("head_dim", 256)
    base = gqa.arch(
        config, family, positions=32768, rotated=0.25, qkv_bias=bias, out_bias=bias, head_norms=True, moe=moe,
        mtp=mtp
    )  # fmt: skip
    recurrent = Recurrent(
        key_heads=config.get_int("linear_num_key_heads", 16, at_least=1),
        value_heads=config.get_int("linear_num_value_heads", 32, at_least=1),
        key_dim=config.get_int("linear_key_head_dim", 128, at_least=1),
        value_dim=config.get_int("linear_value_head_dim", 128, at_least=1),
        taps=config.get_int("linear_conv_kernel_dim", 4, at_least=2),
        grouped=grouped,
    )
    heads = recurrent.key_heads
    config.require(
        recurrent.value_heads % heads == 0,
        "linear_num_value_heads",
        f"a multiple of linear_num_key_heads = {heads}",
    )
    return replace(base, layers=kinds(config, base.layers, recurrent), out_gate=True)


def kinds(config: HFConfig, attending: tuple[LayerKind, ...], recurrent: Recurrent) -> tuple[LayerKind, ...]:
    """Returns the kinds that `layer_types` names; without it every `full_attention_interval`-th layer
    attends. `attending`: as many as there are layers, MTP layers among them."""
    layers = config.get_int("num_hidden_layers", at_least=1)
    every = config.get_int("full_attention_interval", 4, at_least=1)
    types = config.raw("layer_types") or [LINEAR if (i + 1) % every else FULL for i in range(layers)]
    is_valid = isinstance(types, list) and len(types) == layers and set(types) <= {LINEAR, FULL}
    config.require(
        is_valid, "layer_types", f"a list of num_hidden_layers = {layers} names, each one of {LINEAR}, {FULL}"
    )
    config.require(
        FULL in types,
        "layer_types",
        f"such that one of them is {FULL}: pages are those of layers that attend",
    )
    trunk = (kind if name == FULL else recurrent for name, kind in zip(types, attending, strict=False))
    return *trunk, *attending[layers:]


def build(
    arch: ModelArch, methods: Methods, dtype: torch.dtype, positions: int, kernels: Kernels
) -> DecoderModel:
    def block(layer: int) -> tuple[nn.Module, nn.Module]:
        method, kind = methods.of(drafts=layer >= arch.num_layers), arch.layers[layer]
        attention = (
            GatedDeltaNet(arch, kind, method, kernels)
            if isinstance(kind, Recurrent)
            else GQA(arch, arch.attention(layer), method, kernels)
        )
        return attention, feed_forward(arch, layer, method, kernels)

    return decoder(arch, block, methods, dtype, positions, kernels)


def layer_names(arch: ModelArch, kind: LayerKind) -> Names:
    names: Names = [
        (r"input_layernorm\.weight", "attention_norm.weight", PLUS_ONE),
        (r"post_attention_layernorm\.weight", "mlp_norm.weight", PLUS_ONE),
        *(recurrent_names(kind) if isinstance(kind, Recurrent) else attention_names(arch)),
        *gated("mlp", "mlp"),
    ]
    return names + (expert_names() if arch.moe is not None else [])


def attention_names(arch: ModelArch) -> Names:
    return [
        (pattern, target, PLUS_ONE if re.search(r"[qk]_norm", target) else how)
        for pattern, target, how in gqa.layer_names(arch)
        if pattern.startswith("self_attn")
    ]


def recurrent_names(kind: Recurrent) -> Names:
    names: Names = [
        (r"linear_attn\.conv1d\.weight", "attention.conv", Copy()),
        (r"linear_attn\.A_log", "attention.decay", Copy()),
        (r"linear_attn\.dt_bias", "attention.decay_bias", Copy()),
        (r"linear_attn\.norm\.weight", "attention.norm.weight", Copy()),
        (r"linear_attn\.out_proj\.weight", "attention.out.weight", Copy()),
    ]
    if kind.grouped:
        projections = [("in_proj_qkvz", "inputs", 0), ("in_proj_ba", "gates", 0)]
    else:
        projections = [
            ("in_proj_qkv", "inputs", 0),
            ("in_proj_z", "inputs", 1),
            ("in_proj_b", "gates", 0),
            ("in_proj_a", "gates", 1),
        ]
    return [
        *names,
        *(
            (rf"linear_attn\.{name}\.weight", f"attention.{target}.weight", Stack(part))
            for name, target, part in projections
        ),
    ]


def expert_names() -> Names:
    """Each expert's matrices, or all experts' in one tensor."""
    return [
        (r"mlp\.gate\.weight", "mlp.router.weight", Copy()),
        (r"mlp\.experts\.(?P<expert>\d+)\.gate_proj\.weight", "mlp.experts.gate_up", Expert(0)),
        (r"mlp\.experts\.(?P<expert>\d+)\.up_proj\.weight", "mlp.experts.gate_up", Expert(1)),
        (r"mlp\.experts\.(?P<expert>\d+)\.down_proj\.weight", "mlp.experts.down", Expert(0)),
        (r"mlp\.experts\.gate_up_proj", "mlp.experts.gate_up", Copy()),
        (r"mlp\.experts\.down_proj", "mlp.experts.down", Copy()),
        *gated(r"mlp\.shared_expert", "mlp.shared"),
        (r"mlp\.shared_expert_gate\.weight", "mlp.shared_gate.weight", Copy()),
    ]


def trunk_rules(arch: ModelArch) -> list[Rule]:
    start = r"model\.(?:language_model\.)?"
    head = Drop("tied to the embedding") if arch.tied_head else Copy()
    rules = [
        Rule(start + r"embed_tokens\.weight", "embed.weight", Copy()),
        Rule(start + r"norm\.weight", "norm.weight", PLUS_ONE),
        rule_of(r"lm_head\.weight", "head.weight", head),
        dropped("model.visual.", "what sees pictures"),
    ]
    for number, kind in enumerate(arch.layers[: arch.num_layers]):
        rules += [
            rule_of(rf"{start}layers\.{number}\.{name}", f"layers.{number}.{target}", how)
            for name, target, how in layer_names(arch, kind)
        ]
    return rules


def mtp_rules(arch: ModelArch, prefix: str) -> list[Rule]:
    return one_layer(f"{prefix}layers.0.", "mtp_head.layer.", layer_names(arch, arch.layers[-1])) + one_layer(
        prefix,
        "mtp_head.",
        [
            (r"pre_fc_norm_embedding\.weight", "fusion.embedding_norm.weight", PLUS_ONE),
            (r"pre_fc_norm_hidden\.weight", "fusion.hidden_norm.weight", PLUS_ONE),
            (r"fc\.weight", "fusion.project.weight", Copy()),
            (r"norm\.weight", "norm.weight", PLUS_ONE),
        ],
    )


QWEN3_NEXT = Family(
    next_arch, build, trunk_rules, mtp_rules, floor=0.4, uncounted=1, tool_call_parser="hermes",
    reasoning_parser="qwen3"
)  # fmt: skip
QWEN3_5 = Family(
    dense_arch, build, trunk_rules, mtp_rules, floor=0.4, tool_call_parser="qwen3_coder",
    reasoning_parser="qwen3"
)  # fmt: skip
QWEN3_5_MOE = replace(QWEN3_5, arch=moe_arch)
