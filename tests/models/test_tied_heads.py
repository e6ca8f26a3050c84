"""tie_word_embeddings in the config, and a head of its own in the files: the files are right, as in transformers."""

from __future__ import annotations

import json
import logging
from math import lcm
from pathlib import Path

import pytest
import torch

from mtpserve.config import EngineConfig, ModelConfig, SpecConfig
from mtpserve.core.arch.model import tokens_of_entries
from mtpserve.engine.startup.planning import Described, describe
from mtpserve.heads.standalone import STANDALONE
from tests.models.checkpoints import Tiny, deepseek, llama, mimo, qwen3, write
from tests.models.compressed_checkpoints import deepseek_v4
from tests.models.hybrids import nemotron_h, qwen3_5
from tests.models.own_layouts import ernie, gpt_oss, mimo_v2
from tests.models.test_families import Make
from tests.models.test_parity import FEW, compare

TIED = {"tie_word_embeddings": True}


def described(directory: Path) -> Described:
    return describe(EngineConfig(model=ModelConfig(model=str(directory))), want_mtp=False)


def with_head(tiny: Tiny, directory: Path, head: torch.Tensor) -> Path:
    return write(directory, tiny.config | TIED, tiny.tensors | {"lm_head.weight": head})


@pytest.mark.parametrize("make", [llama, qwen3, gpt_oss, deepseek, mimo, mimo_v2, ernie, qwen3_5, nemotron_h, deepseek_v4])
def test_a_head_that_differs_from_the_embedding_is_used(tmp_path: Path, make: Make, caplog: pytest.LogCaptureFixture) -> None:
    tiny = make(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(tiny.config | TIED))
    with caplog.at_level(logging.WARNING):
        arch = described(tmp_path).arch
    assert not arch.tied_head and "tie_word_embeddings is true, but " in caplog.text and "head.weight and " in caplog.text
    compare(tiny, lcm(5, tokens_of_entries(arch.layers)), cuts=FEW)


def test_a_head_that_is_the_embedding_is_not_loaded_twice(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiny = llama(tmp_path, **TIED)
    embedding = tiny.tensors["model.embed_tokens.weight"].to(torch.bfloat16)
    tiny.tensors["model.embed_tokens.weight"] = embedding.float()
    for number, (head, is_tied) in enumerate(((embedding, True), (embedding.float(), True), (embedding[:, 1:], False))):
        assert described(with_head(tiny, tmp_path / str(number), head)).arch.tied_head == is_tied, "whatever its dtype"


def test_a_draft_model_too(tmp_path: Path) -> None:
    tiny = llama(tmp_path)
    directory = with_head(tiny, tmp_path / "draft", tiny.tensors["lm_head.weight"])
    spec = SpecConfig(speculative_algorithm="STANDALONE", speculative_draft_model_path=str(directory))
    head = STANDALONE.open(directory, EngineConfig(model=ModelConfig(model=str(tmp_path)), spec=spec), described(tmp_path).arch)
    assert "model.head.weight" in {rule.target for rule in head.rules}
