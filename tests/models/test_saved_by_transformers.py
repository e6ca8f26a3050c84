"""Checkpoints as the installed transformers writes them, configs in its own spelling: the logits are its model's."""

from __future__ import annotations

import json
from dataclasses import replace
from math import lcm
from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from mtpserve.config import EngineConfig, ModelConfig
from mtpserve.core.arch.model import tokens_of_entries
from mtpserve.engine.startup.planning import describe
from mtpserve.models.registry import FAMILIES
from mtpserve.weights.checkpoint.hf_config import OTHER_NAMES
from mtpserve.weights.checkpoint.layouts import COUNT_KEYS
from tests.models.checkpoints import deepseek
from tests.models.compressed_checkpoints import deepseek_v4
from tests.models.own_layouts import mimo_v2
from tests.models.test_families import WITH_MTP, WITHOUT_MTP, Make
from tests.models.test_parity import FEW, compare

WITHOUT_A_CLASS = {"step", "ling"}  # what the installed transformers does not have
FAMILIES_OF_TRANSFORMERS = [make for make in [*WITHOUT_MTP, *WITH_MTP, deepseek, deepseek_v4] if make.__name__ not in WITHOUT_A_CLASS]
OF_ONE_CLASS = {"head_dim", "intermediate_size", "layer_types", "qkv_bias", "bias"}  # other keys in other families


@pytest.mark.parametrize("make", FAMILIES_OF_TRANSFORMERS)
def test_a_saved_model(tmp_path: Path, make: Make) -> None:
    tiny, directory = make(tmp_path / "ours"), tmp_path / "saved"
    config = tiny.trunk.config
    for name, value in vars(config).items():  # a test's MTP layer is one more layer of the same config
        if isinstance(value, list) and len(value) == config.num_hidden_layers + 1:
            setattr(config, name, value[:-1])
    tiny.trunk.save_pretrained(directory)
    saved = json.loads((directory / "config.json").read_text())
    arch = describe(EngineConfig(model=ModelConfig(model=str(directory))), want_mtp=False).arch
    compare(replace(tiny, directory=directory, config=saved, mtp=None), lcm(5, tokens_of_entries(arch.layers)), cuts=FEW)


def test_every_name_that_transformers_gives_a_key() -> None:
    """What a config class maps to another key may be read by either name, in whatever version a file was written."""
    for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        if name in FAMILIES.names() and (kind, name) != ("internlm3", "LlamaForCausalLM"):
            for other, stored in CONFIG_MAPPING[kind].attribute_map.items():
                is_same = {other, stored} <= {*COUNT_KEYS} or other in OTHER_NAMES.get(stored, ())
                assert other in OF_ONE_CLASS or is_same, f"{name}: {other} is {stored}"


@pytest.mark.parametrize("without", ["hybrid_layer_pattern", "moe_layer_freq", "swa_num_key_value_heads", "sliding_window_size"])
def test_mimo_v2s_defaults(tmp_path: Path, without: str) -> None:
    """Keys that transformers' class does not have, each taken from what it has, in a published file, too."""
    tiny = mimo_v2(tmp_path)
    stands_for = {
        "hybrid_layer_pattern": {"layer_types": tiny.trunk.config.layer_types[:-1]},
        "moe_layer_freq": {"mlp_layer_types": tiny.trunk.config.mlp_layer_types[:-1]},
        "swa_num_key_value_heads": {},
        "sliding_window_size": {"sliding_window": tiny.trunk.config.sliding_window},
    }[without]
    (tmp_path / "config.json").write_text(json.dumps(tiny.config | {without: None} | stands_for))
    compare(tiny, 5, cuts=FEW)
