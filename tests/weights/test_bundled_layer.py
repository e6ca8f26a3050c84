"""The MTP layer that the package has for a model of another one: which options it drafts for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mtpserve.config import EngineConfig, ModelConfig, SpecConfig
from mtpserve.weights.checkpoint import hub
from mtpserve.weights.checkpoint.hub import BUNDLED_LAYERS, fetched


@pytest.fixture(autouse=True)
def layer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    folder = tmp_path / "layer"
    folder.mkdir()
    monkeypatch.setitem(BUNDLED_LAYERS, "smollm2", folder)
    return folder


@pytest.fixture(autouse=True)
def package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The model's, which is not installed everywhere."""
    file = tmp_path / "SmolLM2.gguf"
    file.touch()
    found = hub.gguf_file
    monkeypatch.setattr(hub, "gguf_file", lambda name: str(file) if name == "smollm2" else found(name))
    return file


def spec(model: str = "smollm2", load_format: str = "auto", **options: Any) -> SpecConfig:
    return fetched(EngineConfig(model=ModelConfig(model=model, load_format=load_format), spec=SpecConfig(**options))).spec


@pytest.mark.parametrize("algorithm", [None, "auto", "MTP", "nextn", "EAGLE", "MTP+NGRAM"])
def test_it_drafts_where_the_models_own_layer_would(algorithm: str | None, layer: Path) -> None:
    found = spec(speculative_algorithm=algorithm)
    assert (found.speculative_draft_model_path, found.speculative_token_map) == (str(layer), str(layer / "token_map.json"))
    assert found.speculative_algorithm == algorithm


@pytest.mark.parametrize("algorithm", ["none", "NGRAM"])
def test_it_is_left_out_where_something_else_drafts(algorithm: str) -> None:
    assert spec(speculative_algorithm=algorithm) == SpecConfig(speculative_algorithm=algorithm)


def test_a_package_without_it_has_the_model_as_published(layer: Path) -> None:
    layer.rmdir()
    assert spec(speculative_algorithm="NEXTN") == SpecConfig(speculative_algorithm="NEXTN")


def test_options_come_first(tmp_path: Path, package: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    found = spec(speculative_algorithm="NEXTN", speculative_draft_model_path=str(other))
    assert (found.speculative_draft_model_path, found.speculative_token_map) == (str(other), None)
    assert spec(speculative_token_map="mine.json").speculative_token_map == "mine.json"
    assert spec(model=str(package)) == spec(load_format="dummy") == SpecConfig(), "only the name means it"
