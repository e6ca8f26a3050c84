"""What drafts where the options name nothing: the checkpoint's own MTP layer, if it has one that can be used."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mtpserve.config import CacheConfig, DisaggregationConfig, EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig, SpecConfig
from mtpserve.core.errors import ConfigError, LoadError, NoRoom
from mtpserve.core.request import Request
from mtpserve.core.sampling import SamplingParams
from mtpserve.engine.startup import drafter
from mtpserve.engine.startup.build import build_engine
from mtpserve.engine.startup.draft_model import drafts_itself
from mtpserve.engine.startup.drafter import plan_engine
from mtpserve.engine.startup.planning import Plan
from mtpserve.tools.inspect.checkpoint import inspect_model
from mtpserve.weights.checkpoint.checkpoint import INDEX
from tests.models.checkpoints import Tiny, deepseek, llama, mimo, write, write_nextn
from tests.models.hybrids import nemotron_h, qwen3_5
from tests.models.own_layouts import ernie
from tests.models.test_families import WITH_MTP, Make

OFF = "none"


def config_of(
    directory: Path, budget: int = 64, load_format: str = "auto", role: str = "null", ranks: int = 1, **spec: Any
) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model=str(directory), device="cpu", dtype="float32", load_format=load_format),
        cache=CacheConfig(page_size=5, max_total_tokens=400),
        spec=SpecConfig(**spec),
        scheduler=SchedulerConfig(chunked_prefill_size=budget, max_running_requests=4),
        parallel=ParallelConfig(tensor_parallel_size=ranks),
        disaggregation=DisaggregationConfig(disaggregation_mode=role),
    )


def text(config: EngineConfig) -> list[int]:
    return text_and_accepted(config)[0]


def text_and_accepted(config: EngineConfig) -> tuple[list[int], int]:
    engine = build_engine(config, poison=True)
    engine.add(Request("0", [3, 1, 4, 1, 5, 9, 2, 6], SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)))
    found: list[int] = []
    while engine.has_work:
        found += [token for event in engine.step() for token in event.tokens]
    assert (engine.stats.draft_tokens_total > 0) == (engine.card.algorithm is not None) or engine.card.algorithm == "NGRAM"
    return found, engine.stats.accepted_tokens_total


def trunk_of(tiny: Tiny, directory: Path) -> Path:
    return write(directory, tiny.config, {name: tensor for name, tensor in tiny.tensors.items() if not name.startswith(tiny.prefix)})


@pytest.mark.parametrize("make", [deepseek, mimo])
def test_an_mtp_layer_drafts_and_one_line_says_why(tmp_path: Path, make: Make, caplog: pytest.LogCaptureFixture) -> None:
    tiny = make(tmp_path / "model")
    trunk = trunk_of(tiny, tmp_path / "trunk")
    texts = []
    for directory, spec, algorithm, why in (
        (
            tiny.directory,
            {},
            "MTP",
            "MTP, up to 3 drafts in a row: the checkpoint's MTP layer (default; see --speculative-algorithm",
        ),
        (tiny.directory, {"speculative_algorithm": "auto"}, "MTP", "MTP, up to 3 drafts in a row: the checkpoint's MTP layer"),
        (tiny.directory, {"speculative_num_steps": 2}, "MTP", "MTP, up to 2 drafts in a row: the checkpoint's MTP layer"),
        (tiny.directory, {"speculative_algorithm": OFF}, None, "none, plain decoding: set by --speculative-algorithm"),
        (tiny.directory, {"speculative_algorithm": "nextn"}, "NEXTN", "NEXTN, up to 3 drafts in a row: set by --speculative-algorithm"),
        (trunk, {}, None, f"none, plain decoding: {trunk}: the checkpoint has no MTP layer: its config says num_nextn_predict_layers = 1"),
    ):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            engine = build_engine(config_of(directory, **spec))
        [line] = [record for record in caplog.records if record.getMessage().startswith("drafter: ")]
        assert line.getMessage().removeprefix("drafter: ").startswith(why) and line.levelno == logging.INFO
        assert engine.card.algorithm == algorithm and f"drafter: {engine.card.drafting}" == line.getMessage()
        texts.append(text(config_of(directory, **spec)))
        noted = inspect_model(config_of(directory, **spec)).notes
        assert line.getMessage() in noted, "inspect's plan is an engine's"
    assert all(each == texts[0] for each in texts)


def test_a_family_without_one_is_plain(tmp_path: Path) -> None:
    made = plan_engine(config_of(llama(tmp_path).directory))
    assert made.drafting == f"none, plain decoding: {tmp_path}: the architecture LlamaForCausalLM has no MTP layer" and not made.left_out
    assert made.config.spec.named and made.config.spec.steps == 0
    with pytest.raises(
        ConfigError, match=r"--speculative-num-steps 2 needs a source of drafts, and .* the architecture LlamaForCausalLM has no MTP"
    ):
        plan_engine(config_of(tmp_path, speculative_num_steps=2))
    assert plan_engine(config_of(tmp_path, speculative_num_steps=0)).config.spec.steps == 0, "no drafts are what it gives"


@pytest.mark.parametrize("make", WITH_MTP)
def test_each_family_drafts(tmp_path: Path, make: Make) -> None:
    """What is looked at before the weights are finds nothing wrong with a good checkpoint."""
    made = plan_engine(config_of(make(tmp_path).directory))
    layers = made.described.arch.mtp
    assert layers is not None and drafts_itself(made.config.spec) and not made.left_out
    assert made.config.spec.steps == (min(3, layers.layers) if layers.each_depth else 3)


def test_of_random_weights_too(tmp_path: Path) -> None:
    assert plan_engine(config_of(deepseek(tmp_path).directory, load_format="dummy")).config.spec.parts == ["MTP"]


def lacking(tiny: Tiny, tmp_path: Path) -> EngineConfig:
    rest = {name: tensor for name, tensor in tiny.tensors.items() if name != tiny.prefix + "hnorm.weight"}
    return config_of(write(tmp_path / "other", tiny.config, rest))


def misshapen(tiny: Tiny, tmp_path: Path) -> EngineConfig:
    wrong = {tiny.prefix + "eh_proj.weight": torch.zeros(3, 5)}
    return config_of(write(tmp_path / "other", tiny.config, tiny.tensors | wrong))


def unscaled(tiny: Tiny, tmp_path: Path) -> EngineConfig:
    """In float8 without its scales."""
    name = tiny.prefix + "eh_proj.weight"
    return config_of(write(tmp_path / "other", tiny.config, tiny.tensors | {name: tiny.tensors[name].to(torch.float8_e4m3fn)}))


def few_rows(tiny: Tiny, tmp_path: Path) -> EngineConfig:
    return config_of(tiny.directory, budget=2)


@pytest.mark.parametrize(
    ("broken", "why"),
    [
        (lacking, r"missing model\.layers\.3\.hnorm\.weight"),
        (misshapen, r"eh_proj\.weight has shape \[3, 5\]"),
        (unscaled, "eh_proj.weight is stored as F8_E4M3, but its scales"),
        (few_rows, "--chunked-prefill-size must be at least 4"),
    ],
)
def test_one_that_cannot_be_used_is_warned_of(tmp_path: Path, broken: Any, why: str, caplog: pytest.LogCaptureFixture) -> None:
    tiny = deepseek(tmp_path / "whole")
    config = broken(tiny, tmp_path)
    assert text(config) == text(config_of(tiny.directory, speculative_algorithm=OFF))
    [line] = [record for record in caplog.records if record.levelno == logging.WARNING and "drafter: " in record.getMessage()]
    assert line.getMessage().startswith("drafter: none, plain decoding: the checkpoint's MTP layer cannot be used: ")
    with pytest.raises((LoadError, ConfigError), match=why) as error:
        build_engine(replace(config, spec=SpecConfig(speculative_algorithm="MTP")))
    assert str(error.value) in line.getMessage()
    with pytest.raises((LoadError, ConfigError)):
        build_engine(replace(config, spec=SpecConfig(speculative_eagle_topk=2)))


def with_a_second_layer(tiny: Tiny, directory: Path, *names: tuple[str, str]) -> Path:
    """`names`: regular expressions of the first layer's tensors, and the second one's names."""
    also = {
        re.sub(first, second, name): torch.randn(tensor.shape)
        for first, second in names
        for name, tensor in tiny.tensors.items()
        if re.match(first, name)
    }
    assert also and not also.keys() & tiny.tensors.keys()
    return write(directory, tiny.config | {"num_nextn_predict_layers": 2}, tiny.tensors | also)


SECOND_LAYERS: dict[Make, tuple[tuple[str, str], ...]] = {
    deepseek: ((r"model\.layers\.3\.", "model.layers.4."),),
    mimo: ((r"model\.mtp_layers\.0\.", "model.mtp_layers.1."),),
    qwen3_5: ((r"mtp\.layers\.0\.", "mtp.layers.1."),),
    nemotron_h: ((r"mtp\.layers\.0\.", "mtp.layers.2."), (r"mtp\.layers\.1\.", "mtp.layers.3.")),
    ernie: ((r"(model\.mtp_\w+)\.0\.", r"\1.1."),),
}


@pytest.mark.parametrize("make", SECOND_LAYERS)
def test_of_several_layers_the_first_one_drafts(tmp_path: Path, make: Make) -> None:
    tiny = make(tmp_path / "one")
    directory = with_a_second_layer(tiny, tmp_path / "two", *SECOND_LAYERS[make])
    plain = text(config_of(tiny.directory, speculative_algorithm=OFF))
    for spec in ({}, {"speculative_algorithm": "NEXTN"}, {"speculative_algorithm": OFF}, {"speculative_algorithm": "NGRAM"}):
        assert text(config_of(directory, **spec)) == plain
    one, two = (text_and_accepted(config_of(of)) for of in (tiny.directory, directory))
    assert one == two, "the second layer, of random numbers, has no part in it"
    if make not in (qwen3_5, nemotron_h):  # a draft model keeps no recurrent states
        apart = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": str(directory)}
        assert text(config_of(directory, **apart)) == plain
    noted = inspect_model(config_of(directory)).notes
    assert any("the first of its 2 MTP layers drafts at every depth" in line for line in noted)


def unlisted_in_its_shards(tiny: Tiny, directory: Path) -> None:
    write(directory, tiny.config, tiny.tensors)
    index = directory / INDEX
    weight_map = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": {k: v for k, v in weight_map.items() if not k.startswith(tiny.prefix)}}))


def beside_an_index(tiny: Tiny, directory: Path) -> None:
    trunk_of(tiny, directory)
    save_file(mtp_of(tiny), directory / "mtp.safetensors")


def beside_one_file(tiny: Tiny, directory: Path) -> None:
    trunk_of(tiny, directory)
    shards = sorted(directory.glob("*.safetensors"))
    save_file({k: v for shard in shards for k, v in load_file(shard).items()}, directory / "model.safetensors")
    for file in (*shards, directory / INDEX):
        file.unlink()
    save_file(mtp_of(tiny), directory / "mtp.safetensors")


def mtp_of(tiny: Tiny) -> dict[str, torch.Tensor]:
    return {name: tensor.contiguous() for name, tensor in tiny.tensors.items() if name.startswith(tiny.prefix)}


@pytest.mark.parametrize("make", [deepseek, qwen3_5])
@pytest.mark.parametrize("stored", [unlisted_in_its_shards, beside_an_index, beside_one_file])
def test_a_layer_that_no_index_names_drafts(
    tmp_path: Path, make: Make, stored: Callable[[Tiny, Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    tiny, directory = make(tmp_path / "whole"), tmp_path / "other"
    stored(tiny, directory)
    (directory / "damaged.safetensors").write_bytes(b"version https://git-lfs")
    with caplog.at_level(logging.INFO):
        assert text_and_accepted(config_of(directory)) == text_and_accepted(config_of(tiny.directory))
    assert "the MTP layer is read from m" in caplog.text
    assert text(config_of(directory, speculative_algorithm=OFF)) == text(config_of(tiny.directory, speculative_algorithm=OFF))


def test_a_layer_of_another_size_in_a_stray_file_is_none(tmp_path: Path) -> None:
    tiny = deepseek(tmp_path / "whole")
    directory = trunk_of(tiny, tmp_path / "other")
    save_file({name: torch.zeros(3, 5) for name in mtp_of(tiny)}, directory / "stray.safetensors")
    assert text(config_of(directory)) == text(config_of(tiny.directory, speculative_algorithm=OFF))


@pytest.mark.parametrize(
    ("make", "kept"),
    [
        (deepseek, r"model\.layers\.3\.(?!eh_proj|enorm|hnorm|shared_head)"),
        (qwen3_5, r"mtp\.norm"),
        (qwen3_5, r"mtp\.(?!layers)"),
        (mimo, r"model\.mtp_layers\.0\.final_layernorm"),
        (ernie, r"model\.mtp_emb_norm"),
        (nemotron_h, r"mtp\.layers\.0\.enorm"),
        (llama, "mtp"),
    ],
)
def test_what_is_left_of_a_layer_is_left_out(tmp_path: Path, make: Make, kept: str, caplog: pytest.LogCaptureFixture) -> None:
    tiny = make(tmp_path / "whole")
    tensors = tiny.tensors | ({"mtp.fc.weight": torch.ones(2)} if make is llama else {})
    rest = {name: tensor for name, tensor in tensors.items() if not tiny.prefix or not name.startswith(tiny.prefix) or re.match(kept, name)}
    assert any(re.match(kept, name) for name in rest)
    computed = {f"model.{name}": torch.ones(2) for name in ("rotary_emb.inv_freq", "layers.0.self_attn.rotary_emb.sin_cached")}
    directory = write(tmp_path / "other", tiny.config, rest | computed)
    with caplog.at_level(logging.INFO):
        assert text(config_of(directory)) == text(config_of(tiny.directory, speculative_algorithm=OFF))
    assert "tensors not loaded: 2 (the rotation is computed)" in caplog.text and "an MTP layer that is not" in caplog.text
    inspect_model(config_of(directory))


def test_a_longer_trunk_than_its_config_is_refused(tmp_path: Path) -> None:
    """Its last layer is no MTP layer where the config counts none."""
    tiny = llama(tmp_path / "whole")
    with pytest.raises(LoadError, match=r"model\.layers\.2\..*: the model has no parameter for this tensor"):
        build_engine(config_of(write(tmp_path / "other", tiny.config | {"num_hidden_layers": 2}, tiny.tensors)))


def test_an_error_of_the_trunk_is_one(tmp_path: Path) -> None:
    tiny = deepseek(tmp_path / "whole")
    rest = {name: tensor for name, tensor in tiny.tensors.items() if name != "model.layers.1.input_layernorm.weight"}
    with pytest.raises(LoadError, match=r"missing model\.layers\.1\.input_layernorm\.weight"):
        build_engine(config_of(write(tmp_path / "other", tiny.config, rest)))


def test_no_memory_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny, real = deepseek(tmp_path), drafter.plan

    def plan(config: EngineConfig) -> Plan:
        if config.spec.steps:
            raise NoRoom("no memory is left for the KV pool")
        return real(config)

    monkeypatch.setattr(drafter, "plan", plan)
    made = plan_engine(config_of(tiny.directory))
    assert made.left_out and made.drafting.endswith("layer cannot be used: no memory is left for the KV pool")
    for together in (config_of(tiny.directory, ranks=2), config_of(tiny.directory, role="prefill")):
        with pytest.raises(NoRoom, match="the KV pool; --speculative-algorithm none does not load the MTP layer"):
            plan_engine(together)


def test_a_draft_model_tells_what_it_is(tmp_path: Path) -> None:
    tiny = deepseek(tmp_path / "whole")
    trunk, apart = trunk_of(tiny, tmp_path / "trunk"), write_nextn(tmp_path / "apart", tiny, 0)
    made = plan_engine(config_of(trunk, speculative_draft_model_path=str(apart)))
    assert made.config.spec.parts == ["NEXTN"] and made.drafting == f"NEXTN, up to 3 drafts in a row: {apart} is an MTP layer"
    assert text(config_of(trunk, speculative_draft_model_path=str(apart))) == text(config_of(trunk))
    write(tmp_path / "unknown", {}, {"a": torch.zeros(2)})
    with pytest.raises(ConfigError, match=r"unknown: the kind of draft model cannot be recognized .* name it with --speculative-algorithm"):
        plan_engine(config_of(trunk, speculative_draft_model_path=str(tmp_path / "unknown")))


@pytest.mark.parametrize("asked", [{"speculative_num_steps": 2}, {"speculative_draft_model_path": "/x"}, {"speculative_eagle_topk": 2}])
def test_nothing_else_is_asked_of_none(asked: dict[str, Any]) -> None:
    name = next(iter(asked)).replace("_", "-")
    with pytest.raises(ConfigError, match=f"--{name} must be left out with --speculative-algorithm none, got"):
        SpecConfig(speculative_algorithm="NONE", **asked)
