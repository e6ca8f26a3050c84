"""MiMo-V2-Flash, V2.5 and V2.5-Pro: most layers have a sliding window, more key heads, a rotation of their
own and a sink in each head; values are narrower than keys, and are scaled; experts as DeepSeek-V3's
(https://arxiv.org/abs/2601.02780). Three dense MTP layers with a window, one for each depth: each gets the
trunk's hidden state, as they were trained.

Layers with a window see `sliding_window_size` tokens before their own, as in SGLang and in transformers. V2.5
stores a layer's queries, keys and values in one matrix, in chunks for as many devices as layers without a
window have key heads, as vLLM and SGLang read it. If a checkpoint sees and hears, its text model is loaded.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from mtpserve.core.arch.model import (
    Attention,
    KVLayout,
    LayerKind,
    ModelArch,
    MoEArch,
    MTPArch,
    attention_kinds,
)
from mtpserve.core.arch.rope import RopeArch
from mtpserve.models import deepseek, gqa
from mtpserve.models.family import Family, Names, dropped, ends, experts, gated, one_layer, trunk_layers
from mtpserve.weights.checkpoint import hf
from mtpserve.weights.checkpoint.hf_config import HFConfig
from mtpserve.weights.rules import Arranged, Copy, Rule

PUBLISHED_MODULES = 3
ROTATED = 0.334  # part of a head, where the config does not say
SENSES = ("visual.", "audio_encoder.", "speech_embeddings.")


def arch(config: HFConfig, mtp_layers: int) -> ModelArch:
    same_as_full(config, "swa_num_attention_heads", "num_attention_heads")
    same_as_full(config, "swa_head_dim", "head_dim")
    same_as_full(config, "swa_v_head_dim", "v_head_dim")
    mtp = (
        MTPArch(mtp_layers, "embedding-hidden", hidden_in="post", recycle=None, each_depth=True)
        if mtp_layers
        else None
    )
    eps, bias = config.get_float("layernorm_epsilon", 1e-5, above=0), config.get_bool("attention_bias", False)
    common = gqa.arch(
        hf.of_layers(config, gqa.FULL),
        "mimo_v2",
        positions=131072,
        eps=eps,
        rotated=ROTATED,
        qkv_bias=bias,
        moe=routed(config, mtp_layers),
        mtp=mtp,
    )
    trunk, windowed = kinds(config, common.head_dim)
    return replace(
        common,
        layers=(*trunk, *[windowed] * mtp_layers),
        window_rope=window_rope(config, common),
        value_scale=config.get_float("attention_value_scale", 1.0, above=0),
        sinks=sinks(config),
    )


def same_as_full(config: HFConfig, name: str, other: str) -> None:
    if config.has(name) and config.raw(name) != config.raw(other):
        raise config.unsupported(name, f"{other} = {config.raw(other)}")


def window_rope(config: HFConfig, common: ModelArch) -> RopeArch:
    if config.section("rope_parameters").has(gqa.SLIDING):
        windowed = hf.of_layers(config, gqa.SLIDING)
        return hf.rope(windowed, common.head_dim, interleaved=False, part=ROTATED)
    return replace(common.rope, theta=config.get_float("swa_rope_theta", common.rope.theta, above=0))


def kinds(config: HFConfig, head_dim: int) -> tuple[list[LayerKind], LayerKind]:
    """Returns the kinds of the trunk's layers, and the kind with a window. Published configs and those that
    transformers writes have other keys."""
    types = gqa.layer_types(config)
    pattern = (
        [kind == gqa.SLIDING for kind in types]
        if types is not None
        else zeros_and_ones(config, "hybrid_layer_pattern", "a window")
    )
    value_dim, heads = (
        config.get_int("v_head_dim", head_dim, at_least=1),
        config.get_int("num_attention_heads", at_least=1),
    )
    full = config.get_int("num_key_value_heads", at_least=1)
    windowed = config.get_int("swa_num_key_value_heads", 2 * full, at_least=1)
    config.require(
        heads % windowed == 0, "swa_num_key_value_heads", f"a divisor of num_attention_heads = {heads}"
    )
    plain = Attention(KVLayout("gqa", full, head_dim, value_dim))
    before = config.get_int("sliding_window_size", None, at_least=0)
    # transformers counts the token itself
    window_size = config.get_int("sliding_window", at_least=1) if before is None else before + 1
    window = Attention(KVLayout("gqa", windowed, head_dim, value_dim), window_size)
    return [window if sliding else plain for sliding in pattern], window


def sinks(config: HFConfig) -> Literal["all", "windows"] | None:
    full, windows = (
        config.get_bool("add_full_attention_sink_bias", False),
        config.get_bool("add_swa_attention_sink_bias", True),
    )
    if full and not windows:
        raise config.unsupported(
            "add_full_attention_sink_bias", "false, or true with add_swa_attention_sink_bias"
        )
    return "all" if full else "windows" if windows else None


def routed(config: HFConfig, mtp_layers: int) -> MoEArch | None:
    moe, layers = deepseek.experts(config, dense=1), config.get_int("num_hidden_layers", at_least=1)
    if moe is None:
        return None
    dense = moe.dense
    if not config.has("mlp_layer_types") and config.has("moe_layer_freq"):
        sparse = zeros_and_ones(config, "moe_layer_freq", "experts")
        dense = tuple(layer for layer, has_experts in enumerate(sparse) if not has_experts)
    return replace(moe, dense=(*dense, *range(layers, layers + mtp_layers)))


def zeros_and_ones(config: HFConfig, name: str, what: str) -> list[int]:
    layers, numbers = config.get_int("num_hidden_layers", at_least=1), config.raw(name)
    is_valid = isinstance(numbers, list) and len(numbers) == layers and set(numbers) <= {0, 1}
    config.require(
        is_valid,
        name,
        f"a list of num_hidden_layers = {layers} numbers, 1 for a layer with {what} and else 0",
    )
    return list(numbers)


def attention_names(arch: ModelArch) -> Names:
    return [
        *gqa.attention_names(arch),
        (r"self_attn\.attention_sink_bias", "attention.sinks", Copy()),
        *gated("mlp", "mlp"),
    ]


def fused(arch: ModelArch, layer: int) -> Names:
    """Queries, keys and values of V2.5's layer with this number in `arch.layers`."""
    kv = arch.attention(layer).kv
    devices = min(
        (kind.kv.heads for kind in attention_kinds(arch.layers) if kind.window is None), default=kv.heads
    )
    parts = arch.heads * kv.key_dim, kv.heads * kv.key_dim, kv.heads * kv.value_dim
    return [(r"self_attn\.qkv_proj\.weight", "attention.qkv.weight", Arranged(parts=parts, chunks=devices))]


