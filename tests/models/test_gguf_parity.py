"""Models from GGUF files: the logits are transformers', on the weights that the files hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from mtpserve.config import EngineConfig, ModelConfig, SpecConfig
from mtpserve.core.arch.rope import LinearRopeArch, Llama3RopeArch
from mtpserve.core.sampling import SamplingParams
from mtpserve.engine.startup.planning import describe
from mtpserve.llm import LLM
from mtpserve.text.tokenizer import Tokenizer
from mtpserve.tools.inspect import inspect_command as inspect
from tests.models.checkpoints import Tiny, glm4_moe, llama, qwen2, qwen2_moe, qwen3, qwen3_moe
from tests.models.test_families import Make
from tests.models.test_parity import compare
from tests.text import tiny as tiny_tokenizer
from tests.weights.gguf_files import SCALES, as_gguf

LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
BLOCKS = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}  # rows are multiples of 32
SUPER = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 1}  # of 256
MODELS: dict[str, tuple[Make, dict[str, Any]]] = {
    "llama": (llama, {}),
    "llama, tied head, other heads": (llama, {"tie_word_embeddings": True, "num_attention_heads": 3, "num_key_value_heads": 1}),
    "llama, biases": (llama, {"attention_bias": True}),
    "llama, linear rotation": (llama, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "llama 3.2's rotation": (llama, {"rope_scaling": LLAMA3}),
    "qwen2": (qwen2, {}),
    "qwen2, yarn, tied head": (qwen2, {"rope_scaling": YARN, "tie_word_embeddings": True}),
    "qwen2 moe": (qwen2_moe, {"norm_topk_prob": False}),
    "qwen3": (qwen3, {"head_dim": 20}),
    "qwen3 moe": (qwen3_moe, {}),
    "glm 4.5": (glm4_moe, {"use_qk_norm": False}),
    "glm 4.6": (glm4_moe, {"attention_bias": False}),
}


@pytest.mark.parametrize(("make", "options"), MODELS.values(), ids=MODELS.keys())
def test_each_architecture(tmp_path: Path, make: Make, options: dict[str, Any]) -> None:
    compare(as_gguf(make(tmp_path, **options), tmp_path / "model.gguf"), 5)


QUANTISED = [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.MXFP4, *SCALES]


@pytest.mark.parametrize("kind", QUANTISED, ids=lambda kind: kind.name)
def test_each_type(tmp_path: Path, kind: Kind) -> None:
    tiny = llama(tmp_path, **(SUPER if kind in SCALES else BLOCKS))
    compare(as_gguf(tiny, tmp_path / "model.gguf", kind), 5)


def test_experts_that_are_quantised(tmp_path: Path) -> None:
    tiny = qwen3_moe(tmp_path, **BLOCKS, moe_intermediate_size=32)
    compare(as_gguf(tiny, tmp_path / "model.gguf", Kind.Q8_0), 5)


def test_the_mtp_layer_of_a_file(tmp_path: Path) -> None:
    """All of its tensors are placed, and a model with it is described as from the directory."""
    tiny = glm4_moe(tmp_path)
    made = as_gguf(tiny, tmp_path / "model.gguf")
    spec = SpecConfig(speculative_algorithm="MTP")
    found = [describe(EngineConfig(model=ModelConfig(model=str(path)), spec=spec), want_mtp=True) for path in (tmp_path, made.directory)]
    assert found[0].arch == found[1].arch and found[1].mtp_prefix == tiny.prefix
    tensors = [each.checkpoint.tensors for each in found]
    assert tensors[0].keys() == tensors[1].keys()
    for name in tensors[0]:
        assert torch.equal(found[0].checkpoint.tensor(name), found[1].checkpoint.tensor(name)), name


@pytest.mark.parametrize(
    ("scaling", "wanted"),
    [(LLAMA3, Llama3RopeArch(32.0, 1.0, 4.0, 8192)), ({"rope_type": "linear", "factor": 2.5}, LinearRopeArch(2.5)), (None, None)],
)
def test_the_rotations_scaling(tmp_path: Path, scaling: dict[str, Any] | None, wanted: object) -> None:
    tiny: Tiny = as_gguf(llama(tmp_path, rope_scaling=scaling), tmp_path / "model.gguf")
    assert describe(EngineConfig(model=ModelConfig(model=str(tiny.directory))), want_mtp=False).arch.rope.scaling == wanted


def test_text_and_tables_of_a_file_with_a_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From a directory that has this file alone."""
    alone = tmp_path / "alone"
    alone.mkdir()
    tokenizer = tiny_tokenizer.write(tmp_path / "tokenizer")
    made = as_gguf(llama(tmp_path, vocab_size=tiny_tokenizer.VOCAB, **BLOCKS), alone / "model.gguf", Kind.Q4_1, tokenizer=tokenizer)
    prompt = "def read_lines(path):"
    with LLM(str(alone), dtype="float32") as llm:
        (found,) = llm.generate([prompt], SamplingParams(max_tokens=20, temperature=0))
        assert llm.config.model.names == (str(alone),)
    ours = Tokenizer(made.directory)
    ids = ours.encode(prompt)
    assert ids == Tokenizer(tokenizer).encode(prompt)
    wanted: list[int] = []
    while len(wanted) < 20:
        wanted.append(int(made.logits(ids + wanted)[-1].argmax()))
    assert found.tokens == wanted and found.text == ours.decode(found.tokens)
    assert inspect.run([str(alone), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["arch"]["vocab"] == tiny_tokenizer.VOCAB and {row["dtype"] for row in report["weights"]} == {"F32", "Q4_1"}
