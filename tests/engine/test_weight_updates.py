"""Texts after an update are those of an engine that was started with these weights: nothing that was computed before is used."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from mtpserve.core.errors import InvalidRequest, LoadError
from mtpserve.core.sampling import SamplingParams
from mtpserve.engine.depth.watchdog import Watchdog
from mtpserve.engine.startup import build, planning
from mtpserve.engine.updates import named_updates
from mtpserve.llm import LLM
from mtpserve.weights.checkpoint.checkpoint import Checkpoint
from tests.engine.test_ranks import as_before
from tests.weights.differences import changed

__all__ = ["as_before"]
GREEDY = SamplingParams(max_tokens=20, temperature=0)
PROMPTS: list[Any] = ["import os\n\n\ndef read(path):\n    with open(path) as file:\n", "class A:\n    def __init__(self):", [5, 6, 7]]
OPTIONS: dict[str, Any] = {"dtype": "float32", "max_total_tokens": 2048, "random_seed": 1}


@pytest.fixture(scope="module")
def demo() -> dict[str, Tensor]:
    with LLM("demo", **OPTIONS) as llm:
        checkpoint = Checkpoint.open(llm.config.model.directory)
    return {name: checkpoint.tensor(name).clone() for name in checkpoint.tensors}


@pytest.fixture(scope="module")
def new(demo: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Tensor], Path]:
    """Other weights, and the directory of a checkpoint that has them."""
    directory, tensors = tmp_path_factory.mktemp("new"), changed(demo)
    with LLM("demo", **OPTIONS) as llm:
        for file in llm.config.model.directory.iterdir():
            if file.suffix == ".json" and "index" not in file.name:
                shutil.copy(file, directory)
    save_file(tensors, directory / "model.safetensors")
    return tensors, directory


def texts(llm: LLM, sampling: SamplingParams = GREEDY) -> list[list[int]]:
    return [completion.tokens for completion in llm.generate(PROMPTS, sampling)]


@pytest.fixture(scope="module")
def expected(new: tuple[dict[str, Tensor], Path]) -> list[list[int]]:
    with LLM(str(new[1]), **OPTIONS, speculative_algorithm="none") as fresh:
        return texts(fresh)


@pytest.fixture
def overlapped(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: a step is in flight while the next one is planned."""
    if request.param:
        for module in (build, planning):
            monkeypatch.setattr(module, "overlap_of", lambda config, device: 1)


TREE = {"speculative_algorithm": "NEXTN", "speculative_eagle_topk": 2, "attention_backend": "reference"}
CASES: list[Any] = [
    ({"speculative_algorithm": "NEXTN"}, False),
    ({"speculative_algorithm": "none"}, True),
    ({"speculative_algorithm": "NEXTN", "speculative_num_steps": 3, "max_total_tokens": 96}, True),  # too few pages: preemption
    pytest.param(
        {"speculative_algorithm": "NEXTN", "speculative_eagle_topk": 2, "attention_backend": "reference"}, False, marks=pytest.mark.thorough
    ),
]


@pytest.mark.parametrize(("options", "overlapped"), CASES, indirect=["overlapped"])
def test_texts_are_those_of_the_new_weights(
    new: tuple[dict[str, Tensor], Path], demo: dict[str, Tensor], expected: list[list[int]], options: dict[str, Any], overlapped: None
) -> None:
    with LLM("demo", **OPTIONS | options) as llm:
        before = texts(llm)
        assert before == texts(llm) and before != expected
        llm.update_weights(new[0].items(), weight_version="v2")
        assert (texts(llm), llm.weight_version) == (expected, "v2")
        assert texts(llm) == expected  # with what the prefix cache has now
        llm.update_weights(iter(demo.items()))
        assert (texts(llm), llm.weight_version) == (before, "v2")
        llm.engine.check_integrity()


