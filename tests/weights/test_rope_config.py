from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mtpserve.core.arch.rope import Llama3RopeArch, RopeArch, YarnArch
from mtpserve.core.errors import LoadError, UnsupportedModel
from mtpserve.weights.checkpoint.hf import rope
from mtpserve.weights.checkpoint.hf_config import HFConfig

V3 = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0}
V3 |= {"mscale_all_dim": 1.0}
V3_YARN = YarnArch(40.0, 4096, 32.0, 1.0, 1.0, 1.0)
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LENGTH = {"original_max_position_embeddings": 16}


def read(values: dict[str, Any], **options: bool) -> RopeArch:
    return rope(HFConfig(Path("config.json"), values), 64, True, **options)


@pytest.mark.parametrize(
    ("values", "theta", "scaling"),
    [
        ({}, 10000.0, None),
        ({"rope_theta": 640000}, 640000.0, None),
        ({"rope_theta": 5e5, "rope_scaling": None}, 5e5, None),
        ({"rope_theta": 5e5, "rope_scaling": {"type": "default"}}, 5e5, None),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, 1e6, None),
        ({"rope_parameters": {"rope_type": "default"}, "rope_theta": 1e6}, 1e6, None),
        ({"rope_theta": 1e4, "rope_scaling": V3}, 1e4, V3_YARN),
        ({"rope_theta": 1e4, "rope_scaling": {**V3, "rope_type": "yarn", "type": "linear"}}, 1e4, V3_YARN),
        ({"rope_parameters": {**V3, "type": None, "rope_type": "yarn", "rope_theta": 2e4}, "rope_theta": 1e4}, 2e4, V3_YARN),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}, "rope_scaling": V3}, 7.0, None),
        ({"rope_scaling": {**V3, "truncate": False}}, 1e4, YarnArch(40.0, 4096, 32.0, 1.0, 1.0, 1.0, truncate=False)),
        ({"rope_scaling": {"type": "yarn", "factor": 4}, "max_position_embeddings": 32768}, 1e4, YarnArch(4.0, 32768)),
        ({"rope_scaling": {"type": "yarn", "factor": 4} | LENGTH, "max_position_embeddings": 64}, 1e4, YarnArch(4.0, 16)),
        ({"rope_scaling": {"type": "yarn", "factor": 4}, "max_position_embeddings": 64} | LENGTH, 1e4, YarnArch(4.0, 16)),
        ({"rope_scaling": V3} | LENGTH, 1e4, replace(V3_YARN, original_length=16)),
        ({"rope_scaling": {"type": "yarn", "factor": None}, "max_position_embeddings": 64} | LENGTH, 1e4, YarnArch(4.0, 16)),
        ({"rope_scaling": LLAMA3, "max_position_embeddings": 64}, 1e4, Llama3RopeArch(8.0, 1.0, 4.0, 64)),
        ({"rope_scaling": LLAMA3} | LENGTH, 1e4, Llama3RopeArch(8.0, 1.0, 4.0, 16)),
    ],
)
def test_both_spellings(values: dict[str, Any], theta: float, scaling: YarnArch | Llama3RopeArch | None) -> None:
    assert read(values) == RopeArch(64, theta, True, scaling)


def test_a_gain_that_is_given_becomes_an_mscale() -> None:
    found = read({"rope_scaling": {"type": "yarn", "factor": 8, "original_max_position_embeddings": 64, "attention_factor": 1.3}})
    assert isinstance(found.scaling, YarnArch) and found.scaling.mscale_all_dim == 0
    assert 0.1 * found.scaling.mscale * math.log(8) + 1 == pytest.approx(1.3)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
@pytest.mark.parametrize(("name", "key"), [("rope_scaling", "type"), ("rope_scaling", "rope_type"), ("rope_parameters", "rope_type")])
def test_other_kinds_are_refused_by_name(kind: str, name: str, key: str) -> None:
    with pytest.raises(
        UnsupportedModel, match=rf'{name}\.{key} = "{kind}" is not supported; supported: default, none, linear, llama3, yarn'
    ):
        read({name: {key: kind, "factor": 2.0}})


@pytest.mark.parametrize("kinds", [("full_attention",), ("full_attention", "sliding_attention")])
def test_the_same_rotation_of_each_kind_of_layers(kinds: tuple[str, ...]) -> None:
    values = {"rope_theta": 1e6, "rope_type": "linear", "factor": 2.0}
    assert read({"rope_parameters": dict.fromkeys(kinds, values)}) == read({"rope_parameters": values})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_theta": 1e6}}},
            "rope_parameters = .* one set of numbers",
        ),
        ({"rope_scaling": {**V3, "attention_factor": 1.1}}, r"rope_scaling\.attention_factor = 1\.1"),
    ],
)
def test_what_yarn_cannot_say_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        read(values, mscale_alone=True)


@pytest.mark.parametrize(
    ("values", "ours", "deepseeks"),
    [
        ({"mscale": 0.707}, (1.0, 0.0), (0.707, 0.0)),
        ({"mscale_all_dim": 0.5}, (1.0, 0.0), (1.0, 0.5)),
        ({"mscale": 0.707, "mscale_all_dim": 0.5}, (0.707, 0.5), (0.707, 0.5)),
    ],
)
def test_yarns_mscale_alone_is_deepseeks(values: dict[str, float], ours: tuple[float, float], deepseeks: tuple[float, float]) -> None:
    for mscale_alone, (mscale, all_dim) in ((False, ours), (True, deepseeks)):
        found = read({"rope_scaling": {"type": "yarn", "factor": 8} | LENGTH | values}, mscale_alone=mscale_alone)
        assert found.scaling == replace(YarnArch(8.0, 16), mscale=mscale, mscale_all_dim=all_dim)


def test_a_gain_comes_before_both_mscales() -> None:
    scaling = {"type": "yarn", "factor": 8, "attention_factor": 1.3} | LENGTH
    assert read({"rope_scaling": scaling | {"mscale": 0.7, "mscale_all_dim": 0.7}}) == read({"rope_scaling": scaling})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rope_theta": 0}, "rope_theta must be a number above 0, got 0"),
        ({"rope_scaling": {"type": "yarn"} | LENGTH, "max_position_embeddings": 64}, r"rope_scaling\.factor is missing"),
        ({"rope_scaling": {"type": "yarn", "factor": 4}}, "max_position_embeddings is missing"),
        ({"rope_scaling": 4}, "rope_scaling must be an object, got 4"),
    ],
)
def test_wrong_values(values: dict[str, Any], message: str) -> None:
    with pytest.raises(LoadError, match=message):
        read(values)
