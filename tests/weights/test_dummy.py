"""Random weights: no checkpoint is needed, the numbers are the same every time, and they stay numbers through many layers."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch

from mtpserve import LLM, SamplingParams
from mtpserve.config import CacheConfig, EngineConfig, ModelConfig, SpecConfig
from mtpserve.core.errors import ConfigError, InvalidRequest, LoadError, UnsupportedModel
from mtpserve.core.sampling import GrammarSpec
from mtpserve.engine.startup.planning import describe, empty_model, plan, positions
from mtpserve.engine.startup.storage import Storage
from mtpserve.layers.decoder import DecoderModel, Methods
from mtpserve.layers.devices.torch_kernels import torch_kernels
from mtpserve.models import deepseek, gqa
from mtpserve.quant.unquantized import Unquantized
from mtpserve.text.tokenizer import tokenizer_of
from mtpserve.tools.inspect.checkpoint import inspect_model
from mtpserve.weights.dummy import fill
from tests.tiny import CONTEXT, run, tiny_arch, tiny_engine

MTP = SpecConfig(speculative_algorithm="MTP")
POOL = CacheConfig(max_total_tokens=1024)


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """The demo's config and nothing else."""
    shutil.copy(ModelConfig().directory / "config.json", tmp_path)
    return tmp_path


def configured(bare: Path, spec: SpecConfig = MTP) -> EngineConfig:
    return EngineConfig(model=ModelConfig(model=str(bare), load_format="dummy", dtype="float32"), cache=POOL, spec=spec)


def deep(family: str, dtype: torch.dtype, layers: int = 60) -> DecoderModel:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    build = deepseek.build if family in ("deepseek", "sparse") else gqa.build
    try:
        model = build(tiny_arch(family, layers), Methods.all(Unquantized(torch_kernels())), dtype, CONTEXT + 160, torch_kernels())
    finally:
        torch.set_default_dtype(before)
    fill(model, torch.device("cpu"))
    return model.eval()


@pytest.mark.covering(1)
@pytest.mark.parametrize("family", ["deepseek", "sparse", "mimo"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixty_layers_stay_finite(family: str, dtype: torch.dtype) -> None:
    model = deep(family, dtype)
    tokens = run(tiny_engine(model, 3), [list(range(20)), [5]], SamplingParams(max_tokens=12, temperature=0))
    assert [len(each) for each in tokens] == [12, 12]
    hidden = torch.randn(4, 32).to(dtype)
    assert 0.2 < model.logits(hidden).std() < 5


def test_the_numbers_are_the_same_every_time() -> None:
    one, other = (deep("deepseek", torch.float32, 2).state_dict() for _ in range(2))
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not torch.equal(one["layers.0.attention.out.weight"], one["layers.1.attention.out.weight"])


def test_an_engine_without_a_checkpoint_or_a_tokenizer(bare: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.WARNING),
        LLM(str(bare), speculative_algorithm="MTP", load_format="dummy", max_total_tokens=1024, dtype="float32") as llm,
    ):
        asked = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
        by_ids, by_text = llm.generate([[1, 2, 3], "1 2 3"], asked)
        assert by_ids.tokens == by_text.tokens and by_ids.drafted > 0
        assert by_ids.text.split() == [str(token) for token in by_ids.tokens]
        with pytest.raises(InvalidRequest, match="needs a tokenizer, and this engine was started without one"):
            llm.generate("1", SamplingParams(grammar=GrammarSpec("regex", "a+")))
    assert "DUMMY WEIGHTS" in caplog.text


@pytest.mark.parametrize("spec", [MTP, SpecConfig(speculative_algorithm="none")], ids=["mtp", "plain"])
def test_the_memory_plan_is_nearly_that_of_the_real_checkpoint(bare: Path, spec: SpecConfig) -> None:
    real = dict(plan(EngineConfig(model=ModelConfig(dtype="float32"), cache=POOL, spec=spec)).memory.rows)
    dummy = dict(plan(configured(bare, spec)).memory.rows)
    # What the checkpoint does not have, the module may: its routers' biases.
    assert abs(dummy.pop("weights") - real.pop("weights")) < 4096
    assert dummy == real


def test_inspect(bare: Path) -> None:
    report = inspect_model(configured(bare))
    groups = {row[0]: row[2] for row in report.weights}
    assert set(groups) == {"MTP layer", "attention", "embedding", "experts", "feed-forward", "head", "norms"}
    assert groups["embedding"] == groups["head"] == report.arch.vocab * report.arch.hidden
    config, memory = configured(bare), dict(report.memory)
    found = plan(config)
    tables = empty_model(found.described, found.dtype, positions(config, report.arch, found.device), Storage(False, found.dtype)).buffers()
    held = memory["weights"] + memory["weights, MTP layer"]
    assert sum(row[4] for row in report.weights) + sum(table.nbytes for table in tables) == held
    assert any("dummy" in note for note in report.notes)


def test_the_config_says_whether_there_is_an_mtp_layer(bare: Path) -> None:
    config = json.loads((bare / "config.json").read_text())
    (bare / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    with pytest.raises(UnsupportedModel, match="no MTP layer"):
        describe(configured(bare), want_mtp=True)
    assert describe(configured(bare, SpecConfig(speculative_algorithm="none")), want_mtp=False).arch.mtp is None


def test_what_it_cannot_go_with(bare: Path) -> None:
    with pytest.raises(ConfigError, match="speculative-draft-model-path must be left out with --load-format dummy"):
        describe(configured(bare, SpecConfig(speculative_algorithm="MTP", speculative_draft_model_path="/x")), want_mtp=True)
    (bare / "config.json").write_text("{}")
    with pytest.raises(LoadError, match="has no vocab_size"):
        tokenizer_of(configured(bare).model)
    with pytest.raises(LoadError, match=r"tokenizer\.json: no such file"):
        tokenizer_of(ModelConfig(model=str(bare)))
