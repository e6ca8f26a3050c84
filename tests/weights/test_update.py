"""Named tensors become the weights of a model that serves: afterwards it is, to the last bit, the model that is loaded from them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from mtpserve.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, SpecConfig
from mtpserve.core.protocols.control import CheckWeights, OnEveryRank, ReadWeights, Reply, StageCheckpoint, UpdateTensors, UpdateWeights
from mtpserve.engine.engine import Engine
from mtpserve.engine.startup.build import build_engine
from mtpserve.weights.checkpoint.checkpoint import Checkpoint
from tests.heads.eagles import eagle3
from tests.models.chained import step
from tests.models.checkpoints import deepseek, glm4_moe, llama, mimo, write
from tests.models.compressed_checkpoints import deepseek_v4
from tests.models.gemmas import FULL, SLIDING, SMALL, gemma4
from tests.models.hybrids import nemotron_h, qwen3_5_moe, qwen3_next
from tests.models.own_layouts import ernie, gpt_oss, mimo_v2
from tests.models.sparse_checkpoints import deepseek_v32, glm_dsa
from tests.weights.differences import changed, differences
from tests.weights.published import LAYOUTS, converted, write as write_published

Make = Callable[..., Any]
MTP, NONE = SpecConfig(speculative_algorithm="NEXTN"), SpecConfig(speculative_algorithm="none")
REFERENCE = {"attention_backend": "reference"}
# The family, its config, options of the model.
CASES: list[tuple[Make, dict[str, Any], dict[str, Any]]] = [
    (deepseek, {}, {}),
    (deepseek, {}, REFERENCE),
    (deepseek, {"fp8": True}, {"quantization": "fp8"}),
    (mimo, {"tie_word_embeddings": True}, {"quantization": "int8"}),
    (gpt_oss, {"mxfp4": True}, {"quantization": "int4"}),
    (qwen3_next, {}, {}),
    (nemotron_h, {}, {}),
    (deepseek_v4, {}, {}),
    (gemma4, SMALL | {"num_hidden_layers": 3, "layer_types": [SLIDING, FULL, FULL], "num_kv_shared_layers": 1}, {}),
]
THOROUGH: list[tuple[Make, dict[str, Any], dict[str, Any]]] = [
    *((make, {}, {}) for make in (deepseek_v32, ernie, glm4_moe, glm_dsa, mimo, mimo_v2, qwen3_5_moe, step, gpt_oss)),
    *((make, {}, REFERENCE) for make in (deepseek_v4, mimo, nemotron_h, qwen3_next, step, llama)),
    (deepseek, {"fp8": True}, {}),
    (mimo, {"tie_word_embeddings": True}, REFERENCE),
]


def engine_of(directory: Path, spec: SpecConfig | None = None, **model: Any) -> Engine:
    has_layer = any("mtp" in name or ".3." in name for name in Checkpoint.open(directory).tensors)
    return build_engine(
        EngineConfig(
            model=ModelConfig(model=str(directory), device="cpu", **({"dtype": "float32"} | model)),
            cache=CacheConfig(max_total_tokens=512),
            spec=spec or (MTP if has_layer else NONE),
            scheduler=SchedulerConfig(max_running_requests=2),
        )
    )


def model_of(engine: Engine) -> nn.Module:
    model: nn.Module = engine.runner.step.model  # type: ignore[attr-defined]
    return model


def tensors_of(directory: Path) -> dict[str, Tensor]:
    checkpoint = Checkpoint.open(directory)
    return {name: checkpoint.tensor(name).clone() for name in checkpoint.tensors}


def take(engine: Engine, tensors: dict[str, Tensor]) -> Reply:
    return engine.controls.take(UpdateTensors(tensors))


def addresses(engine: Engine) -> dict[str, int]:
    handler: Any = engine.controls._handlers[CheckWeights]
    tensors = handler.__self__.weights.tensors()
    return {name: tensor.data_ptr() for name, tensor in tensors if not tensor.is_mkldnn}


def in_parts(engine: Engine, tensors: dict[str, Tensor], size: int = 7) -> Reply:
    """In any order, a few at a time: matrices of one parameter, and a matrix and its scales, come apart."""
    items = list(tensors.items())
    random.Random(0).shuffle(items)
    for first in range(0, len(items), size):
        reply = take(engine, dict(items[first : first + size])).check()
    return reply


@pytest.mark.parametrize(("make", "options", "model"), [*CASES, *(pytest.param(*case, marks=pytest.mark.thorough) for case in THOROUGH)])
def test_the_model_is_the_one_that_is_loaded_from_them(tmp_path: Path, make: Make, options: Any, model: Any) -> None:
    make(tmp_path / "old", **options)
    old, config = tensors_of(tmp_path / "old"), json.loads((tmp_path / "old" / "config.json").read_text())
    write(tmp_path / "new", config, changed(old))
    engine, fresh = engine_of(tmp_path / "old", **model), engine_of(tmp_path / "new", **model)
    assert differences(model_of(engine), model_of(fresh))
    engine.controls.take(OnEveryRank(CheckWeights("snapshot"))).check()
    where = addresses(engine)
    assert in_parts(engine, changed(old)).values["waiting"] == []
    assert addresses(engine) == where, "captured steps and described layers hold them"
    assert not differences(model_of(engine), model_of(fresh))
    engine.controls.take(UpdateWeights(StageCheckpoint(str(tmp_path / "old")), "v3")).check()
    engine.controls.take(OnEveryRank(CheckWeights("compare"))).check()
    assert engine.weight_version == "v3"


@pytest.mark.parametrize(
    "layout",
    ["AWQ", pytest.param("float8 per channel", marks=pytest.mark.thorough), "MXFP4", "NVFP4", "NVFP4, packed", "GPTQ in act order"],
)
def test_stored_matrices_stay_as_they_are_stored(tmp_path: Path, layout: str) -> None:
    config, writer = LAYOUTS[layout]
    tiny = llama(tmp_path / "wide", hidden_size=128, intermediate_size=256, head_dim=32)
    tensors = {
        which: converted(of, lambda name: name.endswith("proj.weight"), writer)[0]
        for which, of in (("old", tiny.tensors), ("new", changed(tiny.tensors)))
    }
    for which in tensors:
        write_published(tmp_path / which, tiny.config | {"quantization_config": config}, tensors[which])
    kind = {"quantization": "fp8" if "float8" in layout else "int4"}
    engine, fresh = engine_of(tmp_path / "old", **kind), engine_of(tmp_path / "new", **kind)
    stored = [name for name in model_of(engine).state_dict() if name.endswith("_scale_inv")]
    assert bool(stored) == (layout != "GPTQ in act order") and differences(model_of(engine), model_of(fresh))
    assert in_parts(engine, tensors["new"]).values["waiting"] == []
    assert not differences(model_of(engine), model_of(fresh))
    if stored:
        reply = take(engine, {name: tensor for name, tensor in tiny.tensors.items() if ".layers.0." in name})
        assert "send its numbers and scales in that format" in reply.error
        assert not differences(model_of(engine), model_of(fresh))


def test_a_head_that_was_published_apart(tmp_path: Path) -> None:
    """Its names are also the model's: a prefix tells them apart. A table of its tokens cannot change."""
    tiny = llama(tmp_path / "model", num_hidden_layers=8)
    eagle3(tmp_path / "head", tiny)
    spec = SpecConfig(speculative_algorithm="EAGLE3", speculative_draft_model_path=str(tmp_path / "head"))
    engine, new = engine_of(tmp_path / "model", spec), changed(tensors_of(tmp_path / "head"))
    write(tmp_path / "new", json.loads((tmp_path / "head" / "config.json").read_text()), new)
    fresh = engine_of(tmp_path / "model", SpecConfig(speculative_algorithm="EAGLE3", speculative_draft_model_path=str(tmp_path / "new")))
    take(engine, {f"draft:{name}": tensor for name, tensor in new.items()}).check()
    assert not differences(model_of(engine), model_of(fresh))
    assert "d2t is a table that cannot change" in take(engine, {"draft:d2t": new["d2t"] + 1}).error
    engine.controls.take(UpdateWeights(StageCheckpoint(str(tmp_path / "head"), "draft:"))).check()
    assert differences(model_of(engine), model_of(fresh))
    with pytest.raises(Exception, match="prefix must be one of"):
        engine.controls.take(UpdateWeights(StageCheckpoint(str(tmp_path / "head"), "other:"))).check()


