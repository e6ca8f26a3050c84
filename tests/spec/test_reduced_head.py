"""Drafting over a part of the vocabulary: the text stays, the drafts come from the part, and the whole as a part is no part."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mtpserve.config import CacheConfig, EngineConfig, ModelConfig, SpecConfig
from mtpserve.core.errors import ConfigError
from mtpserve.core.request import Request
from mtpserve.core.sampling import SamplingParams
from mtpserve.engine.engine import Engine
from mtpserve.engine.startup.build import build_engine
from mtpserve.engine.startup.planning import plan
from mtpserve.layers.devices.onednn import MIN_PACKED_BYTES
from mtpserve.layers.devices.torch_kernels import torch_kernels
from mtpserve.layers.embedding import TiedHead
from mtpserve.layers.linear import Linear
from mtpserve.quant.fp8 import FP8, quantize_block
from mtpserve.quant.unquantized import Unquantized
from mtpserve.spec.build import reduced_head
from mtpserve.tools.inspect.checkpoint import token_map
from mtpserve.weights.checkpoint.checkpoint import INDEX
from mtpserve.weights.quantise import quantise
from tests.runtime.recorders import runner_of
from tests.spec.diagonal import diagonal
from tests.tiny import VOCAB, prompts, run, tiny_engine, tiny_model

CHAIN = SpecConfig(speculative_algorithm="MTP", speculative_num_steps=3)
TREE = SpecConfig(speculative_algorithm="MTP", speculative_num_steps=3, speculative_eagle_topk=3, speculative_num_draft_tokens=8)
BOTH = SpecConfig(speculative_algorithm="MTP+NGRAM", speculative_num_steps=3)
HOT = list(range(1, VOCAB, 2))
GREEDY = SamplingParams(max_tokens=24, temperature=0)
RULES = SamplingParams(max_tokens=24, temperature=0, frequency_penalty=0.8, logit_bias={HOT[0]: 2.0, 2: -3.0})
SAMPLED = SamplingParams(max_tokens=24, temperature=0.8, top_p=0.9, seed=7)


def proposed(engine: Engine, params: SamplingParams) -> set[int]:
    """Every draft of some requests that are run to their end."""
    for i, prompt in enumerate(prompts(6)):
        engine.add(Request(str(i), prompt, params))
    found: set[int] = set()
    while engine.has_work:
        for event in engine.step():
            assert event.error is None
            found |= set(event.proposal.tokens)
    return found


@pytest.mark.parametrize("spec", [CHAIN, TREE, BOTH], ids=["chain", "tree", "both"])
@pytest.mark.parametrize("params", [GREEDY, RULES], ids=["greedy", "rules"])
def test_greedy_text_does_not_depend_on_the_map(spec: SpecConfig, params: SamplingParams) -> None:
    model, asked = tiny_model(), prompts(8)
    expected = run(tiny_engine(model, 0), asked, params)
    assert run(tiny_engine(model, spec, token_map=HOT), asked, params) == expected
    assert run(tiny_engine(model, spec, token_map=[5]), asked, params) == expected


@pytest.mark.parametrize("spec", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("params", [GREEDY, RULES, SAMPLED], ids=["greedy", "rules", "sampled"])
def test_drafts_come_from_the_map(spec: SpecConfig, params: SamplingParams) -> None:
    found = proposed(tiny_engine(tiny_model(), spec, token_map=HOT), params)
    assert len(found) > 5 and found <= set(HOT)


@pytest.mark.parametrize(
    ("spec", "params"), diagonal({"chain": CHAIN, "tree": TREE, "both": BOTH}, {"rules": RULES, "sampled": SAMPLED, "greedy": GREEDY})
)
def test_a_map_of_all_tokens_is_no_map(spec: SpecConfig, params: SamplingParams) -> None:
    model, asked = tiny_model(), prompts(8)
    without, whole = tiny_engine(model, spec), tiny_engine(model, spec, token_map=list(range(VOCAB)))
    assert run(whole, asked, params) == run(without, asked, params)
    assert whole.stats == without.stats


def test_the_choice_is_the_same_by_either_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy drafts look at the part alone; a rule that does nothing sends them through the whole vocabulary."""
    model, asked = tiny_model(), prompts(8)
    idle = SamplingParams(max_tokens=24, temperature=0, logit_bias={0: 0.0})
    for spec in (CHAIN, TREE):
        short, long = tiny_engine(model, spec, token_map=HOT), tiny_engine(model, spec, token_map=HOT)
        assert run(short, asked, GREEDY) == run(long, asked, idle)
        assert short.stats == long.stats


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("outputs", [40, 1 + MIN_PACKED_BYTES // 128])
def test_rows_of_a_head_packed_or_not(dtype: torch.dtype, outputs: int) -> None:
    head = Linear(64, (outputs,), Unquantized(torch_kernels()))
    head.weight.data = torch.randn(outputs, 64).to(dtype)
    wanted, ids = head.weight.data[[3, 17, 39]].clone(), torch.tensor([3, 17, 39])
    head.finish_loading()
    assert torch.equal(head.rows(ids), wanted)


def test_a_tied_head_gives_copies_of_the_embedding() -> None:
    model = tiny_model()
    model.head = TiedHead(model.embed, Unquantized(torch_kernels()))
    assert model.mtp_head is not None
    part = reduced_head(model, model.mtp_head, HOT)
    hidden = torch.randn(5, 32)
    assert part is not None
    torch.testing.assert_close(part.multiply(hidden, 0), model.logits(hidden)[:, HOT])
    assert torch.equal(part.spread(part.multiply(hidden, 0))[:, HOT], part.multiply(hidden, 0))


def demo(tmp_path: Path, size: int | None, dtype: str = "float32") -> EngineConfig:
    model, path = ModelConfig(dtype=dtype), tmp_path / "map.json"
    if size is not None:
        sources = [str(file) for file in sorted(Path(os.__file__).parent.glob("[a-d]*.py"))]
        token_map(EngineConfig(model=model), size, sources).write(path)
    spec = SpecConfig(speculative_algorithm="MTP", speculative_token_map=None if size is None else str(path))
    return EngineConfig(model=model, cache=CacheConfig(max_total_tokens=2048), spec=spec)


def test_the_demo_model_accepts_nearly_as_much_over_a_quarter_of_its_tokens(tmp_path: Path) -> None:
    from mtpserve.text.tokenizer import Tokenizer

    tokenizer = Tokenizer(ModelConfig().directory)
    asked = [tokenizer.encode(text) for text in ("import os\n\ndef read", "class Node:\n    def", "for line in file:\n", "    try:\n")]
    params = SamplingParams(max_tokens=96, temperature=0, ignore_eos=True)
    lengths, texts = [], []
    for size in (None, 1024):
        engine = build_engine(demo(tmp_path, size))
        texts.append(run(engine, asked, params))
        lengths.append(1 + engine.stats.accepted_tokens_total / engine.stats.drafts_total)
    assert texts[0] == texts[1]
    assert lengths[0] - 0.4 < lengths[1] <= lengths[0] + 0.1


def test_the_memory_plan_counts_the_copy(tmp_path: Path) -> None:
    planned = plan(demo(tmp_path, 300))
    found, dtype, memory = planned.described, planned.dtype, planned.memory
    assert dict(memory.rows)["draft head, reduced"] == 300 * found.arch.hidden * dtype.itemsize
    assert "draft head, reduced" not in dict(plan(demo(tmp_path, None)).memory.rows)


def test_a_map_needs_an_mtp_layer(tmp_path: Path) -> None:
    for algorithm, wanted in (("none", "left out with --speculative-algorithm none"), ("NGRAM", "left out without a draft model")):
        with pytest.raises(ConfigError, match=f"speculative-token-map must be {wanted}"):
            SpecConfig(speculative_algorithm=algorithm, speculative_token_map="x.json")


def test_the_written_file_is_the_one_that_is_read(tmp_path: Path) -> None:
    config = demo(tmp_path, 300)
    written = json.loads((tmp_path / "map.json").read_text())
    found = plan(config).described
    assert found.token_map == written["tokens"] and len(written["tokens"]) == 300
    assert set(found.arch.eos_ids) <= set(written["tokens"])


@pytest.mark.parametrize(("head", "dtype"), diagonal({"trunk and head": True, "trunk": False}, ["float32", "bfloat16"]))
def test_beside_weights_in_float8(tmp_path: Path, head: bool, dtype: str) -> None:
    """The head, whose rows are copied, may be in float8 too. Greedy text does not depend on the drafts, but for roundings."""
    directory = tmp_path / "fp8"
    quantise(ModelConfig().directory, directory)
    if head:
        quantise_head(directory)
    (tmp_path / "map.json").write_text(json.dumps(list(range(200, 500))))
    model = ModelConfig(model=str(directory), quantization="fp8", dtype=dtype, context_length=256)
    texts = []
    for tokens in (None, str(tmp_path / "map.json")):
        spec = SpecConfig(speculative_algorithm="MTP", speculative_num_steps=2, speculative_token_map=tokens)
        engine = build_engine(EngineConfig(model=model, cache=CacheConfig(max_total_tokens=512), spec=spec))
        texts.append(run(engine, [[40, 41, 300], [270]], SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)))
    kept = dict(runner_of(engine).step.model.head.named_parameters())  # type: ignore[attr-defined]
    assert ("weight" in kept and kept["weight"].dtype == FP8) == head
    assert (texts[0] == texts[1] or dtype == "bfloat16") and engine.stats.accepted_tokens_total > 0


def quantise_head(directory: Path) -> None:
    index = json.loads((directory / INDEX).read_text())
    file = directory / index["weight_map"]["lm_head.weight"]
    tensors = load_file(file)
    tensors["lm_head.weight"], tensors["lm_head.weight_scale_inv"] = quantize_block(tensors["lm_head.weight"])
    save_file(tensors, file)
    index["weight_map"]["lm_head.weight_scale_inv"] = file.name
    (directory / INDEX).write_text(json.dumps(index))
