"""Step-3.5-Flash and Step-3.7-Flash: one layer in four attends to everything, the others have a window, more
query heads and a rotation of their own; each head's output is gated by one number; experts as DeepSeek-V3's,
of which the last layers limit their activations; norms multiply by one more than their weight
(https://arxiv.org/abs/2602.10604). Three dense MTP layers, one for each depth, each with a head of its own:
the second one gets the first one's output, before its norm, and so on.

If a checkpoint sees pictures, its text model is loaded. Lists with an entry for each layer go on with those
of the MTP layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mtpserve.core.arch.gates import ClampedGate, LayerGates
from mtpserve.core.arch.model import Attention, LayerKind, ModelArch, MoEArch, MTPArch
from mtpserve.core.arch.rope import RopeArch
from mtpserve.models import gqa
from mtpserve.models.family import Family, Names, dropped, ends, gated, one_layer, trunk_layers
from mtpserve.weights.checkpoint import hf
from mtpserve.weights.checkpoint.hf_config import HFConfig
from mtpserve.weights.rules import Copy, EveryExpert, Expert, Rule

PLUS_ONE = Copy(plus=1.0)
PUBLISHED_MODULES = 3
# In transformers' spelling and in the published one.
SPELLINGS = {
    "num_key_value_heads": "num_attention_groups",
    "max_position_embeddings": "max_seq_len",
}
# What nobody publishes otherwise.
ONLY: dict[str, Any] = {
    "attention_bias": False, "mlp_bias": False, "sink": False, "use_head_wise_attn_gate": True,
    "use_qk_norm": True, "zero_centered": True,
    "use_moe_router_bias": True, "moe_router_activation": "sigmoid", "att_impl_type": "GQA",
}  # fmt: skip


def arch(config: HFConfig, mtp_layers: int) -> ModelArch:
    for name, other in SPELLINGS.items():
        config = config.with_default(name, config.raw(other))
    for name, wanted in ONLY.items():
        if config.has(name) and config.raw(name) != wanted:
            raise config.unsupported(name, str(wanted).lower() if isinstance(wanted, bool) else wanted)
    if not all(config.raw("use_rope_layers") or []):
        raise config.unsupported("use_rope_layers", "a rotation in every layer")
    types = layer_types(config, mtp_layers)
    mtp = (
        MTPArch(mtp_layers, "embedding-hidden", "pre", recycle="pre", head="own", each_depth=True)
        if mtp_layers
        else None
    )
    common = gqa.arch(
        of_type(config, gqa.FULL, types),
        "step3p5",
        positions=128000,
        eps=1e-5,
        head_norms=True,
        moe=routed(config, mtp_layers),
        mtp=mtp,
    )
    return replace(
        common,
        layers=kinds(config, common, types),
        window_rope=window_rope(config, common, types),
        head_gate=True,
        scale=config.get_float("query_pre_attn_scalar", float(common.head_dim), above=0) ** -0.5,
        gates=gates(config, len(types)),
    )


def layer_types(config: HFConfig, mtp_layers: int) -> list[str]:
    """Returns the types of the trunk's layers, then of the MTP layers that are loaded."""
    layers, raw_types = config.get_int("num_hidden_layers", at_least=1), config.raw("layer_types")
    types = [gqa.FULL] * (layers + mtp_layers) if raw_types is None else raw_types
    is_valid = (
        isinstance(types, list)
        and len(types) >= layers + mtp_layers
        and set(types) <= {gqa.FULL, gqa.SLIDING}
    )
    config.require(
        is_valid,
        "layer_types",
        f"a list of a name for each of {layers} + {mtp_layers} layers, {gqa.FULL} or {gqa.SLIDING}",
    )
    return list(types[: layers + mtp_layers])


