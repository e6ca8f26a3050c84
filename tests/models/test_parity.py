"""The trunk's logits are transformers', however the tokens are cut into steps."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from mtpserve.config import EngineConfig, ModelConfig
from mtpserve.core.errors import LoadError
from mtpserve.engine.startup.planning import describe
from tests.models.checkpoints import YARN, Tiny, deepseek, mimo
from tests.models.harness import Harness

LENGTHS = (37, 22)
DEEPSEEKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no q_lora": {"q_lora_rank": None},
    "yarn": {"rope_scaling": YARN},
    "yarn, equal mscales, no q_lora": {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}, "q_lora_rank": None},
    "yarn without mscale": {"rope_scaling": {k: v for k, v in YARN.items() if "mscale" not in k}},
    "yarn from a long context": {"rope_scaling": YARN | {"original_max_position_embeddings": 4096}, "qk_rope_head_dim": 24},
    "groups": {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5},
    "groups, all chosen": {"n_group": 2, "topk_group": 2},
    "shared experts": {"n_shared_experts": 2, "first_k_dense_replace": 0},
    "no shared expert": {"n_shared_experts": 0},
    "two dense layers": {"first_k_dense_replace": 2, "norm_topk_prob": False, "routed_scaling_factor": 1.5},
    "many experts": {"n_routed_experts": 24, "n_group": 3, "topk_group": 2},
    "half-split rotation": {"rope_interleave": False},
    "fp8": {"fp8": True, "hidden_size": 160, "intermediate_size": 200, "kv_lora_rank": 132},
    "tied head": {"tie_word_embeddings": True},
}
# Rows per step of the two sequences, and how many of them come as drafts. The second one's tokens, one by one, go on alone.
CUTS: dict[str, tuple[tuple[int, int], int]] = {
    "one shot": ((64, 64), 0),
    "chunks": ((7, 4), 0),
    "a chunk beside tokens": ((9, 1), 0),
    "drafts": ((4, 3), 3),
}
FEW = ("a chunk beside tokens", "drafts")  # where every row takes long


def prompts(vocab: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(vocab, (n,), generator=generator).tolist() for n in LENGTHS]


def compare(tiny: Tiny, page_size: int, backend: str = "reference", cuts: Iterable[str] = CUTS) -> None:
    ids = prompts(tiny.config["vocab_size"])
    wanted = [tiny.logits(each) for each in ids]
    assert min(w.std() for w in wanted) > 0.3, "the comparison would be about nothing"
    for name in cuts:
        widths, drafts = CUTS[name]
        with_mtp = name == "chunks" and tiny.mtp is not None
        found = Harness(tiny.directory, ids, page_size, with_mtp, backend=backend).all_logits(widths, drafts)
        for ours, theirs in zip(found, wanted, strict=True):
            assert ours.shape == theirs.shape, name
            worst = (ours - theirs).abs().max().item()
            assert worst < 1e-4, f"{name}: {worst}"  # NaN fails too


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("options", DEEPSEEKS.values(), ids=DEEPSEEKS.keys())
def test_deepseek(tmp_path: Path, options: dict[str, Any]) -> None:
    compare(deepseek(tmp_path, **options), page_size=5)


@pytest.mark.parametrize("page_size", [1, 16])
def test_deepseek_with_other_pages(tmp_path: Path, page_size: int) -> None:
    compare(deepseek(tmp_path, seed=1), page_size)


@pytest.mark.parametrize(
    "options",
    [{}, {"num_key_value_heads": 4}, {"num_key_value_heads": 1, "rms_norm_eps": 1e-6}, {"tie_word_embeddings": True}],
    ids=["grouped", "one head each", "one head for all", "tied head"],
)
def test_mimo(tmp_path: Path, options: dict[str, Any]) -> None:
    compare(mimo(tmp_path, **options), page_size=5)


# Prompts are longer than several windows, chunks longer and shorter than one.
WINDOWS: dict[str, dict[str, Any]] = {
    "alternating": {"sliding_window": 5, "layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]},
    "from a layer on": {"sliding_window": 8, "max_window_layers": 2},
    "all layers, a token": {"sliding_window": 1, "max_window_layers": 0},
}


@pytest.mark.parametrize("backend", ["reference", "exact"])
@pytest.mark.parametrize("options", WINDOWS.values(), ids=WINDOWS.keys())
def test_sliding_windows(tmp_path: Path, options: dict[str, Any], backend: str) -> None:
    compare(mimo(tmp_path, use_sliding_window=True, num_hidden_layers=4, **options), 3, backend)


def kinds(tmp_path: Path, **options: Any) -> list[int | None]:
    """The windows of our layers; transformers' are the same."""
    tiny = mimo(tmp_path, num_hidden_layers=4, **options)
    ours = describe(EngineConfig(model=ModelConfig(model=str(tmp_path))), want_mtp=True).arch.layers
    theirs = [layer.self_attn.sliding_window for layer in tiny.trunk.model.layers]
    assert [kind.window for kind in ours[:4]] == theirs
    assert [kind.window for kind in ours[4:]] == [None]  # the MTP layer
    return theirs


def test_which_layers_have_a_window(tmp_path: Path) -> None:
    on = {"use_sliding_window": True}
    assert kinds(tmp_path / "a", sliding_window=6, max_window_layers=0) == [None] * 4
    assert kinds(tmp_path / "b", **on) == [None] * 4  # layers from 28 on
    assert kinds(tmp_path / "c", **on, max_window_layers=1) == [None, 4096, 4096, 4096]
    assert kinds(tmp_path / "d", **on, sliding_window=None, max_window_layers=1) == [None] * 4
    types = ["sliding_attention", "full_attention"] * 2
    assert kinds(tmp_path / "e", **on, sliding_window=6, layer_types=types) == [6, None, 6, None]
    assert kinds(tmp_path / "f", layer_types=["full_attention"] * 4) == [None] * 4


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"sliding_window": 0}, "sliding_window must be an integer of at least 1, got 0"),
        ({"max_window_layers": "all"}, "max_window_layers must be an integer of at least 0"),
        ({"layer_types": ["full_attention"]}, "layer_types must be a list of num_hidden_layers = 3 names"),
        ({"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, "each one of full_attention, sliding_attention"),
        ({"layer_types": ["sliding_attention"] * 3, "use_sliding_window": False}, "layer_types must be without sliding_attention, or"),
    ],
)
def test_what_is_wrong_with_windows_is_said(tmp_path: Path, wrong: dict[str, Any], message: str) -> None:
    config = mimo(tmp_path).config | {"use_sliding_window": True} | wrong
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(LoadError, match=message):
        describe(EngineConfig(model=ModelConfig(model=str(tmp_path))), want_mtp=False)
