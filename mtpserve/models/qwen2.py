"""Qwen2 and Qwen2.5, dense: a bias for queries, keys and values; some layers may have a sliding window."""

from __future__ import annotations

from mtpserve.core.arch import ModelArch
from mtpserve.models import gqa
from mtpserve.models.family import Family
from mtpserve.weights.hf import HFConfig


def arch(config: HFConfig, mtp_layers: int) -> ModelArch:
    return gqa.arch(config, "qwen2", positions=32768, qkv_bias=True, windows=True)


QWEN2 = Family(arch, gqa.build, gqa.trunk_rules)
