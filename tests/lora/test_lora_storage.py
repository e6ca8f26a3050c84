"""Adapters where the model is divided between ranks, stored in fewer bits, captured in graphs, or computed by Triton's kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mtpserve.config import EngineConfig, LoRAConfig, ParallelConfig
from mtpserve.core.errors import ConfigError
from mtpserve.core.protocols.adapters import LoRARequest
from mtpserve.core.protocols.parallel import ALONE, Ranks
from mtpserve.engine.engine import Engine
from mtpserve.engine.startup.assemble import assemble
from mtpserve.engine.startup.build import adapters_of, build_engine, load_part, options_of, sizes_of
from mtpserve.engine.startup.planning import plan
from mtpserve.engine.updates.adapter_updates import AdapterUpdates
from mtpserve.runtime.graphs.graphs import StepGraphs
from tests.lora.adapters import ASKED, CHAIN, PLAIN, PROMPTS, TREE, Adapter, answers, config_of
from tests.models.checkpoints import Tiny, deepseek, glm4_moe, mimo
from tests.models.gemmas import gemma4
from tests.models.test_tensor_parallel import LARGE
from tests.ranks import on_ranks, thread_ranks
from tests.runtime.recorders import Again, runner_of

ONE, TWO = Adapter(1), Adapter(2, 3, ("q_proj", "v_proj", "down_proj"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def tiny(folder: Path) -> Tiny:
    made = mimo(folder / "base", vocab_size=26, num_attention_heads=4, num_key_value_heads=2)
    ONE.save(folder / "one", made.tensors)
    TWO.save(folder / "two", made.tensors)
    return made


@pytest.fixture(scope="module")
def lora(folder: Path) -> LoRAConfig:
    return LoRAConfig(lora_modules=(f"one={folder / 'one'}", f"two={folder / 'two'}"), max_loras=2, max_lora_rank=5)


@pytest.fixture(scope="module")
def texts(tiny: Tiny, lora: LoRAConfig) -> list[list[int]]:
    """Of the model and the adapters in turn."""
    return answers(build_engine(config_of(tiny.directory, PLAIN, lora)), in_turn(lora))


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def in_turn(lora: LoRAConfig) -> list[LoRARequest | None]:
    return [None, *lora.requests] * 2


def engine_of_rank(config: EngineConfig, ranks: Ranks) -> Engine:
    planned = plan(config)
    model = load_part(planned, ranks, False, None)
    adapters = adapters_of(planned, model, ranks)
    assert adapters is not None
    engine = assemble(model, sizes_of(planned), replace(options_of(planned, [], None), poison=True, adapters=adapters))
    AdapterUpdates(engine, adapters, config.lora, None)
    return engine


@pytest.mark.parametrize(
    ("size", "backend"), [(2, "auto"), (4, "auto"), *(pytest.param(size, "reference", marks=pytest.mark.thorough) for size in (2, 4))]
)
def test_ranks_have_their_parts(tiny: Tiny, lora: LoRAConfig, texts: list[list[int]], size: int, backend: str) -> None:
    """Four ranks have two heads of keys: two of them have the same one."""
    config = replace(config_of(tiny.directory, CHAIN, lora, backend), parallel=ParallelConfig(tensor_parallel_size=size))
    divided = on_ranks(thread_ranks(size), lambda rank: answers(engine_of_rank(config, rank), in_turn(lora)))
    assert divided == [texts] * size
    assert answers(engine_of_rank(replace(config, parallel=ParallelConfig()), ALONE), in_turn(lora)) == texts


@pytest.mark.thorough
def test_processes_of_ranks_load_and_unload(tiny: Tiny, lora: LoRAConfig, texts: list[list[int]], folder: Path) -> None:
    config = replace(config_of(tiny.directory, CHAIN, lora), parallel=ParallelConfig(tensor_parallel_size=2))
    engine = build_engine(config)
    try:
        assert answers(engine, in_turn(lora)) == texts
        again = LoRARequest("again", 3, str(folder / "two"))
        assert answers(engine, [None, lora.requests[0], again] * 2) == texts
        engine.adapters.retire(3)
        assert answers(engine, in_turn(lora)) == texts
    finally:
        engine.close()


@pytest.mark.parametrize("spec", [CHAIN, TREE], ids=["chain", "tree"])
def test_quantised_layers_stay_as_they_are(tiny: Tiny, lora: LoRAConfig, spec: object) -> None:
    """The products of adapters are added to those of int8 matrices."""
    config = config_of(tiny.directory, PLAIN, lora)
    rounded = replace(config, model=replace(config.model, quantization="int8"))
    plain = answers(build_engine(rounded), in_turn(lora))
    drafted = answers(build_engine(replace(rounded, spec=spec)), in_turn(lora))
    assert plain == drafted
    bare = answers(build_engine(replace(rounded, lora=LoRAConfig())), [None] * len(PROMPTS))
    assert plain[0] == bare[0] and plain[3] == bare[3] and plain[1] != bare[1] and plain[2] != bare[2]


@pytest.mark.thorough
def test_float8_matrices_stay_as_they_are(tmp_path: Path) -> None:
    """They are widened for each product, so that a checkpoint of the wide numbers gives the same text; the ranks have their parts."""
    made = glm4_moe(tmp_path / "base", **LARGE)
    adapter = Adapter(3, 4, ("self_attn.q_proj", "self_attn.o_proj"))
    lora = LoRAConfig(lora_modules=(f"it={adapter.save(tmp_path / 'it', made.tensors)}",))
    config = config_of(made.directory, PLAIN, lora, "reference")
    kept = replace(config, model=replace(config.model, quantization="fp8"))
    wide = answers(build_engine(config), [None, *lora.requests] * 3)
    assert answers(build_engine(replace(kept, spec=CHAIN)), [None, *lora.requests] * 3) == wide
    divided = replace(kept, parallel=ParallelConfig(tensor_parallel_size=2))
    assert on_ranks(thread_ranks(2), lambda rank: answers(engine_of_rank(divided, rank), [None, *lora.requests] * 3)) == [wide] * 2


@pytest.mark.parametrize("spec", [PLAIN, CHAIN, TREE], ids=["plain", "chain", "tree"])
def test_captured_steps_are_those_that_are_launched(
    tiny: Tiny, lora: LoRAConfig, texts: list[list[int]], spec: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    def graphs(config: object, step: object, sampling: object, running: int) -> StepGraphs:
        return StepGraphs(step, sampling, Again(), running)  # type: ignore[arg-type]

    monkeypatch.setattr("mtpserve.engine.startup.build.make_graphs", graphs)
    engine = build_engine(replace(config_of(tiny.directory, PLAIN, lora, "reference"), spec=spec), poison=True)
    assert answers(engine, in_turn(lora)) == texts
    assert answers(engine, [None] * 6)[0] == texts[0]
    captured = runner_of(engine).graphs
    assert captured is not None and {key.features.adapters for key in captured.captured} == {False, True}


@pytest.mark.thorough
def test_triton_interpreted(tiny: Tiny, lora: LoRAConfig, texts: list[list[int]]) -> None:
    engine = build_engine(config_of(tiny.directory, CHAIN, lora, "triton"), poison=True)
    assert answers(engine, in_turn(lora)[:3], replace(ASKED, max_tokens=4), PROMPTS[:3]) == [text[:4] for text in texts[:3]]


def test_exact_mode_is_refused_where_it_is_computed_in_tiles(tiny: Tiny, lora: LoRAConfig, folder: Path) -> None:
    exact = replace(CHAIN, speculative_exact=True)
    with pytest.raises(ConfigError, match="--speculative-exact must be left out with --enable-lora"):
        build_engine(config_of(tiny.directory, exact, lora, "reference"))


def test_a_model_without_layers_that_take_adapters(tmp_path: Path) -> None:
    for made in (deepseek(tmp_path / "latent", first_k_dense_replace=0), gemma4(tmp_path / "sandwich")):
        family = made.config["model_type"].partition("_")[0]
        with pytest.raises(ConfigError, match=rf"--enable-lora: no layer of this model \({family}.*\) takes adapters"):
            build_engine(config_of(made.directory, PLAIN, LoRAConfig(enable_lora=True)))
