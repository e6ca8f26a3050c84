from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from mtpserve.core.errors import LoadError
from mtpserve.weights.checkpoint.hf_config import HFConfig
from mtpserve.weights.checkpoint.layouts import configured_layers, mtp_layers, nextn_prefix, why_no_mtp

LAYER = ("input_layernorm.weight", "self_attn.o_proj.weight", "mlp.down_proj.weight")
FUSING = ("enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight")
COPIES = ("embed_tokens.weight", "shared_head.head.weight")


def config(**values: Any) -> HFConfig:
    return HFConfig(Path("config.json"), values)


def names(prefix: str, *groups: tuple[str, ...]) -> list[str]:
    return [prefix + name for group in groups for name in group]


TRUNK = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
TRUNK += [*names("model.layers.0.", LAYER), *names("model.layers.1.", LAYER)]


def test_deepseek() -> None:
    found = mtp_layers([*TRUNK, *names("model.layers.2.", FUSING, LAYER, COPIES)], 2)
    assert found is not None and (found.kind, found.prefix, found.count) == ("deepseek", "model.layers.2.", 1)


def test_several_layers_in_order() -> None:
    found = mtp_layers([*names("model.layers.10.", FUSING), *names("model.layers.9.", FUSING)], 9)
    assert found is not None and found.prefixes == ("model.layers.9.", "model.layers.10.")


def test_mimo() -> None:
    found = mtp_layers([*TRUNK, *names("model.mtp_layers.0.", ("input_proj.weight", *LAYER))], 2)
    assert found is not None and (found.kind, found.prefix, found.count) == ("mimo", "model.mtp_layers.0.", 1)


def test_longcat() -> None:
    inside = ("enorm.m.weight", "hnorm.m.weight", "eh_proj.weight", "transformer_layer.mlp.down_proj.weight")
    shared = ["model.mtp.norm.weight", "model.mtp.embed_tokens.weight"]
    found = mtp_layers([*TRUNK, *names("model.mtp.layers.0.", inside), *shared], 2)
    assert found is not None and (found.kind, found.prefixes, found.count) == ("longcat", ("model.mtp.",), 1)
    assert all(re.fullmatch(found.unused(0)[0], name) for name in shared)
    other = mtp_layers([*TRUNK, "model.mtp.layers.0.enorm.weight"], 2)
    assert other is not None and other.kind == "mimo_v2"


def test_blocks_of_one_layer_that_are_numbered_like_layers() -> None:
    blocks = [*names("mtp.layers.0.", ("enorm.weight", "eh_proj.weight", "mixer.o_proj.weight")), "mtp.layers.1.mixer.gate.weight"]
    found = mtp_layers([*TRUNK, *blocks], 2)
    assert found is not None and (found.kind, found.prefixes) == ("nemotron", ("mtp.",))
    two = mtp_layers([*TRUNK, *blocks, "mtp.layers.2.eh_proj.weight"], 2)
    assert two is not None and two.count == 2 and two.prefixes == ("mtp.",)
    other = mtp_layers([*TRUNK, *names("mtp.layers.0.", LAYER), "mtp.fc.weight"], 2)
    assert other is not None and (other.kind, other.prefixes) == ("qwen", ("mtp.",))


@pytest.mark.parametrize(
    ("layer", "shared"),
    [
        ("model.layers.{}.eh_proj.weight", []),
        ("model.mtp_layers.{}.input_proj.weight", []),
        ("model.mtp_block.{}.mlp.up_proj.weight", ["model.mtp_linear_proj.2.weight"]),
        ("mtp.layers.{}.mlp.up_proj.weight", ["mtp.fc.weight", "mtp.norm.weight"]),
        ("mtp.layers.{}.eh_proj.weight", ["mtp.layers.3.mixer.gate.weight"]),
        ("mtp.{}.attn.wkv.weight", []),
    ],
)
def test_each_tensor_of_an_unused_layer_is_dropped_once(layer: str, shared: list[str]) -> None:
    first, second = layer.format(2), layer.format(10)
    found = mtp_layers([*TRUNK, first, second, *shared], 2)
    assert found is not None and found.count == 2

    def dropped(used: int) -> list[str]:
        return [name for name in [*TRUNK, first, second, *shared] for pattern in found.unused(used) if re.fullmatch(pattern, name)]

    assert dropped(0) == [first, second, *shared] and dropped(1) == [second] and dropped(2) == []


def test_a_trunk_with_more_layers_than_its_config_is_not_mtp() -> None:
    assert mtp_layers([*TRUNK, *names("model.layers.2.", LAYER)], 2) is None


def test_fusing_tensors_inside_the_trunk_are_not_this_trunks() -> None:
    assert mtp_layers(names("model.layers.0.", FUSING, LAYER), 2) is None


def test_layers_that_the_config_promises_and_the_tensors_lack() -> None:
    promised = config(num_nextn_predict_layers=1)
    assert mtp_layers(TRUNK, 2) is None
    reason = why_no_mtp(promised, 2)
    assert "num_nextn_predict_layers = 1" in reason and "model.layers.2.eh_proj.weight" in reason and "model.mtp_layers.0" in reason


@pytest.mark.parametrize("values", [{}, {"num_nextn_predict_layers": 0}])
def test_layers_that_nobody_promised(values: dict[str, int]) -> None:
    assert "neither its config nor its tensors" in why_no_mtp(config(**values), 2)


def test_the_text_configs_count_comes_first() -> None:
    both = config(num_nextn_predict_layers=1, text_config={"mtp_num_hidden_layers": 2})
    assert configured_layers(both) == ("text_config.mtp_num_hidden_layers", 2) and configured_layers(config()) is None
    with pytest.raises(LoadError, match="num_nextn_predict_layers must be an integer of at least 0, got -1"):
        configured_layers(config(num_nextn_predict_layers=-1))


@pytest.mark.parametrize(
    ("published", "prefix"),
    [
        (names("model.layers.0.", FUSING, LAYER), "model.layers.0."),
        (names("model.layers.61.", FUSING, LAYER, COPIES), "model.layers.61."),
        (names("model.layers.61.", FUSING, LAYER), "model.layers.61."),
        (names("model.layers.0.", FUSING, LAYER, COPIES), "model.layers.0."),
        ([*TRUNK, *names("model.layers.61.", FUSING, LAYER)], "model.layers.61."),
        ([*TRUNK, "model.mtp.layers.0.enorm.m.weight", "model.mtp.norm.weight"], "model.mtp."),
    ],
    ids=["renumbered", "old export", "old without copies", "renumbered with copies", "whole model", "whole model of another layout"],
)
def test_separately_published_layers(published: list[str], prefix: str) -> None:
    assert nextn_prefix(published, 61) == prefix


@pytest.mark.parametrize(("published", "more"), [(TRUNK, ""), (names("model.layers.46.", FUSING), r"; it has one at model\.layers\.46\.")])
def test_a_layer_for_another_trunk(published: list[str], more: str) -> None:
    with pytest.raises(LoadError, match=rf"model of 61 layers: neither model\.layers\.61\.eh_proj\.weight nor .* is there{more}$"):
        nextn_prefix(published, 61)
