"""MiMo-7B: Qwen2's dense trunk and one MTP layer that fuses [hidden; embedding], with the hidden state from
before the trunk's final norm.

In Xiaomi's code the norm belongs to the head, so the layer gets the raw hidden state, and in further steps
its own raw output.

Some of the trunk's layers may have a sliding window, as in Qwen2. The MTP layer never has one: no published
config says otherwise, and its number is greater than those that `layer_types` lists.
"""

from __future__ import annotations

from mtpserve.core.arch.model import ModelArch, MTPArch
from mtpserve.models import gqa
from mtpserve.models.family import Family, one_layer
from mtpserve.weights.checkpoint.hf_config import HFConfig
from mtpserve.weights.rules import Copy, Rule


def arch(config: HFConfig, mtp_layers: int) -> ModelArch:
    mtp = MTPArch(mtp_layers, "hidden-embedding", hidden_in="pre", recycle="pre") if mtp_layers else None
    return gqa.arch(
        config,
        "mimo",
        positions=32768,
        qkv_bias=config.get_bool("attention_bias", True),
        trunk=gqa.windowed,
        mtp=mtp,
    )


def mtp_rules(arch: ModelArch, prefix: str) -> list[Rule]:
    return one_layer(prefix, "mtp_head.layer.", gqa.layer_names(arch)) + one_layer(
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
MIMO = Family(
    arch, gqa.build, gqa.trunk_rules, mtp_rules, floor=0.4, tool_call_parser="hermes", reasoning_parser="mimo"
)