def of_type(config: HFConfig, name: str, types: Sequence[str]) -> HFConfig:
    """Returns the config with one rotation, that of the layers of this type. `rope_parameters` has rotations
    by type; other keys have lists for all layers. Scaling is for layers that attend to everything."""
    if config.section("rope_parameters").has(name):
        return hf.of_layers(config, name)
    values = dict(config.values)
    for key, other in (("rope_theta", "rope_theta"), ("partial_rotary_factors", "partial_rotary_factor")):
        if isinstance(per_layer := config.raw(key), list):
            numbers = {number for number, kind in zip(per_layer, types, strict=False) if kind == name}
            config.require(
                len(per_layer) >= len(types) and len(numbers) <= 1,
                key,
                f"a number for each layer, the same for all of {name}",
            )
            values |= {key: None, other: numbers.pop() if numbers else None}
    if config.raw("yarn_only_types") not in (None, [gqa.FULL]):
        raise config.unsupported("yarn_only_types", f'["{gqa.FULL}"]')
    return HFConfig(
        config.path, values if name == gqa.FULL else values | {"rope_scaling": None}, config.prefix
    )


def window_rope(config: HFConfig, common: ModelArch, types: Sequence[str]) -> RopeArch | None:
    return (
        hf.rope(of_type(config, gqa.SLIDING, types), common.head_dim, interleaved=False)
        if gqa.SLIDING in types
        else None
    )


def kinds(config: HFConfig, common: ModelArch, types: Sequence[str]) -> tuple[LayerKind, ...]:
    full = common.attention(0)
    if gqa.SLIDING not in types:
        return (full,) * len(types)
    other, kv = config.section("attention_other_setting"), full.kv
    for name, wanted in (
        ("attention_type", gqa.SLIDING),
        ("num_attention_groups", kv.heads),
        ("head_dim", kv.key_dim),
    ):
        if other.has(name) and other.raw(name) != wanted:
            raise other.unsupported(name, str(wanted))
    source, name = (other, "num_attention_heads") if other.values else (config, "num_sliding_attention_heads")
    heads = source.get_int(name, common.heads, at_least=1)
    source.require(heads % kv.heads == 0, name, f"a multiple of num_attention_groups = {kv.heads}")
    windowed = Attention(
        kv, config.get_int("sliding_window", at_least=1), heads=None if heads == common.heads else heads
    )
    return tuple(windowed if name == gqa.SLIDING else full for name in types)


def routed(config: HFConfig, mtp_layers: int) -> MoEArch:
    number, top_k = (
        config.get_int("n_routed_experts", 288, at_least=1),
        config.get_int("num_experts_per_tok", 8, at_least=1),
    )
    config.require(top_k <= number, "num_experts_per_tok", f"at most n_routed_experts = {number}")
    return MoEArch(
        experts=number,
        top_k=top_k,
        size=config.get_int("moe_intermediate_size", 1280, at_least=1),
        shared=config.get_int("share_expert_dim", 1280, at_least=1),
        dense=dense(config, mtp_layers),
        groups=1,
        top_groups=1,
        scale=config.get_float("moe_router_scaling_factor", 1.0, above=0),
        renormalise=config.get_bool("norm_expert_weight", True),
    )


def dense(config: HFConfig, mtp_layers: int) -> tuple[int, ...]:
    layers, types, listed = (
        config.get_int("num_hidden_layers", at_least=1),
        config.raw("mlp_layer_types"),
        config.raw("moe_layers_enum"),
    )
    if types is not None:
        is_valid = isinstance(types, list) and len(types) >= layers and set(types) <= {"dense", "sparse"}
        config.require(
            is_valid,
            "mlp_layer_types",
            f"a list of at least num_hidden_layers = {layers} names, each one of dense, sparse",
        )
        sparse = {layer for layer, name in enumerate(types) if name == "sparse"}
    elif listed is not None:
        numbers = [part.strip() for part in listed.split(",")] if isinstance(listed, str) else listed
        is_valid = isinstance(numbers, list) and all(str(number).isdecimal() for number in numbers)
        config.require(is_valid, "moe_layers_enum", "numbers of layers, in a list or between commas")
        sparse = {int(number) for number in numbers}
    else:
        sparse = set(range(3, layers))
    return tuple(layer for layer in range(layers + mtp_layers) if layer not in sparse)


def gates(config: HFConfig, layers: int) -> tuple[LayerGates | None, ...]:
    """Returns the gates of each layer; an empty tuple if no activation is limited."""
    of_dense, of_experts = (
        limits(config, "swiglu_limits_shared", layers),
        limits(config, "swiglu_limits", layers),
    )
    layer_gates = tuple(
        LayerGates(*map(limited, pair)) if any(pair) else None for pair in zip(of_dense, of_experts,
            strict=True)
    )  # fmt: skip
    return layer_gates if any(layer_gates) else ()