def test_a_head_for_frequent_tokens_is_a_copy(tmp_path: Path) -> None:
    """--speculative-token-map: the copy of these tokens' rows follows the head."""
    tiny = mimo(tmp_path / "old")
    write(tmp_path / "new", tiny.config, changed(tiny.tensors))
    save_file({"tokens": torch.tensor([1, 3, 4, 9])}, tmp_path / "map.safetensors")
    spec = replace(MTP, speculative_token_map=str(tmp_path / "map.safetensors"))
    engine, fresh = engine_of(tmp_path / "old", spec), engine_of(tmp_path / "new", spec)
    assert differences(heads(engine), heads(fresh))
    take(engine, changed(tiny.tensors)).check()
    assert len(heads(engine)) == 1 and not differences(heads(engine), heads(fresh))


def heads(engine: Engine) -> list[nn.Module]:
    model: Any = model_of(engine)
    return [head for head, _ in model.subset_heads]


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Engine, dict[str, Tensor]]:
    tiny = mimo(tmp_path_factory.mktemp("small"))
    return engine_of(tiny.directory), dict(tiny.tensors)


Q, K, V = (f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv")
GATE, UP = "model.layers.1.mlp.gate_proj.weight", "model.layers.1.mlp.up_proj.weight"


def nan(tensor: Tensor) -> Tensor:
    poisoned = tensor.clone()
    poisoned.view(-1)[-1] = torch.nan
    return poisoned


@pytest.mark.parametrize(
    ("name", "of", "message"),
    [
        ("model.layers.9.mlp.gate_proj.weight", lambda t: t, "model.layers.9.mlp.gate_proj.weight: the model has no parameter"),
        (UP, lambda t: t[:-1].contiguous(), f"{UP} has shape"),
        (UP, lambda t: t.to(torch.int32), f"{UP} is stored as I32"),
        (UP, lambda t: t.to(torch.complex64), f"{UP} has the unknown dtype"),
        (UP, nan, f"{UP} holds NaN"),
        (UP, lambda t: t.double() * 1e300, f"{UP} holds numbers too large"),
    ],
)
def test_a_broken_update_changes_nothing(
    small: tuple[Engine, dict[str, Tensor]], name: str, of: Callable[[Tensor], Tensor], message: str
) -> None:
    engine, tensors = small
    engine.controls.take(OnEveryRank(CheckWeights("snapshot"))).check()
    reply = take(engine, changed(tensors) | {name: of(tensors[UP])})
    assert message in reply.error
    engine.controls.take(OnEveryRank(CheckWeights("compare"))).check()
    assert take(engine, changed(tensors, 5)).error == ""
    assert "weights differ" in engine.controls.take(OnEveryRank(CheckWeights("compare"))).error
    take(engine, tensors).check()
    engine.controls.take(OnEveryRank(CheckWeights("compare"))).check()


def test_parts_of_a_parameter_wait_for_each_other(small: tuple[Engine, dict[str, Tensor]]) -> None:
    engine, tensors = small
    new = changed(tensors)
    before = engine.fingerprint
    bias = [name.replace("weight", "bias") for name in (Q, K, V)]
    assert take(engine, {Q: new[Q]}).values == {"waiting": [Q], "parameters": 0}
    assert engine.fingerprint == before  # nothing has changed yet
    assert sorted(take(engine, {K: new[K]}).values["waiting"]) == sorted([Q, K])
    assert take(engine, {V: tensors[V]}).values["parameters"] == 0  # packed together with the bias
    assert take(engine, {V: new[V]} | {name: new[name] for name in bias}).values["waiting"] == []
    assert engine.fingerprint != before
    read = engine.controls.take(OnEveryRank(ReadWeights(V, 3))).check().values["parameter"]
    assert torch.equal(torch.tensor(read), new[V][:3]), "the later one"
    take(engine, tensors).check()


def test_what_is_read_is_what_was_written(small: tuple[Engine, dict[str, Tensor]]) -> None:
    engine, tensors = small
    for name, tensor in tensors.items():
        values = engine.controls.take(OnEveryRank(ReadWeights(name, 4))).check().values["parameter"]
        assert torch.equal(torch.tensor(values), tensor[:4]), name
    assert "no parameter" in engine.controls.take(OnEveryRank(ReadWeights("x", 4))).error
    sums = engine.controls.take(OnEveryRank(CheckWeights("checksum"))).values["checksums"]
    assert len(sums) > 10 and all(len(value) == 32 for value in sums.values())
