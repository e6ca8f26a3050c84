"""Architectures, as config.json names them, to family files."""

from __future__ import annotations

from mtpserve.core.errors import UnsupportedModel
from mtpserve.core.registry import Registry
from mtpserve.models.family import Family
from mtpserve.weights.hf import HFConfig

FAMILIES: Registry[Family] = Registry(
    "architecture",
    {
        "DeepseekV3ForCausalLM": "mtpserve.models.deepseek:DEEPSEEK",
        "DeepseekV3ForCausalLMNextN": "mtpserve.models.deepseek:DEEPSEEK",
        "MiMoForCausalLM": "mtpserve.models.mimo:MIMO",
    },
)


def family_of(config: HFConfig) -> Family:
    found = config.raw("architectures")
    name = found[0] if isinstance(found, list) and found else found
    if name not in FAMILIES.entries:
        raise (
            config.unsupported("architectures", ", ".join(FAMILIES.names()))
            if found
            else UnsupportedModel(f"{config.path}: architectures is missing; supported: {', '.join(FAMILIES.names())}")
        )
    return FAMILIES.get(name)