def limits(config: HFConfig, name: str, layers: int) -> list[float | None]:
    """0 and null: there is none. Lists may end with the trunk's layers."""
    values, trunk = config.raw(name), config.get_int("num_hidden_layers", at_least=1)
    if values is None:
        return [None] * layers
    is_valid = (
        isinstance(values, list)
        and len(values) >= trunk
        and all(x is None or (type(x) in (int, float) and x >= 0) for x in values)
    )
    config.require(
        is_valid, name, f"a list of at least num_hidden_layers = {trunk} numbers that are not negative"
    )
    return [values[layer] or None if layer < len(values) else None for layer in range(layers)]


def limited(limit: float | None) -> ClampedGate | None:
    """silu(gate) at most `limit`, times up between -limit and limit. silu grows where it is positive: a limit
    of the gate is one of it."""
    if limit is None:
        return None
    gate = float(limit)
    for _ in range(64):
        gate = limit * (1 + math.exp(-gate))  # silu(gate) = limit
    return ClampedGate(1.0, gate, float(limit), plus=0.0)


def layer_names(arch: ModelArch) -> Names:
    attention = gqa.attention_names(arch)
    names = [
        (pattern, target, PLUS_ONE if target.endswith("norm.weight") else how)
        for pattern, target, how in attention
    ]
    expert = r"moe\.experts\.(?P<expert>\d+)"
    return [
        *names,
        (r"self_attn\.g_proj\.weight", "attention.gate.weight", Copy()),
        *gated("mlp", "mlp"),
        *gated("share_expert", "mlp.shared"),
        (r"moe\.gate\.weight", "mlp.router.weight", Copy()),
        (r"moe\.router_bias", "mlp.router.bias", Copy()),
        (r"moe\.gate_proj\.weight", "mlp.experts.gate_up", EveryExpert(0)),
        (r"moe\.up_proj\.weight", "mlp.experts.gate_up", EveryExpert(1)),
        (r"moe\.down_proj\.weight", "mlp.experts.down", Copy()),
        (rf"{expert}\.gate_proj\.weight", "mlp.experts.gate_up", Expert(0)),
        (rf"{expert}\.up_proj\.weight", "mlp.experts.gate_up", Expert(1)),
        (rf"{expert}\.down_proj\.weight", "mlp.experts.down", Expert(0)),
    ]


def trunk_rules(arch: ModelArch) -> list[Rule]:
    embed, norm, head = ends(arch)
    seeing = [dropped(prefix, "what sees pictures") for prefix in ("vision_model.", "vit_large_projector.")]
    return [embed, replace(norm, how=PLUS_ONE), head, *seeing, *trunk_layers(arch, layer_names(arch))]


def mtp_rules(arch: ModelArch, prefix: str) -> list[Rule]:
    """`prefix` ends with the layer's number, which may be 0 where the first one is published on its own."""
    depth, infix = max(int(prefix.split(".")[-2]) - arch.num_layers, 0), r"(?:transformer\.)?"
    inside = [(infix + pattern, f"layer.{part}", how) for pattern, part, how in layer_names(arch)]
    return one_layer(
        prefix,
        f"mtp_head.depths.{depth}.",
        [
            *inside,
            (r"enorm\.weight", "fusion.embedding_norm.weight", PLUS_ONE),
            (r"hnorm\.weight", "fusion.hidden_norm.weight", PLUS_ONE),
            (r"eh_proj\.weight", "fusion.project.weight", Copy()),
            (infix + r"shared_head\.norm\.weight", "norm.weight", PLUS_ONE),
            (infix + r"shared_head\.(?:output|head)\.weight", "head.weight", Copy()),
        ],
    )


STEP3P5 = Family(
    arch, gqa.build, trunk_rules, mtp_rules, modules=PUBLISHED_MODULES, tool_call_parser="qwen3_coder",
    reasoning_parser="deepseek_r1"
)  # fmt: skip
