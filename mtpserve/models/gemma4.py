"""Gemma 4's dense text models, as transformers' model defines them: blocks with norms before and after,
queries, keys and values that are normed, and layers with a window between layers that see all, whose heads
are wider and turn otherwise. The last layers of the small models read what earlier ones have stored, and each
layer gets numbers of the token by itself. Logits are capped.

If a checkpoint sees pictures or hears, its text model is loaded. Experts (26B-A4B) are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import nn

from mtpserve.core.arch.model import Attention, KVLayout, KVReader, LayerKind, ModelArch
from mtpserve.core.arch.rope import PartialRopeArch, RopeArch
from mtpserve.core.arch.sandwich import SandwichArch
from mtpserve.core.protocols.linear import LinearMethod
from mtpserve.core.protocols.parallel import ALONE, Ranks
from mtpserve.layers.decoder import DecoderModel, Methods
from mtpserve.layers.kernels import Kernels
from mtpserve.layers.mixers.normed_values import NormedValueGQA, ReaderGQA
from mtpserve.layers.mlp import MLP
from mtpserve.layers.rope import Rope
from mtpserve.layers.sandwich.sandwich import SandwichLayer
from mtpserve.layers.sandwich.token_inputs import TokenInputs, TokenRope
from mtpserve.models import gqa
from mtpserve.models.family import Family, Names, gated, rule_of
from mtpserve.weights.checkpoint.hf_config import HFConfig
from mtpserve.weights.rules import Copy, Drop, Rule, Stack

THETAS = {gqa.SLIDING: 10000.0, gqa.FULL: 1000000.0}
MODEL = r"(?:model\.)?(?:language_model\.)?(?:model\.)?"  # alone, or inside of another
OTHERS = r"(?:model\.)?(?:vision_tower|vision_embedder|audio_tower|embed_vision|embed_audio)\..+"


def arch(config: HFConfig, mtp_layers: int) -> ModelArch:
    sandwich = refuse(config)
    base = gqa.arch(
        renamed(config),
        "gemma4",
        positions=262144 if unified(config) else 131072,
        qkv_bias=config.get_bool("attention_bias", False),
        out_bias=config.get_bool("attention_bias", False),
        head_norms=True,
        trunk=kinds,
    )
    wide = max(kind.kv.key_dim for kind in base.layers if isinstance(kind, Attention) and kind.window is None)
    return replace(
        base,
        rope=rope(config, gqa.FULL, wide),
        window_rope=rope(config, gqa.SLIDING, base.head_dim),
        scale=1.0,
        gate="gelu_tanh",
        embed_scale=base.hidden**0.5,
        logit_cap=config.get_float("final_logit_softcapping", None, above=0),
        tied_head=config.get_bool("tie_word_embeddings", True),
        sandwich=replace(sandwich, token_vocab=sandwich.token_vocab or base.vocab),
    )


def refuse(config: HFConfig) -> SandwichArch:
    """Returns what the layers have beside their blocks. Raises UnsupportedModel for what is not computed."""
    if config.get_bool("enable_moe_block", False):
        raise config.unsupported("enable_moe_block", "false: the dense Gemma 4 models")
    if config.raw("use_bidirectional_attention") == "all":
        raise config.unsupported("use_bidirectional_attention", '"vision" or null')
    config.get_str("hidden_activation", "gelu_pytorch_tanh", one_of=("gelu_pytorch_tanh",))
    return SandwichArch(
        tied_values=config.get_bool("attention_k_eq_v", False),
        wide_readers=config.get_bool("use_double_wide_mlp", False),
        token_dim=config.get_int("hidden_size_per_layer_input", 0 if unified(config) else 256, at_least=0),
        token_vocab=config.get_int("vocab_size_per_layer_input", 0, at_least=0),
    )


def unified(config: HFConfig) -> bool:
    """True for the 12B model's form, whose config has other defaults."""
    return str(config.raw("model_type")).startswith("gemma4_unified")


