"""The tool that writes float8 checkpoints; the bundled model still drafts as well after it."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from itertools import islice
from pathlib import Path

import pytest

from mtpserve import LLM
from mtpserve.config import ModelConfig
from mtpserve.weights import quantise
from mtpserve.weights.checkpoint.checkpoint import Checkpoint
from tests import selection
from tests.models.checkpoints import deepseek, mimo
from tests.models.sparse_checkpoints import deepseek_v32

DEMO = ModelConfig().directory


@pytest.mark.parametrize("keep_mtp", [False, True])
def test_which_tensors_become_float8(tmp_path: Path, keep_mtp: bool) -> None:
    for made in (deepseek(tmp_path / "deepseek"), mimo(tmp_path / "mimo")):
        out = tmp_path / f"{made.directory.name}8"
        number = quantise.quantise(made.directory, out, keep_mtp)
        before, after = Checkpoint.open(made.directory).tensors, Checkpoint.open(out).tensors
        float8 = {name for name, entry in after.items() if entry.dtype == "F8_E4M3"}
        assert len(float8) == number and set(after) == set(before) | {name + "_scale_inv" for name in float8}
        inside = {name.removeprefix(made.prefix) for name in float8 if name.startswith(made.prefix)}
        assert bool(inside) != keep_mtp
        assert not any(word in name for name in float8 for word in ("eh_proj", "input_proj", "embed", "head", "norm", "gate.weight"))
        assert {"model.layers.0.self_attn.o_proj.weight", "model.layers.0.mlp.up_proj.weight"} <= float8
        stated = json.loads((out / "config.json").read_text())
        assert stated.pop("quantization_config")["weight_block_size"] == [128, 128] and stated == made.config


def test_an_indexer_is_stored_as_published(tmp_path: Path) -> None:
    quantise.quantise(deepseek_v32(tmp_path / "tiny").directory, tmp_path / "out")
    tensors = Checkpoint.open(tmp_path / "out").tensors
    stored = {name.rpartition("indexer.")[2]: entry.dtype for name, entry in tensors.items() if "indexer" in name}
    float8 = {name for name, dtype in stored.items() if dtype == "F8_E4M3"}
    assert float8 == {"wq_b.weight", "wk.weight"} and "weights_proj.weight" in stored


def test_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    tiny = deepseek(tmp_path / "tiny")
    monkeypatch.setattr(sys, "argv", ["quantise", str(tiny.directory), str(tmp_path / "out"), "--keep-mtp"])
    assert quantise.main() == 0 and "matrices in float8" in capsys.readouterr().out
    assert quantise.main() == 1 and "out" in capsys.readouterr().err  # it overwrites nothing
    monkeypatch.setattr(sys, "argv", ["quantise", str(tmp_path / "out"), str(tmp_path / "again")])
    assert quantise.main() == 0  # what is float8 already stays as it is
    assert Checkpoint.open(tmp_path / "again").tensors["model.layers.0.mlp.up_proj.weight"].dtype == "F8_E4M3"


def test_the_quantised_demo_drafts_as_well_as_the_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Acceptance length on files that the model has not seen: of the Python that runs; a standard error is 0.05."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks" / "demo_model"))
    corpus = import_module("corpus")
    quantise.quantise(DEMO, tmp_path / "demo")
    lengths = []
    for model, quantization in ((str(DEMO), "auto"), (str(tmp_path / "demo"), "fp8")):
        with LLM(model, quantization=quantization, speculative_algorithm="MTP", speculative_adaptive=False, max_total_tokens=16384) as llm:
            encoded = (llm.tokenizer.encode(corpus.read(path)) for path in corpus.held_out())
            asked = list(islice((ids[:64] for ids in encoded if len(ids) > 256), 48 if selection.ALL else 24))
            llm.generate(asked, llm.sampling(max_tokens=40, temperature=0, ignore_eos=True))
            counts = llm.engine.stats.accept_lengths
            lengths.append(sum((accepted + 1) * count for accepted, count in enumerate(counts)) / sum(counts))
    assert lengths[0] > 2.4 and abs(lengths[0] - lengths[1]) < 0.2, lengths
