"""Llama 3, and what is published as one: SmolLM2. It has no MTP layer; one that was trained for it and
published apart is in DeepSeek's layout."""

from __future__ import annotations

from mtpserve.core.arch.model import ModelArch, MTPArch
from mtpserve.models import deepseek, gqa
from mtpserve.models.family import Family
from mtpserve.weights.checkpoint.hf_config import HFConfig
from mtpserve.weights.rules import Rule


def arch(config: HFConfig, mtp_layers: int) -> ModelArch:
    if config.get_bool("mlp_bias", False):
        raise config.unsupported("mlp_bias", "false")
    if config.has("sliding_window"):
        raise config.unsupported("sliding_window", "null")
    bias = config.get_bool("attention_bias", False)
    mtp = MTPArch(mtp_layers, "embedding-hidden", hidden_in="post", recycle="post") if mtp_layers else None
    return gqa.arch(config, "llama", positions=2048, qkv_bias=bias, out_bias=bias, mtp=mtp)


def mtp_rules(arch: ModelArch, prefix: str) -> list[Rule]:
    return deepseek.mtp_layer(prefix, gqa.layer_names(arch))


LLAMA = Family(arch, gqa.build, gqa.trunk_rules, mtp_rules, mtp_apart=True, tool_call_parser="llama3_json")