def renamed(config: HFConfig) -> HFConfig:
    """The keys that this family calls by another name, or has by default. Its rotations are read apart."""
    values = {"hidden_act": "silu", "rope_parameters": {}}  # the activation is checked in `refuse`
    return HFConfig(config.path, config.values | values, config.prefix).with_default("head_dim", 256)


def rope(config: HFConfig, layers: str, dim: int) -> RopeArch:
    """`layers`: the kind whose rotation it is; `dim`: of its heads."""
    section = config.section("rope_parameters").section(layers)
    default = "default" if layers == gqa.SLIDING else "proportional"
    kind = section.get_str("rope_type", default, one_of=("default", "proportional"))
    theta = section.get_float("rope_theta", THETAS[layers], above=0)
    if kind == "default":
        return RopeArch(dim, theta, interleaved=False)
    part = section.get_float("partial_rotary_factor", 1.0 if section.values else 0.25, above=0)
    section.require(part <= 1, "partial_rotary_factor", "at most 1")
    turning = 2 * int(part * dim // 2)
    factor = section.get_float("factor", 1.0, above=0)
    return RopeArch(dim, theta, interleaved=False, scaling=PartialRopeArch(turning, factor))


def kinds(config: HFConfig, kv: KVLayout) -> Sequence[LayerKind]:
    """Returns the layers' kinds; `kv`: of those with a window. By default every sixth layer sees all."""
    layers = config.get_int("num_hidden_layers", at_least=1)
    types = gqa.layer_types(config) or [gqa.SLIDING if (i + 1) % 6 else gqa.FULL for i in range(layers)]
    types[-1] = gqa.FULL  # as in transformers
    window = config.get_int("sliding_window", 1024 if unified(config) else 512, at_least=1)
    storing = [
        Attention(layout(config, kv, number, name), window if name == gqa.SLIDING else None)
        for number, name in enumerate(types)
    ]
    readers = config.get_int("num_kv_shared_layers", 0, at_least=0)
    first = layers - readers
    stored = set(types[:first])
    config.require(
        readers < layers and (not readers or stored == set(types)),
        "num_kv_shared_layers",
        f"such that the other layers, of {layers}, have all kinds that layer_types names",
    )
    sources = {name: first - 1 - types[:first][::-1].index(name) for name in stored}
    return [
        KVReader(storing[sources[name]], sources[name]) if i >= first else storing[i]
        for i, name in enumerate(types)
    ]


def layout(config: HFConfig, kv: KVLayout, number: int, name: str) -> KVLayout:
    """The keys and values of a layer: those that see all have other heads, by keys of their own in published
    files, or in `per_layer_config` where transformers has written them."""
    heads, dim = kv.heads, kv.key_dim
    if config.has("per_layer_config"):
        section = config.section("per_layer_config").section(str(number))
        heads = section.get_int("num_key_value_heads", heads, at_least=1)
        dim = section.get_int("head_dim", dim, at_least=2)
    elif name == gqa.FULL:
        dim = config.get_int("global_head_dim", 512, at_least=2)
        if config.get_bool("attention_k_eq_v", False):
            heads = config.get_int("num_global_key_value_heads", heads, at_least=1)
    query_heads = config.get_int("num_attention_heads", at_least=1)
    config.require(query_heads % heads == 0, "num_attention_heads", f"a multiple of its {heads} key heads")
    return KVLayout("gqa", heads, dim, dim)


def build(
    arch: ModelArch, methods: Methods, dtype: torch.dtype, positions: int, kernels: Kernels
) -> DecoderModel:
    assert arch.sandwich is not None
    with_tokens = methods.layers if arch.sandwich.token_dim else None

    def layer(number: int) -> nn.Module:
        return decoder_layer(arch, number, methods.layers, kernels, with_tokens is not None)

    model = DecoderModel(arch, layer, methods, dtype, positions, kernels)
    if with_tokens is not None:
        model.rope = TokenRope(cast(Rope, model.rope), TokenInputs(arch, model.embed, with_tokens, kernels))
    return model


def decoder_layer(
    arch: ModelArch, number: int, method: LinearMethod, kernels: Kernels, with_tokens: bool,
    sources: Ranks = ALONE
) -> SandwichLayer:  # fmt: skip
    """`sources`: the ranks that have the keys which a layer reads that is whole on each of them."""
    kind, sandwich = arch.layers[number], arch.sandwich
    assert sandwich is not None
    attention: nn.Module
    if isinstance(kind, KVReader):
        attention = ReaderGQA(arch, kind, method, kernels, sources)
    else:
        attending = arch.attention(number)
        tied = sandwich.tied_values and attending.window is None
        attention = NormedValueGQA(arch, attending, method, kernels, tied)
    width = 2 if sandwich.wide_readers and isinstance(kind, KVReader) else 1
    mlp = MLP(arch.hidden, width * arch.intermediate, method, kernels, arch.gate)
    return SandwichLayer(arch, number, attention, mlp, kernels, method if with_tokens else None)


LAYER: Names = [
    (r"input_layernorm\.weight", "attention_norm.weight", Copy()),
    (r"post_attention_layernorm\.weight", "after_attention.weight", Copy()),
    (r"pre_feedforward_layernorm\.weight", "mlp_norm.weight", Copy()),
    (r"post_feedforward_layernorm\.weight", "after_mlp.weight", Copy()),
    (r"layer_scalar", "scale", Copy()),
    (r"self_attn\.q_norm\.weight", "attention.q_norm.weight", Copy()),
    (r"self_attn\.o_proj\.(?P<part>weight|bias)", "attention.out.{part}", Copy()),
    *gated("mlp", "mlp"),
]
STORING: Names = [
    (r"self_attn\.k_norm\.weight", "attention.k_norm.weight", Copy()),
    *(
        (rf"self_attn\.{letter}_proj\.(?P<part>weight|bias)", "attention.qkv.{part}", Stack(number))
        for number, letter in enumerate("qkv")
    ),
]
READING: Names = [
    (r"self_attn\.q_proj\.(?P<part>weight|bias)", "attention.q.{part}", Copy()),
    (r"self_attn\.(?:[kv]_proj|[kv]_norm)\..+", "", Drop("of a layer that reads another one's keys")),
]
TOKENS: Names = [
    (r"per_layer_input_gate\.weight", "token.gate.weight", Copy()),
    (r"per_layer_projection\.weight", "token.out.weight", Copy()),
    (r"post_per_layer_input_norm\.weight", "token.norm.weight", Copy()),
]
TABLES: Names = [
    (r"embed_tokens_per_layer\.weight", "rope.inputs.table.weight", Copy()),
    (r"per_layer_model_projection\.weight", "rope.inputs.project.weight", Copy()),
    (r"per_layer_projection_norm\.weight", "rope.inputs.norm.weight", Copy()),
]


def layer_names(arch: ModelArch, number: int) -> Names:
    names = LAYER + (READING if isinstance(arch.layers[number], KVReader) else STORING)
    return names + (TOKENS if arch.sandwich is not None and arch.sandwich.token_dim else [])


def trunk_rules(arch: ModelArch) -> list[Rule]:
    head = Drop("tied to the embedding") if arch.tied_head else Copy()
    ends: Names = [
        (r"embed_tokens\.weight", "embed.weight", Copy()),
        (r"norm\.weight", "norm.weight", Copy()),
        *(TABLES if arch.sandwich is not None and arch.sandwich.token_dim else []),
    ]
    rules = [rule_of(MODEL + name, target, how) for name, target, how in ends]
    rules += [
        rule_of(r"(?:language_model\.)?lm_head\.weight", "head.weight", head),
        Rule(OTHERS, None, Drop("what sees pictures and hears")),
    ]
    for number in range(arch.num_layers):
        start = rf"{MODEL}layers\.{number}\."
        rules += [
            rule_of(start + name, f"layers.{number}.{target}", how)
            for name, target, how in layer_names(arch, number)
        ]
    return rules


GEMMA4 = Family(arch, build, trunk_rules, tool_call_parser="gemma4", reasoning_parser="gemma4")
