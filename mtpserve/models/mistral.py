"""Mistral 7B, Nemo and Small 3: Llama's layers, of which the first version's see a sliding window
(https://arxiv.org/abs/2310.06825)."""

from __future__ import annotations

from collections.abc import Sequence

from mtpserve.core.arch.model import Attention, KVLayout, LayerKind, ModelArch
from mtpserve.models import gqa
from mtpserve.models.family import Family
from mtpserve.weights.checkpoint.hf_config import HFConfig


def arch(config: HFConfig, mtp_layers: int) -> ModelArch:
    return gqa.arch(config, "mistral", positions=131072, trunk=kinds)


def kinds(config: HFConfig, kv: KVLayout) -> Sequence[LayerKind]:
    # As in transformers null says that there is no window, and the key's absence 4096.
    absent = None if "sliding_window" in config.values else 4096
    window = config.get_int("sliding_window", absent, at_least=1)
    return [Attention(kv, window)] * config.get_int("num_hidden_layers", at_least=1)


MISTRAL = Family(arch, gqa.build, gqa.trunk_rules, tool_call_parser="mistral")
