"""Medusa heads in their published layouts: their logits, the model's own text, and what is refused."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from mtpserve.config import SpecConfig
from mtpserve.core.errors import ConfigError, LoadError, UnsupportedModel
from tests.heads.rounds import GREEDY, VOCAB, captured, engine_of, first_two, heard, proved, spec_of, texts
from tests.models.checkpoints import Tiny, llama
from tests.spec.test_distribution import p_value

HEADS, HIDDEN = 4, 48
LAYOUTS: dict[str, dict[str, Any]] = {
    "authors": {"medusa_num_heads": HEADS, "medusa_num_layers": 2, "base_model_name_or_path": "a model"},
    "vLLM": {"num_heads": HEADS, "num_hidden_layers": 1, "hidden_size": HIDDEN, "vocab_size": VOCAB, "model_type": "medusa"},
    "one head": {"num_heads": HEADS, "num_hidden_layers": 1, "original_lm_head": True},
    "the model's head": {"medusa_num_heads": HEADS, "medusa_num_layers": 1},
    "some tokens": {"num_heads": HEADS, "num_hidden_layers": 1, "vocab_size": VOCAB, "truncated_vocab_size": 9},
}
SOME = torch.tensor([20, 3, 1, 7, 22, 13, 9, 2, 11])


def write(directory: Path, layout: str) -> dict[str, Tensor]:
    config, generator = LAYOUTS[layout], torch.Generator().manual_seed(3)
    layers = config.get("medusa_num_layers", config.get("num_hidden_layers"))
    tensors: dict[str, Tensor] = {}

    def matrix(name: str, *shape: int) -> None:
        tensors[name] = torch.randn(*shape, generator=generator) * shape[-1] ** -0.5

    for i in range(HEADS):
        for j in range(layers):
            names = (
                (f"{i}.{j}.linear.weight", f"{i}.{j}.linear.bias") if "medusa_num_heads" in config else (f"blocks.{i}.layers.{j}.weight",)
            )
            for name in names:
                matrix(name, *((HIDDEN, HIDDEN) if name.endswith("weight") else (HIDDEN,)))
        if layout == "authors":
            matrix(f"{i}.{layers}.weight", VOCAB, HIDDEN)
        elif layout in ("vLLM", "some tokens") or (layout == "one head" and i == 0):
            matrix(f"lm_heads.{i}.weight", config.get("truncated_vocab_size", VOCAB), HIDDEN)
    if layout == "some tokens":
        tensors["token_map"] = SOME
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "medusa_lm_head.safetensors")
    return tensors


def expected(trunk: Tiny, tensors: dict[str, Tensor], ids: list[int], depth: int) -> Tensor:
    """Head `depth` for the token `depth` + 2 after the last but one, whose hidden state it gets."""
    x = trunk.trunk.model(torch.tensor([ids]), use_cache=False).last_hidden_state[0, -2]
    for j in range(2):
        for name in (f"{depth}.{j}.linear", f"blocks.{depth}.layers.{j}"):
            if f"{name}.weight" in tensors:
                x = x + F.silu(F.linear(x, tensors[f"{name}.weight"], tensors.get(f"{name}.bias")))
    names = (f"{depth}.2.weight", f"lm_heads.{depth}.weight", "lm_heads.0.weight")
    head = next((tensors[name] for name in names if name in tensors), trunk.trunk.lm_head.weight)
    logits = head @ x
    if "token_map" not in tensors:
        return logits
    return torch.full((VOCAB,), -torch.inf).scatter(0, SOME, logits)


@pytest.fixture(scope="module")
def trunk(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return llama(tmp_path_factory.mktemp("trunk"))


@pytest.mark.parametrize("layout", LAYOUTS)
@torch.inference_mode()
def test_text_and_logits(trunk: Tiny, layout: str, tmp_path: Path) -> None:
    tensors = write(tmp_path / "head", layout)
    plain = texts(engine_of(trunk.directory, SpecConfig(speculative_algorithm="none")))
    tree = {"speculative_eagle_topk": 3, "speculative_num_draft_tokens": 8}
    shapes = ((0, {}), (1, {}), (3, {}), (3, tree)) if layout == "authors" else ((3, {}),)
    for steps, shape in shapes:
        engine = engine_of(trunk.directory, spec_of("MEDUSA", tmp_path / "head", steps, **shape), tokens=96)
        drafts = heard(engine) if steps else []
        # Requests lose their pages and begin again; the second time they find their prompts.
        for again in ("first", "again"):
            assert texts(engine, again) == plain, (steps, shape)
        assert engine.stats.preemptions_total > 0
        for ids, depth, _, logits in drafts[:: 1 + len(drafts) // 25]:
            wanted = expected(trunk, tensors, ids, depth)
            there = wanted[wanted > -torch.inf].sort().values if len(logits) < VOCAB else wanted
            torch.testing.assert_close(logits.sort().values if len(logits) < VOCAB else logits, there, atol=1e-4, rtol=0)
        assert {each.depth for each in drafts} == set(range(steps))


def test_a_tree_of_the_best_tokens(trunk: Tiny, tmp_path: Path) -> None:
    """Its nodes score the product of what the heads give, whatever is before them."""
    write(tmp_path / "head", "authors")
    shape = {"speculative_eagle_topk": 2, "speculative_num_draft_tokens": 7}
    engine = engine_of(trunk.directory, spec_of("MEDUSA", tmp_path / "head", 2, **shape))
    drafts = heard(engine)
    texts(engine)
    by_text: dict[tuple[int, ...], set[tuple[float, ...]]] = {}
    for each in drafts:
        if each.depth == 1:
            by_text.setdefault(tuple(each.ids), set()).add(tuple(each.logits.tolist()))
    assert by_text and all(len(found) == 1 for found in by_text.values())


def test_beside_n_grams_and_on_cpu_kernels(trunk: Tiny, tmp_path: Path) -> None:
    write(tmp_path / "head", "authors")
    plain = texts(engine_of(trunk.directory, SpecConfig(speculative_algorithm="none")))
    assert texts(engine_of(trunk.directory, spec_of("MEDUSA+NGRAM", tmp_path / "head", 3))) == plain
    spec = spec_of("MEDUSA", tmp_path / "head", 3, speculative_draft_model_quantization="int8", speculative_adaptive=True)
    assert texts(engine_of(trunk.directory, spec, backend="cpu")) == texts(
        engine_of(trunk.directory, SpecConfig(speculative_algorithm="none"), backend="cpu")
    )


@pytest.mark.parametrize("shape", [{}, {"speculative_eagle_topk": 3, "speculative_num_draft_tokens": 8}], ids=["chain", "tree"])
def test_a_captured_step_reads_nothing_on_the_host(
    trunk: Tiny, shape: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "head", "some tokens")
    spec = spec_of("MEDUSA", tmp_path / "head", 3, **shape)
    assert captured(engine_of(trunk.directory, spec, backend="reference"), monkeypatch) > 2


def test_dummy_weights(trunk: Tiny, tmp_path: Path) -> None:
    write(tmp_path / "head", "vLLM")
    engine = engine_of(trunk.directory, spec_of("MEDUSA", tmp_path / "head", 2), load_format="dummy")
    assert all(len(text) == GREEDY.max_tokens for text in texts(engine))


def test_errors(trunk: Tiny, tmp_path: Path) -> None:
    write(tmp_path / "head", "vLLM")

    def start(steps: int = 3, **config: Any) -> None:
        (tmp_path / "head" / "config.json").write_text(json.dumps(LAYOUTS["vLLM"] | config))
        engine_of(trunk.directory, spec_of("MEDUSA", tmp_path / "head", steps))

    with pytest.raises(ConfigError, match=r"speculative-num-steps must be at most 4, got 5: .* has 4 Medusa heads"):
        start(5)
    with pytest.raises(ConfigError, match="speculative-token-map needs a draft model"):
        engine_of(trunk.directory, spec_of("MEDUSA", tmp_path / "head", 3, speculative_token_map="tokens.txt"))
    with pytest.raises(ConfigError, match="hidden_size is 64, and the model's is 48"):
        start(hidden_size=64)
    with pytest.raises(UnsupportedModel, match=r"logit_scale = 0\.5 is not supported"):
        start(logit_scale=0.5)
    with pytest.raises(LoadError, match=r"blocks\.0\.layers\.1\.weight"):
        start(num_hidden_layers=2)
    tensors = {name: tensor[:9] if "lm_heads" in name else tensor for name, tensor in write(tmp_path / "fewer", "vLLM").items()}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "head" / "medusa_lm_head.safetensors")
    with pytest.raises(LoadError, match="token_map"):
        start()
    (tmp_path / "head" / "medusa_lm_head.safetensors").rename(tmp_path / "head" / "medusa_lm_head.pt")
    with pytest.raises(LoadError, match=r"medusa_lm_head\.pt is a pickle"):
        start()


def test_what_is_drawn(trunk: Tiny, tmp_path: Path) -> None:
    """By rejection with each head's own q: the law of plain decoding."""
    write(tmp_path / "head", "authors")
    law = partial(first_two, trunk.directory, draws=2000)
    assert p_value(law(SpecConfig(speculative_algorithm="none"), seed=0), law(spec_of("MEDUSA", tmp_path / "head", 2), seed=10**6)) > 1e-4


def test_the_proof_holds(trunk: Tiny, tmp_path: Path) -> None:
    """Every sampling feature: grammars, penalties, seeds and the rest, in the same batches."""
    write(tmp_path / "head", "authors")
    proof = proved(trunk, tmp_path, "MEDUSA", tmp_path / "head")
    assert proof.holds, (proof.divergences, proof.laws)
    assert len(proof.laws) == 12 and min(proof.drafted[:2]) > 0
