"""Llama 3, and what is published as one: SmolLM2."""

from __future__ import annotations

from mtpserve.core.arch.model import ModelArch
from mtpserve.models import gqa
from mtpserve.models.family import Family
from mtpserve.weights.checkpoint.hf_config import HFConfig


def arch(config: HFConfig, mtp_layers: int) -> ModelArch:
    if config.get_bool("mlp_bias", False):
        raise config.unsupported("mlp_bias", "false")
    if config.has("sliding_window"):
        raise config.unsupported("sliding_window", "null")
    bias = config.get_bool("attention_bias", False)
    return gqa.arch(config, "llama", positions=2048, qkv_bias=bias, out_bias=bias)


LLAMA = Family(arch, gqa.build, gqa.trunk_rules, tool_call_parser="llama3_json")
