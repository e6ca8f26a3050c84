"""MiMo-7B: Qwen2's dense trunk and one MTP layer that fuses [hidden; embedding], with the hidden state from before the trunk's final norm.

In Xiaomi's code the norm belongs to the head, so the layer gets the raw hidden state, and in further steps its own raw output.

As in Qwen2 some of the trunk's layers may have a sliding window. The MTP layer never has one: no published config says otherwise, and its
number is greater than those that `layer_types` lists.
"""

from __future__ import annotations

import torch
from torch import nn

from mtpserve.core.arch import Attention, KVLayout, LayerKind, ModelArch, MTPArch
from mtpserve.layers.attention import GQA
from mtpserve.layers.decoder import DecoderModel, Methods
from mtpserve.layers.kernels import Kernels
from mtpserve.layers.mlp import MLP
from mtpserve.models.family import Family, Names, ends, gated, one_layer, trunk_layers
from mtpserve.weights import hf
from mtpserve.weights.hf import HFConfig
from mtpserve.weights.rules import Copy, Drop, Rule, Stack

SLIDING = "sliding_attention"
LAYER_TYPES = "full_attention", SLIDING


def arch(config: HFConfig, mtp_layers: int) -> ModelArch:
    heads, hidden = config.get_int("num_attention_heads", at_least=1), config.get_int("hidden_size", at_least=1)
    kv_heads = config.get_int("num_key_value_heads", heads, at_least=1)
    config.require(heads % kv_heads == 0, "num_key_value_heads", f"a divisor of num_attention_heads = {heads}")
    head_dim = config.get_int("head_dim", None, at_least=2)
    if head_dim is None:
        config.require(hidden % heads == 0, "hidden_size", f"a multiple of num_attention_heads = {heads}, or head_dim must be given")
        head_dim = hidden // heads
    kv = KVLayout("gqa", kv_heads, head_dim, head_dim)
    hf.quantization(config)
    vocab = config.get_int("vocab_size", at_least=2)
    return ModelArch(
        family="mimo",
        layers=(*trunk_kinds(config, kv), *[Attention(kv)] * mtp_layers),
        hidden=hidden,
        vocab=vocab,
        heads=heads,
        head_dim=head_dim,
        intermediate=config.get_int("intermediate_size", at_least=1),
        rope=hf.rope(config, head_dim, interleaved=False),
        norm_eps=config.get_float("rms_norm_eps", 1e-6, above=0),
        scale=head_dim**-0.5,
        max_positions=config.get_int("max_position_embeddings", 32768, at_least=2),
        tied_head=config.get_bool("tie_word_embeddings", False),
        eos_ids=hf.eos_ids(config, vocab),
        dtype=hf.dtype(config),
        mtp=MTPArch(mtp_layers, "hidden-embedding", hidden_in="pre", recycle="pre") if mtp_layers else None,
        qkv_bias=config.get_bool("attention_bias", True),
    )


def trunk_kinds(config: HFConfig, kv: KVLayout) -> list[LayerKind]:
    """With `use_sliding_window`, layers from `max_window_layers` on see `sliding_window` positions, or those that `layer_types` names."""
    layers, sliding = config.get_int("num_hidden_layers", at_least=1), config.get_bool("use_sliding_window", False)
    # As in transformers null says that there is no window, and the key's absence 4096.
    absent = None if "sliding_window" in config.values else 4096
    window = config.get_int("sliding_window", absent, at_least=1) if sliding else None
    types = config.raw("layer_types")
    if types is None:
        first = config.get_int("max_window_layers", 28, at_least=0) if sliding else layers
        return [Attention(kv, window if i >= first else None) for i in range(layers)]
    known = isinstance(types, list) and len(types) == layers and set(types) <= set(LAYER_TYPES)
    config.require(known, "layer_types", f"a list of num_hidden_layers = {layers} names, each one of {', '.join(LAYER_TYPES)}")
    has_window = window is not None or SLIDING not in types
    config.require(has_window, "layer_types", f"without {SLIDING}, or with use_sliding_window true and a sliding_window")
    return [Attention(kv, window if name == SLIDING else None) for name in types]


def build(arch: ModelArch, methods: Methods, dtype: torch.dtype, positions: int, kernels: Kernels) -> DecoderModel:
    def block(layer: int) -> tuple[nn.Module, nn.Module]:
        method = methods.of(drafts=layer >= arch.num_layers)
        return GQA(arch, arch.layers[layer], method, kernels), MLP(arch.hidden, arch.intermediate, method, kernels)

    return DecoderModel(arch, block, methods, dtype, positions, kernels)


def layer_names(arch: ModelArch) -> Names:
    names: Names = [
        (r"input_layernorm\.weight", "attention_norm.weight", Copy()),
        (r"post_attention_layernorm\.weight", "mlp_norm.weight", Copy()),
        (r"self_attn\.o_proj\.weight", "attention.out.weight", Copy()),
        (r"self_attn\.rotary_emb\.inv_freq", "", Drop("computed")),
        *gated("mlp", "mlp"),
    ]
    for part, letter in enumerate("qkv"):
        names.append((rf"self_attn\.{letter}_proj\.weight", "attention.qkv.weight", Stack(part)))
        if arch.qkv_bias:
            names.append((rf"self_attn\.{letter}_proj\.bias", "attention.qkv.bias", Stack(part)))
    return names


def trunk_rules(arch: ModelArch) -> list[Rule]:
    return ends(arch) + trunk_layers(arch, layer_names(arch))


def mtp_rules(arch: ModelArch, prefix: str) -> list[Rule]:
    return one_layer(prefix, "mtp_head.layer.", layer_names(arch)) + one_layer(
        prefix,
        "mtp_head.",
        [
            (r"token_layernorm\.weight", "fusion.embedding_norm.weight", Copy()),
            (r"hidden_layernorm\.weight", "fusion.hidden_norm.weight", Copy()),
            (r"input_proj\.weight", "fusion.project.weight", Copy()),
            (r"final_layernorm\.weight", "norm.weight", Copy()),
        ],
    )


# About 90 %: MiMo, https://arxiv.org/abs/2505.07608
MIMO = Family(arch, build, trunk_rules, mtp_rules, floor=0.4)
