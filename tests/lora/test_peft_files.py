"""Adapters as PEFT saves them: how they are scaled, what they are added to, and what is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mtpserve.config import LoRAConfig, ModelConfig, SpecConfig
from mtpserve.config.engine import EngineConfig
from mtpserve.config.lora import name_and_path
from mtpserve.core.errors import ConfigError, LoadError
from mtpserve.engine.startup.build import build_engine
from mtpserve.engine.startup.planning import describe, sources
from mtpserve.weights.checkpoint.lora import read_adapter
from tests.lora.adapters import PLAIN, PROMPTS, Adapter, answers, config_of
from tests.models.checkpoints import Tiny, deepseek, glm4_moe, llama, mistral, qwen2, qwen3
from tests.models.hybrids import qwen3_next
from tests.models.own_layouts import gpt_oss, mimo_v2

ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
GATED: dict[str, tuple[Callable[..., Tiny], Adapter]] = {
    "llama": (llama, Adapter(1)),
    "mistral": (mistral, Adapter(2, 7, ("v_proj", "up_proj"))),
    "qwen2": (qwen2, Adapter(3, 3, ("gate_proj", "o_proj"))),
    "qwen3, one matrix of a layer": (qwen3, Adapter(4, 1, ("layers.1.self_attn.k_proj",))),
    "glm 4.5, beside experts": (glm4_moe, Adapter(5, 4, ATTENTION)),
    "qwen3 next, gated heads beside recurrent layers": (qwen3_next, Adapter(6, 4, ATTENTION, layers=4)),
    "gpt-oss, sinks": (gpt_oss, Adapter(7, 4, ATTENTION)),
    "mimo 2": (mimo_v2, Adapter(8, 4, ATTENTION)),
    "rslora": (llama, Adapter(9, 4, config={"use_rslora": True, "lora_alpha": 3}, scale_of=lambda module: 1.5)),
    "ranks by pattern": (
        qwen3,
        Adapter(
            10,
            config={
                "r": 4,
                "lora_alpha": 4,
                "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.down_proj": 5},
                "alpha_pattern": {"layers.2.self_attn.q_proj": 1, "k_proj": 12},
            },
            rank_of=lambda module: 2 if module.endswith("q_proj") else 5 if module.endswith("1.mlp.down_proj") else 4,
            scale_of=lambda module: (
                (0.5 if "layers.2" in module else 2.0)
                if module.endswith("q_proj")
                else 3.0
                if module.endswith("k_proj")
                else 0.8
                if module.endswith("1.mlp.down_proj")
                else 1.0
            ),
        ),
    ),
}


@pytest.mark.parametrize(("make", "adapter"), GATED.values(), ids=GATED.keys())
def test_families_and_scales(tmp_path: Path, make: Callable[..., Tiny], adapter: Adapter) -> None:
    tiny = make(tmp_path / "base")
    lora = LoRAConfig(lora_modules=(f"it={adapter.save(tmp_path / 'it', tiny.tensors)}",), max_lora_rank=8)
    engine = build_engine(config_of(tiny.directory, PLAIN, lora))
    prompts, request = PROMPTS[:3], lora.requests[0]
    merged = answers(build_engine(config_of(adapter.merge(tmp_path / "merged", tiny), PLAIN)), [None] * 3, prompts=prompts)
    assert answers(engine, [request] * 3, prompts=prompts) == merged
    assert answers(engine, [None] * 3, prompts=prompts) != merged


def read(tiny: Tiny, directory: Path, max_rank: int = 8) -> Any:
    described = describe(EngineConfig(model=ModelConfig(model=str(tiny.directory)), spec=SpecConfig(speculative_algorithm="none")), False)
    return read_adapter(str(directory), sources(described)[0].rules, max_rank)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return llama(tmp_path_factory.mktemp("base"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_dora": True}, ["use_dora is not supported"]),
        ({"bias": "all"}, ["bias must be none, got 'all'"]),
        ({"modules_to_save": ["lm_head"]}, ["modules_to_save is not supported", "lm_head"]),
        ({"peft_type": "IA3"}, ["peft_type must be LORA, got 'IA3'"]),
        ({"r": 0}, ["r must be a number above 0, got 0"]),
        ({"lora_alpha": None}, ["lora_alpha must be a number above 0, got None"]),
        ({"rank_pattern": [1]}, ["rank_pattern must be an object, got [1]"]),
        ({"r": 5}, ["model.layers.0.mlp.down_proj", "are not those of rank 5"]),
    ],
    ids=str,
)
def test_a_config_that_is_not_computed_is_refused(tmp_path: Path, tiny: Tiny, changes: dict[str, Any], words: list[str]) -> None:
    directory = Adapter(1, config=changes).save(tmp_path, tiny.tensors)
    with pytest.raises(LoadError) as caught:
        read(tiny, directory)
    assert [word for word in words if word not in str(caught.value)] == []


def renamed(old: str, new: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {name.replace(old, new): tensor for name, tensor in tensors.items()}


def with_nan(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    next(iter(tensors.values())).view(-1)[0] = torch.nan
    return tensors


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (renamed("layers.0.mlp.up_proj", "layers.0.mlp.other"), ["model.layers.0.mlp.other: the model has no such layer"]),
        (renamed("layers.2", "layers.7"), ["layers.7", "the model has no such layer"]),
        (renamed("layers.0.mlp.up_proj.lora_B", "layers.0.mlp.up_proj.lora_magnitude_vector"), ["lora_magnitude_vector", "not supported"]),
        (
            lambda tensors: {name: t for name, t in tensors.items() if not name.endswith("0.mlp.up_proj.lora_B.weight")},
            ["lora_B is missing"],
        ),
        (with_nan, ["holds NaN or infinite numbers"]),
        (lambda tensors: {}, ["there are no adapters in it"]),
    ],
    ids=["unknown module", "unknown layer", "dora", "one side", "nan", "empty"],
)
def test_tensors_that_are_not_computed_are_refused(
    tmp_path: Path, tiny: Tiny, change: Callable[[dict[str, Tensor]], dict[str, Tensor]], words: list[str]
) -> None:
    file = Adapter(1).save(tmp_path, tiny.tensors) / "adapter_model.safetensors"
    save_file(change(load_file(file)), file)
    with pytest.raises(LoadError) as caught:
        read(tiny, tmp_path)
    assert [word for word in words if word not in str(caught.value)] == []


def test_files_that_are_not_there_and_ranks_that_do_not_fit(tmp_path: Path, tiny: Tiny) -> None:
    with pytest.raises(LoadError, match=r"adapter_config\.json: No such file"):
        read(tiny, tmp_path / "nowhere")
    directory = Adapter(1, 9).save(tmp_path, tiny.tensors)
    with pytest.raises(LoadError, match="has rank 9, and --max-lora-rank is 8"):
        read(tiny, directory)
    (directory / "adapter_model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(LoadError, match=r"adapter_model\.safetensors"):
        read(tiny, directory)
    (directory / "adapter_config.json").write_text("{")
    with pytest.raises(LoadError, match="is no JSON"):
        read(tiny, directory)


def test_fingerprints_are_those_of_the_numbers(tmp_path: Path, tiny: Tiny) -> None:
    places = [Adapter(seed, config={"lora_alpha": alpha}).save(tmp_path / name, tiny.tensors) for name, seed, alpha in (
        ("a", 1, 4), ("same", 1, 4), ("scaled", 1, 5), ("other", 2, 4),
    )]  # fmt: skip
    first, *others = [read(tiny, place).fingerprint for place in places]
    assert [other == first for other in others] == [True, False, False]


def test_layers_that_take_no_adapter_are_named(tmp_path: Path) -> None:
    latent = deepseek(tmp_path / "latent")
    dense = Adapter(1, 4, ("layers.0.mlp.down_proj",))
    assert build_engine(config_of(latent.directory, PLAIN, LoRAConfig(lora_modules=(str(dense.save(tmp_path / "dense", latent.tensors)),))))
    for modules, word in ((("self_attn.o_proj",), "this layer takes no adapter"), (("experts.0.up_proj",), "this layer takes no adapter")):
        directory = Adapter(1, 4, modules).save(tmp_path / modules[0], latent.tensors)
        with pytest.raises(ConfigError, match=word) as caught:
            build_engine(config_of(latent.directory, PLAIN, LoRAConfig(lora_modules=(f"x={directory}",))))
        assert str(caught.value).startswith("--lora-modules x: ")
    (tmp_path / "dense" / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 4, "bias": "lora_only"}))
    with pytest.raises(ConfigError, match="bias must be none"):
        build_engine(config_of(latent.directory, PLAIN, LoRAConfig(lora_modules=(str(tmp_path / "dense"),))))


def test_names_and_paths() -> None:
    assert name_and_path("sql=adapters/sql") == ("sql", "adapters/sql")
    assert name_and_path("a=b=c") == ("a=b", "c")
    assert name_and_path("adapters/sql") == ("sql", "adapters/sql")
    assert name_and_path('{"name": "sql", "path": "p", "base_model_name": "m"}') == ("sql", "p")
    assert name_and_path('{"lora_name": "sql", "lora_path": "p", "pinned": false}') == ("sql", "p")
    config = LoRAConfig(lora_modules=("a=x", "b=y"))
    assert [(one.lora_name, one.lora_int_id) for one in config.requests] == [("a", 1), ("b", 2)] and config.is_enabled
    assert not LoRAConfig().is_enabled and LoRAConfig(enable_lora=True).is_enabled