def trunk_rules(arch: ModelArch) -> list[Rule]:
    names = attention_names(arch) + (experts(arch.moe) if arch.moe is not None else [])
    rules = (
        ends(arch) + trunk_layers(arch, names) + [dropped(prefix, "what sees or hears") for prefix in SENSES]
    )
    alike: dict[LayerKind, list[int]] = {}
    for layer, kind in enumerate(arch.layers[: arch.num_layers]):
        alike.setdefault(kind, []).append(layer)
    return rules + [
        rule for layers in alike.values() for rule in trunk_layers(arch, fused(arch, layers[0]), layers)
    ]


def mtp_rules(arch: ModelArch, prefix: str) -> list[Rule]:
    """`prefix` ends with the module's number."""
    target = f"mtp_head.depths.{prefix.split('.')[-2]}."
    names = [
        *attention_names(arch),
        *fused(arch, arch.num_layers),
        (r"pre_mlp_layernorm\.weight", "mlp_norm.weight", Copy()),
    ]
    return one_layer(prefix, target + "layer.", names) + one_layer(
        prefix,
        target,
        [
            (r"enorm\.weight", "fusion.embedding_norm.weight", Copy()),
            (r"hnorm\.weight", "fusion.hidden_norm.weight", Copy()),
            (r"eh_proj\.weight", "fusion.project.weight", Copy()),
            (r"final_layernorm\.weight", "norm.weight", Copy()),
        ],
    )


MIMO_V2 = Family(
    arch,
    gqa.build,
    trunk_rules,
    mtp_rules,
    modules=PUBLISHED_MODULES,
    tool_call_parser="mimo",
    reasoning_parser="qwen3",
)
