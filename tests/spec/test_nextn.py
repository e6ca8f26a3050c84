"""An MTP layer works the same bundled or published apart, in any of three layouts; where one is missing the launch says what."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from mtpserve.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, SpecConfig
from mtpserve.core.errors import LoadError, UnsupportedModel
from mtpserve.core.request import Request
from mtpserve.core.sampling import SamplingParams
from mtpserve.engine.startup.build import build_engine
from tests.models.checkpoints import LAYERS, Tiny, deepseek, mimo, write, write_nextn
from tests.models.longcat import longcat

Heard = dict[str, list[tuple[list[int], int, list[int]]]]  # by request: tokens, accepted, proposed of each event


def generate(directory: Path, spec: SpecConfig) -> Heard:
    config = EngineConfig(
        model=ModelConfig(model=str(directory), device="cpu", dtype="float32"),
        cache=CacheConfig(page_size=5, max_total_tokens=400),
        spec=spec,
        scheduler=SchedulerConfig(chunked_prefill_size=9),
    )
    engine = build_engine(config, poison=True)
    generator = torch.Generator().manual_seed(7)
    heard: Heard = {}
    for i in range(3):
        prompt = torch.randint(engine.card.vocab, (11 + i,), generator=generator).tolist()
        engine.add(Request(str(i), prompt, SamplingParams(max_tokens=16, temperature=float(i), seed=i, ignore_eos=True)))
        heard[str(i)] = []
    while engine.has_work:
        for event in engine.step():
            assert event.error is None
            heard[event.id].append((event.tokens, event.num_accepted_tokens, event.proposal.tokens))
    return heard


def nextn(path: Path | None = None) -> SpecConfig:
    return SpecConfig(
        speculative_algorithm="NEXTN", speculative_adaptive=False, speculative_draft_model_path=None if path is None else str(path)
    )


def tokens(heard: Heard, request: str) -> list[int]:
    return [token for event in heard[request] for token in event[0]]


def bare(name: str) -> bool:
    return name not in ("embed_tokens.weight", "shared_head.head.weight")


@pytest.fixture(scope="module", params=[False, True], ids=["float32", "fp8"])
def tiny(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Tiny:
    return deepseek(tmp_path_factory.mktemp("bundled"), fp8=request.param)


@pytest.fixture(scope="module")
def bundled(tiny: Tiny) -> Heard:
    heard = generate(tiny.directory, nextn())
    assert any(accepted for events in heard.values() for _, accepted, _ in events)
    return heard


@pytest.fixture(scope="module")
def trunk_only(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    rest = {name: tensor for name, tensor in tiny.tensors.items() if not name.startswith(tiny.prefix)}
    return write(tmp_path_factory.mktemp("trunk"), tiny.config, rest)


@pytest.mark.parametrize(
    ("layer", "copies"), [(0, False), (LAYERS, True), (0, True)], ids=["renumbered", "old number", "renumbered with copies"]
)
def test_a_separate_layer_is_the_bundled_one(
    tiny: Tiny, bundled: Heard, trunk_only: Path, tmp_path: Path, layer: int, copies: bool
) -> None:
    separate = write_nextn(tmp_path / "nextn", tiny, layer, keep=lambda name: copies or bare(name))
    assert generate(trunk_only, nextn(separate)) == bundled


def test_a_whole_model_serves_as_the_separate_layer(tiny: Tiny, bundled: Heard, trunk_only: Path) -> None:
    assert generate(trunk_only, nextn(tiny.directory)) == bundled


def test_a_whole_model_of_another_layout_serves_as_the_separate_layer(tmp_path: Path) -> None:
    """LongCat-Flash, whose launches in float8 take the layer of the checkpoint in bfloat16."""
    whole = longcat(tmp_path / "whole")
    expected = generate(whole.directory, nextn())
    rest = {name: tensor for name, tensor in whole.tensors.items() if not name.startswith(whole.prefix)}
    assert generate(write(tmp_path / "trunk", whole.config, rest), nextn(whole.directory)) == expected


def test_a_separate_layer_goes_before_the_bundled_one(tiny: Tiny, bundled: Heard, tmp_path: Path) -> None:
    other = deepseek(tmp_path / "other", seed=5)
    separate = write_nextn(tmp_path / "nextn", other, 0, bare)
    heard = generate(tiny.directory, nextn(separate))
    assert heard != bundled and tokens(heard, "0") == tokens(bundled, "0"), "other drafts, the same greedy text"
    trunk = {name: tensor for name, tensor in tiny.tensors.items() if not name.startswith(tiny.prefix)}
    assert heard == generate(write(tmp_path / "trunk", tiny.config, trunk), nextn(separate))


@pytest.mark.parametrize(
    "name", ["enorm.weight", "eh_proj.weight", "self_attn.kv_b_proj.weight", "mlp.experts.3.up_proj.weight", "mlp.gate.weight"]
)
def test_a_missing_tensor_is_named(tmp_path: Path, name: str) -> None:
    tiny = deepseek(tmp_path / "whole")
    lacking = tiny.prefix + name
    write(tmp_path / "lacking", tiny.config, {other: tensor for other, tensor in tiny.tensors.items() if other != lacking})
    with pytest.raises(LoadError, match=re.escape(lacking)):
        generate(tmp_path / "lacking", nextn())


@pytest.mark.parametrize("name", ["hnorm.weight", "shared_head.norm.weight", "mlp.shared_experts.down_proj.weight"])
def test_a_missing_tensor_of_a_separate_layer_is_named(tiny: Tiny, trunk_only: Path, tmp_path: Path, name: str) -> None:
    separate = write_nextn(tmp_path / "nextn", tiny, 0, keep=lambda other: bare(other) and other != name)
    with pytest.raises(LoadError, match=re.escape(f"model.layers.0.{name}")):
        generate(trunk_only, nextn(separate))


def test_a_missing_tensor_of_mimo_is_named(tmp_path: Path) -> None:
    tiny = mimo(tmp_path / "whole")
    lacking = "model.mtp_layers.0.input_proj.weight"
    write(tmp_path / "lacking", tiny.config, {name: tensor for name, tensor in tiny.tensors.items() if name != lacking})
    with pytest.raises(LoadError, match=re.escape(lacking)):
        generate(tmp_path / "lacking", nextn())


def test_a_directory_without_the_layer_is_no_nextn(tiny: Tiny, trunk_only: Path, tmp_path: Path) -> None:
    separate = write_nextn(tmp_path / "nextn", tiny, 0, keep=lambda name: name.startswith("self_attn"))
    with pytest.raises(LoadError, match=r"eh_proj\.weight"):
        generate(trunk_only, nextn(separate))
    with pytest.raises(LoadError, match="nowhere"):
        generate(trunk_only, nextn(tmp_path / "nowhere"))


def test_speculation_without_a_layer_is_refused(trunk_only: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"no MTP layer.*plain decoding is --speculative-algorithm none"):
        generate(trunk_only, nextn())


def test_plain_decoding_needs_no_layer_and_leaves_one_alone(tiny: Tiny, bundled: Heard, trunk_only: Path) -> None:
    plain = generate(tiny.directory, SpecConfig(speculative_algorithm="none"))
    assert plain == generate(trunk_only, SpecConfig(speculative_algorithm="none"))
    assert all(len(event[0]) == 1 and not event[2] for events in plain.values() for event in events)
    assert tokens(plain, "0") == tokens(bundled, "0"), "greedy text does not depend on drafts"


def test_mimo_too(tmp_path: Path) -> None:
    whole = mimo(tmp_path / "whole")
    rest = {name: tensor for name, tensor in whole.tensors.items() if not name.startswith(whole.prefix)}
    trunk = write(tmp_path / "trunk", whole.config, rest)
    assert generate(whole.directory, SpecConfig(speculative_algorithm="none")) == generate(trunk, SpecConfig(speculative_algorithm="none"))
    assert tokens(generate(whole.directory, nextn()), "0") == tokens(generate(trunk, SpecConfig(speculative_algorithm="none")), "0")
    with pytest.raises(UnsupportedModel, match="no MTP layer"):
        generate(trunk, nextn())
