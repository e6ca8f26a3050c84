"""What families with grouped-query attention have in common: dimensions from the config, blocks, and the
names of a layer's tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from mtpserve.core.arch.model import Attention, KVLayout, LayerKind, ModelArch, MoEArch, MTPArch
from mtpserve.layers.decoder import DecoderModel, Methods
from mtpserve.layers.kernels import Kernels
from mtpserve.layers.mixers.attention import GQA
from mtpserve.layers.mtp_modules import decoder
from mtpserve.models.family import Names, ends, experts, feed_forward, gated, trunk_layers
from mtpserve.weights.checkpoint import hf
from mtpserve.weights.checkpoint.hf_config import HFConfig
from mtpserve.weights.rules import Copy, Rule, Stack

FULL, SLIDING = "full_attention", "sliding_attention"


def full(config: HFConfig, kv: KVLayout) -> Sequence[LayerKind]:
    return [Attention(kv)] * config.get_int("num_hidden_layers", at_least=1)


def arch(
    config: HFConfig, family: str, *, positions: int, eps: float = 1e-6, rotated: float = 1.0,
    interleaved: bool = False,
    qkv_bias: bool = False, out_bias: bool = False, head_norms: bool = False,
    trunk: Callable[[HFConfig, KVLayout], Sequence[LayerKind]] = full, moe: MoEArch | None = None,
    mtp: MTPArch | None = None,
) -> ModelArch:  # fmt: skip
    """`positions`, `eps`, `rotated`: of configs that do not say. `trunk`: the kinds of its layers. An MTP
    layer never has a window."""
    heads = config.get_int("num_attention_heads", at_least=1)
    hidden = config.get_int("hidden_size", at_least=1)
    kv_heads = config.get_int("num_key_value_heads", heads, at_least=1)
    config.require(
        heads % kv_heads == 0, "num_key_value_heads", f"a divisor of num_attention_heads = {heads}"
    )
    head_dim = config.get_int("head_dim", None, at_least=2)
    if head_dim is None:
        config.require(
            hidden % heads == 0,
            "hidden_size",
            f"a multiple of num_attention_heads = {heads}, or head_dim must be given",
        )
        head_dim = hidden // heads
    config.get_str("hidden_act", "silu", one_of=("silu",))
    kv = KVLayout("gqa", kv_heads, head_dim, head_dim)
    hf.quantization(config)
    vocab = config.get_int("vocab_size", at_least=2)
    return ModelArch(
        family=family,
        layers=(*trunk(config, kv), *[Attention(kv)] * (mtp.layers if mtp else 0)),
        hidden=hidden,
        vocab=vocab,
        heads=heads,
        head_dim=head_dim,
        intermediate=config.get_int("intermediate_size", at_least=1),
        rope=hf.rope(config, head_dim, interleaved=interleaved, part=rotated),
        norm_eps=config.get_float("rms_norm_eps", eps, above=0),
        scale=head_dim**-0.5,
        max_positions=config.get_int("max_position_embeddings", positions, at_least=2),
        tied_head=config.get_bool("tie_word_embeddings", False),
        eos_ids=hf.eos_ids(config, vocab),
        dtype=hf.dtype(config),
        moe=moe,
        mtp=mtp,
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        head_norms=head_norms,
    )


def windowed(config: HFConfig, kv: KVLayout) -> Sequence[LayerKind]:
    """Returns the layers' kinds. With `use_sliding_window`, layers from `max_window_layers` on see
    `sliding_window` positions, or those that `layer_types` names."""
    layers = config.get_int("num_hidden_layers", at_least=1)
    sliding = config.get_bool("use_sliding_window", False)
    # As in transformers null says that there is no window, and the key's absence 4096.
    absent = None if "sliding_window" in config.values else 4096
    window = config.get_int("sliding_window", absent, at_least=1) if sliding else None
    types = layer_types(config)
    if types is None:
        first = config.get_int("max_window_layers", 28, at_least=0) if sliding else layers
        return [Attention(kv, window if i >= first else None) for i in range(layers)]
    has_window = window is not None or SLIDING not in types
    config.require(
        has_window, "layer_types", f"without {SLIDING}, or with use_sliding_window true and a sliding_window"
    )
    return [Attention(kv, window if name == SLIDING else None) for name in types]


def layer_types(config: HFConfig) -> list[str] | None:
    layers, types = config.get_int("num_hidden_layers", at_least=1), config.raw("layer_types")
    if types is None:
        return None
    is_valid = isinstance(types, list) and len(types) == layers and set(types) <= {FULL, SLIDING}
    config.require(
        is_valid,
        "layer_types",
        f"a list of num_hidden_layers = {layers} names, each one of {FULL}, {SLIDING}",
    )
    return list(types)


def build(
    arch: ModelArch, methods: Methods, dtype: torch.dtype, positions: int, kernels: Kernels
) -> DecoderModel:
    def block(layer: int) -> tuple[nn.Module, nn.Module]:
        method = methods.of(drafts=layer >= arch.num_layers)
        return GQA(arch, arch.attention(layer), method, kernels), feed_forward(arch, layer, method, kernels)

    return decoder(arch, block, methods, dtype, positions, kernels)


def layer_names(arch: ModelArch) -> Names:
    return attention_names(arch) + gated("mlp", "mlp") + (experts(arch.moe) if arch.moe is not None else [])


def attention_names(arch: ModelArch) -> Names:
    """Returns the names of the attention's tensors and of a layer's norms."""
    names: Names = [
        (r"input_layernorm\.weight", "attention_norm.weight", Copy()),
        (r"post_attention_layernorm\.weight", "mlp_norm.weight", Copy()),
        (r"self_attn\.o_proj\.weight", "attention.out.weight", Copy()),
    ]
    for part, letter in enumerate("qkv"):
        names.append((rf"self_attn\.{letter}_proj\.weight", "attention.qkv.weight", Stack(part)))
        if arch.qkv_bias:
            names.append((rf"self_attn\.{letter}_proj\.bias", "attention.qkv.bias", Stack(part)))
    if arch.out_bias:
        names.append((r"self_attn\.o_proj\.bias", "attention.out.bias", Copy()))
    if arch.head_norms:
        names += [
            (rf"self_attn\.{letter}_norm\.weight", f"attention.{letter}_norm.weight", Copy())
            for letter in "qk"
        ]
    return names


def trunk_rules(arch: ModelArch) -> list[Rule]:
    return ends(arch) + trunk_layers(arch, layer_names(arch))
