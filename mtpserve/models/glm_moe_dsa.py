"""GLM-5, 5.1 and 5.2: DeepSeek-V3.2's layout and sparse attention, whose indexer rotates neighbours. From 5.2
on only some layers have an indexer, and those after one select the same tokens
(https://arxiv.org/abs/2603.12201)."""

from __future__ import annotations

from mtpserve.core.arch.model import ModelArch
from mtpserve.models import deepseek, deepseek_v32
from mtpserve.models.family import Family
from mtpserve.weights.checkpoint.hf_config import HFConfig

FULL, SHARED = "full", "shared"
LETTERS = {"F": FULL, "S": SHARED}


def arch(config: HFConfig, mtp_layers: int) -> ModelArch:
    return deepseek_v32.selecting(config, mtp_layers, "glm_moe_dsa", indexed(config), interleaved=True)


def indexed(config: HFConfig) -> list[bool]:
    """Returns whether each layer has an indexer: those that `indexer_types` names, or `index_topk_pattern`,
    or one in `index_topk_freq`."""
    layers = config.get_int("num_hidden_layers", at_least=1)
    name = "indexer_types" if config.has("indexer_types") else "index_topk_pattern"
    types = config.raw(name)
    if types is None:
        every, skipped = (
            config.get_int("index_topk_freq", 1, at_least=1),
            config.get_int("index_skip_topk_offset", 2, at_least=1),
        )
        return [max(layer - skipped + 1, 0) % every == 0 for layer in range(layers)]
    if isinstance(types, str):
        types = [LETTERS.get(letter, letter) for letter in types]
    is_valid = (
        isinstance(types, list) and len(types) == layers and set(types) <= {FULL, SHARED} and types[0] == FULL
    )
    config.require(
        is_valid,
        name,
        f"a list of num_hidden_layers = {layers} names, each one {FULL} or {SHARED}, and the first "
        f"one {FULL}",
    )
    return [layer_type == FULL for layer_type in types]


GLM_MOE_DSA = Family(
    arch, deepseek.build, deepseek_v32.trunk_rules, deepseek_v32.mtp_rules, tool_call_parser="glm47",
    reasoning_parser="glm45"
)  # fmt: skip
