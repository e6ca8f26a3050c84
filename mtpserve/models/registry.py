"""Architectures, by their names in config.json, to family files."""

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
    given = config.raw("architectures")
    name = given[0] if isinstance(given, list) and given else given
    if name not in FAMILIES.entries:
        raise (
            config.unsupported("architectures", ", ".join(FAMILIES.names()))
            if given
            else UnsupportedModel(f"{config.path}: architectures is missing; supported: {', '.join(FAMILIES.names())}")
        )
    return FAMILIES.get(name)
