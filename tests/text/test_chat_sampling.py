"""Sampling of chats that name none: the checkpoint's, the model card's, or mtpserve's own."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mtpserve.config import ModelConfig
from mtpserve.text.chat_sampling import GENERAL, ChatSampling, chat_sampling


def stub(defaults: dict[str, Any] | None = None, chat: bool = True) -> Any:
    return SimpleNamespace(defaults=defaults or {}, has_chat_template=chat)


def checkpoint(folder: Path, **config: Any) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(("name", "config", "values"), [
    ("SmolLM2-135M-Instruct", {"model_type": "llama"}, {"temperature": 0.2, "top_p": 0.9}),
    ("a", {"model_type": "qwen3_moe"}, {"temperature": 0.6, "top_p": 0.95, "top_k": 20}),
    ("Qwen3-4B-Instruct-2507", {"model_type": "qwen3"}, {"temperature": 0.7, "top_p": 0.8, "top_k": 20}),
    ("DeepSeek-R1-Distill-Qwen-7B", {"model_type": "qwen2"}, {"temperature": 0.6, "top_p": 0.95}),
    ("a", {"model_type": "qwen3_5"}, {"temperature": 1.0, "top_p": 0.95, "top_k": 20}),
    ("b", {"_name_or_path": "org/Llama-3.1-8B"}, {"temperature": 0.6, "top_p": 0.9}),
    ("LongCat-Flash-Thinking", {"model_type": "longcat_flash"}, {"temperature": 1.0, "top_p": 0.95}),
    ("Ring-flash-2.0", {"model_type": "bailing_moe"}, {"temperature": 0.7, "top_p": 0.8}),
    ("models--zai-org--GLM-4.5-Air/snapshots/0f3c", {"model_type": "glm4_moe"}, {"temperature": 0.6, "top_p": 0.95}),
])  # fmt: skip
def test_a_published_model_has_its_cards_values(tmp_path: Path, name: str, config: dict[str, str], values: dict[str, float]) -> None:
    model = ModelConfig(model=str(checkpoint(tmp_path / name, **config)))
    assert chat_sampling(model, stub()) == ChatSampling("model card", values)


def test_any_other_model_has_the_general_values(tmp_path: Path) -> None:
    model = ModelConfig(model=str(checkpoint(tmp_path / "qwen3" / "mine", model_type="llama")))
    assert chat_sampling(model, stub()) == ChatSampling("mtpserve", GENERAL), "the folder above is no name of the model"
    (tmp_path / "empty").mkdir()
    assert chat_sampling(ModelConfig(model=str(tmp_path / "empty")), stub()).source == "mtpserve"


def test_the_name_that_the_api_shows_tells_the_model_too(tmp_path: Path) -> None:
    path = str(checkpoint(tmp_path / "0f3c", model_type="llama"))
    assert chat_sampling(ModelConfig(model=path, served_model_name=("smollm2",)), stub()).effective_values["temperature"] == 0.2


def test_what_the_checkpoint_says_comes_first(tmp_path: Path) -> None:
    model = ModelConfig(model=str(checkpoint(tmp_path / "smollm2")))
    sampling = chat_sampling(model, stub({"top_k": 5}))
    assert sampling == ChatSampling("checkpoint", {"top_k": 5})
    assert sampling.effective_values == {"temperature": 1.0, "top_p": 1.0, "top_k": 5, "min_p": 0.0}
    assert sampling.defaults(named=True) == {"top_k": 5}, "each field that a request leaves out"


def test_the_raw_law_is_there_for_who_asks_and_where_nobody_chats(tmp_path: Path) -> None:
    path = str(checkpoint(tmp_path / "smollm2"))
    for name in ("openai", "vllm"):
        assert chat_sampling(ModelConfig(model=path, sampling_defaults=name), stub()) == ChatSampling()
    assert chat_sampling(ModelConfig(model=path), stub(chat=False)) == ChatSampling()
    assert ChatSampling().effective_values == {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}


def test_the_values_hold_together() -> None:
    sampling = ChatSampling("mtpserve", GENERAL)
    assert sampling.defaults(named=False) == GENERAL
    assert sampling.defaults(named=True) == {}


@pytest.mark.parametrize(("sampling", "words"), [
    (ChatSampling(), "temperature 1 (the model's own distribution)"),
    (ChatSampling("checkpoint", {"temperature": 0.6, "top_k": 20}), "temperature 0.6, top_k 20 (as the checkpoint says)"),
    (ChatSampling("mtpserve", GENERAL), "temperature 0.7, top_p 0.95, min_p 0.05 (neither checkpoint nor model card says)"),
])  # fmt: skip
def test_words_of_the_log(sampling: ChatSampling, words: str) -> None:
    assert str(sampling) == words