def test_ranks_and_the_draft_layer_apart(new: tuple[dict[str, Tensor], Path], expected: list[list[int]]) -> None:
    """Two processes that compute the model. An MTP layer with other weights than the model's changes no text."""
    trunk = {name: tensor for name, tensor in new[0].items() if not name.startswith("model.layers.6.")}
    layer = {name: tensor for name, tensor in new[0].items() if name not in trunk}
    with LLM("demo", **OPTIONS, tensor_parallel_size=2, speculative_algorithm="NEXTN") as llm:
        assert layer and texts(llm) != expected
        llm.update_weights(trunk.items())
        assert texts(llm) == expected
        llm.update_weights(layer.items())
        assert texts(llm) == expected
        with pytest.raises(InvalidRequest, match=r"model\.norm\.weight has shape"):
            llm.update_weights([("model.norm.weight", torch.zeros(3))])
        assert texts(llm) == expected


def test_a_stream_goes_on_with_the_new_weights(new: tuple[dict[str, Tensor], Path]) -> None:
    with LLM("demo", **OPTIONS, speculative_algorithm="NEXTN") as llm, LLM(str(new[1]), **OPTIONS) as fresh:
        prompt = llm.tokenizer.encode(PROMPTS[0])
        stream, tokens = llm.stream(prompt, SamplingParams(max_tokens=40, temperature=0)), list[int]()
        while len(tokens) < 12:
            tokens += next(stream).tokens
        llm.update_weights(new[0].items())
        rest = [token for step in stream for token in step.tokens]
        assert len(tokens + rest) == 40
        (continued,) = fresh.generate([prompt + tokens], SamplingParams(max_tokens=len(rest), temperature=0))
        assert rest == continued.tokens
        assert llm.engine.stats.preemptions_total == 1
        # its pages are found under the new weights' keys alone
        (again,) = llm.generate([prompt + tokens + rest], GREEDY)
        assert again.cached_tokens > 0
        assert again.tokens == fresh.generate([prompt + tokens + rest], GREEDY)[0].tokens


def test_no_tier_has_pages_of_the_old_weights(new: tuple[dict[str, Tensor], Path], expected: list[list[int]], tmp_path: Path) -> None:
    with LLM("demo", **OPTIONS | {"max_total_tokens": 96}, kv_offload_gib=0.01, kv_offload_dir=str(tmp_path)) as llm:
        texts(llm)
        fingerprint = llm.engine.fingerprint
        llm.update_weights(new[0].items())
        assert texts(llm) == expected
        assert llm.engine.fingerprint not in (None, fingerprint)


def test_what_drafts_were_accepted_is_learned_again(new: tuple[dict[str, Tensor], Path]) -> None:
    with LLM("demo", **OPTIONS, speculative_algorithm="NEXTN") as llm:
        texts(llm)
        policy = llm.engine.policy
        assert policy is not None
        learned, prior = policy.survival.rates, type(policy.survival)(policy.sizes.num_proposed).rates
        assert learned != prior
        llm.update_weights(new[0].items())
        assert policy.survival.rates == prior


def test_a_suspended_draft_model_is_tried_at_once() -> None:
    watchdog = Watchdog(2, 100)
    watchdog._armed, watchdog.health.state, watchdog.best_rate, watchdog._next_s = True, "suspended", 0.9, 1e9
    watchdog.renew()
    assert watchdog._next_s == 0 and watchdog.best_rate == 0
    idle = Watchdog()
    idle.renew()
    assert not idle._doubt


def test_errors_say_what_is_missing(demo: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named_updates, "PART_BYTES", 1 << 16)  # several parts
    with LLM("demo", **OPTIONS) as llm:
        before = texts(llm)
        name = "model.layers.0.mlp.gate_proj.weight"
        with pytest.raises(LoadError, match=f"{name}: the other tensors of the same parameters are missing"):
            llm.update_weights([(name, demo[name] * 2)])
        llm.update_weights([(name.replace("gate", "up"), demo[name.replace("gate", "up")]), (name, demo[name])])  # none had waited
        llm.update_weights(demo.items())
        assert texts(llm) == before
    with LLM("demo", **OPTIONS, load_format="dummy") as llm, pytest.raises(InvalidRequest, match="--load-format dummy"):
        llm.update_weights(demo.items())
