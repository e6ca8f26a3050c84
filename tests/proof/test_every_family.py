"""`mtpserve prove` holds for every family with MTP layers, on tiny checkpoints with random weights, of which most drafts are rejected."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from mtpserve.tools.prove.proof import prove
from tests import selection
from tests.models.chained import step
from tests.models.checkpoints import deepseek, glm4_moe, glm4_moe_lite, mimo
from tests.models.compressed_checkpoints import deepseek_v4
from tests.models.hybrids import nemotron_h, qwen3_5, qwen3_5_moe, qwen3_next
from tests.models.ling import ling
from tests.models.longcat import longcat
from tests.models.own_layouts import ernie, mimo_v2
from tests.models.sparse_checkpoints import deepseek_v32, glm_dsa

MAKES = (
    deepseek, deepseek_v32, deepseek_v4, ernie, glm4_moe, glm4_moe_lite, glm_dsa, ling, longcat, mimo, mimo_v2, nemotron_h, qwen3_5,
    qwen3_5_moe, qwen3_next, step,
)  # fmt: skip
CHARACTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
DRAWS = 100 if selection.ALL else 8  # what is drawn has nothing to do with families: tests/spec looks at many draws
PROMPTS = ["".join(CHARACTERS[(7 * i + 3 * j) % 26] for j in range(5 + 6 * i)) for i in range(3)]


def write_tokenizer(directory: Path) -> None:
    """A token for each character."""
    size = json.loads((directory / "config.json").read_text())["vocab_size"]
    tokenizer = Tokenizer(models.BPE(vocab={character: i for i, character in enumerate(CHARACTERS[:size])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))


@pytest.mark.parametrize("make", MAKES)
def test_it_holds(tmp_path: Path, make: Callable[..., Any]) -> None:
    make(tmp_path)
    write_tokenizer(tmp_path)
    options: dict[str, Any] = {
        "model": str(tmp_path), "dtype": "float32", "max_total_tokens": 2048, "max_running_requests": 32, "random_seed": 1,
        "speculative_algorithm": "NEXTN", "speculative_num_steps": 3,
    }  # fmt: skip
    proof = prove(options, PROMPTS, tokens=24 if selection.ALL else 16, draws=DRAWS)
    assert proof.holds, (proof.divergences, proof.laws)
    assert len(proof.laws) == 12 and min(proof.drafted[:3]) > 0
