"""gpt-oss: attention sinks in every head, every second layer with a sliding window, and biases everywhere;
each layer has experts with a clamped gate, whose router is a softmax over the chosen ones
(https://arxiv.org/abs/2508.10925). The experts are published in MXFP4."""

from __future__ import annotations

from dataclasses import replace

from mtpserve.core.arch.gates import ClampedGate
from mtpserve.core.arch.model import Attention, KVLayout, LayerKind, ModelArch, MoEArch
from mtpserve.models import gqa
from mtpserve.models.family import Family, Names, ends, trunk_layers
from mtpserve.weights.checkpoint.hf_config import HFConfig
from mtpserve.weights.rules import Arranged, Copy, Rule


def arch(config: HFConfig, mtp_layers: int) -> ModelArch:
    bias = config.get_bool("attention_bias", True)
    moe = experts(config)
    common = gqa.arch(
        config,
        "gpt_oss",
        positions=131072,
        eps=1e-5,
        qkv_bias=bias,
        out_bias=bias,
        trunk=alternating,
        moe=moe,
    )
    return replace(common, sinks="all")


def alternating(config: HFConfig, kv: KVLayout) -> list[LayerKind]:
    """Returns the kinds that `layer_types` names; without them every second layer has a window, the first one
    too."""
    layers, window = (
        config.get_int("num_hidden_layers", at_least=1),
        config.get_int("sliding_window", 128, at_least=1),
    )
    types = gqa.layer_types(config) or [gqa.FULL if i % 2 else gqa.SLIDING for i in range(layers)]
    return [Attention(kv, window if name == gqa.SLIDING else None) for name in types]


def experts(config: HFConfig) -> MoEArch:
    number, top_k = (
        config.get_int("num_local_experts", 128, at_least=1),
        config.get_int("num_experts_per_tok", 4, at_least=1),
    )
    config.require(top_k <= number, "num_experts_per_tok", f"at most num_local_experts = {number}")
    limit = config.get_float("swiglu_limit", 7.0, above=0)
    return MoEArch(
        experts=number,
        top_k=top_k,
        size=config.get_int("intermediate_size", at_least=1),
        shared=0,
        dense=(),
        groups=1,
        top_groups=1,
        scale=1.0,
        # A softmax over all, renormalised over the chosen, is one over the chosen.
        renormalise=True,
        scores="softmax",
        router_bias="logits",
        biases=True,
        gate=ClampedGate(config.get_float("swiglu_alpha", 1.702), limit, limit, plus=1.0),
    )


def trunk_rules(arch: ModelArch) -> list[Rule]:
    names: Names = [(r"self_attn\.sinks", "attention.sinks", Copy())]
    for kind in ("weight", "bias"):
        names.append((rf"mlp\.router\.{kind}", f"mlp.router.{kind}", Copy()))
    for part, in_turns in (("gate_up", True), ("down", False)):
        # In MXFP4 the matrices' rows are the outputs, as everywhere; in bfloat16 they are the inputs.
        names += [
            (rf"mlp\.experts\.{part}_proj", f"mlp.experts.{part}", Arranged(turned=True, in_turns=in_turns)),
            (rf"mlp\.experts\.{part}_proj_bias", f"mlp.experts.{part}_bias", Arranged(in_turns=in_turns)),
        ]
    return ends(arch) + trunk_layers(arch, gqa.attention_names(arch) + names)


GPT_OSS = Family(arch, gqa.build, trunk_rules, tool_call_parser="openai", reasoning_parser="openai_gptoss")
