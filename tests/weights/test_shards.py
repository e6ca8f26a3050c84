"""What each rank has of a model: together they have all of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mtpserve.config import EngineConfig, ModelConfig
from mtpserve.core.arch.model import ModelArch
from mtpserve.core.arch.sharding import one_rank
from mtpserve.core.errors import ConfigError
from mtpserve.core.protocols.parallel import PlannedRank, Ranks
from mtpserve.engine.startup.planning import describe, empty_model
from mtpserve.engine.startup.storage import Storage
from mtpserve.layers.decoder import DecoderModel, Methods
from mtpserve.layers.devices.torch_kernels import torch_kernels
from mtpserve.models import deepseek, gqa, nemotron_h, qwen3_next
from mtpserve.quant.unquantized import Unquantized
from mtpserve.weights.shards import Shard, shards_of
from tests.models.published_configs import (
    DEEPSEEK_V4_FLASH,
    DEEPSEEK_V32,
    GLM45_AIR,
    GPT_OSS_120B,
    MIMO_V2_FLASH,
    NEMOTRON_3_NANO,
    QWEN3_NEXT_80B,
)
from tests.tiny import CONTEXT, tiny_arch

PUBLISHED = [DEEPSEEK_V32, DEEPSEEK_V4_FLASH, GLM45_AIR, GPT_OSS_120B, MIMO_V2_FLASH, NEMOTRON_3_NANO, QWEN3_NEXT_80B]
BUILD = {
    "deepseek": deepseek,
    "sparse": deepseek,
    "glm": gqa,
    "oss": gqa,
    "chained": gqa,
    "qwen": gqa,
    "hybrid": qwen3_next,
    "mamba2": nemotron_h,
}


def empty(arch: ModelArch, ranks: Ranks) -> DecoderModel:
    kernels = replace(torch_kernels(), ranks=ranks)
    with torch.device("meta"):
        build = BUILD[arch.family].build
        return build(one_rank(arch, ranks.size), Methods.all(Unquantized(kernels)), torch.float32, CONTEXT, kernels)


def shards(arch: ModelArch, size: int) -> list[dict[str, Shard]]:
    whole = empty(arch, PlannedRank(0, 1))
    return [shards_of(whole, empty(arch, rank), rank) for rank in (PlannedRank(number, size) for number in range(size))]


@pytest.mark.parametrize(("family", "size"), [*((family, 2) for family in BUILD), *((family, 4) for family in ("deepseek", "oss", "qwen"))])
def test_the_ranks_have_every_number(family: str, size: int) -> None:
    """Of a divided parameter exactly once, unless there are fewer key heads than ranks."""
    each = shards(tiny_arch(family), size)
    for name, first in each[0].items():
        seen = torch.zeros(first.whole, dtype=torch.int64)
        for one in each:
            place = torch.zeros([dim.size for dim in one[name].dims], dtype=torch.int64)
            for move in one[name].moves():
                move.of(place).add_(1)
                seen[move.taken] += 1
            assert place.max() <= 1 and (place.min() == 1 or not one[name].filled), name
        divided = any(dim.size != dim.whole for dim in first.dims)
        most = size // 2 if "qkv" in name else 1 if divided or not first.filled or not each[-1][name].filled else size
        assert seen.min() >= 1 and seen.max() == most, name


@pytest.mark.parametrize("config", PUBLISHED, ids=lambda config: config["model_type"])
def test_eight_ranks_have_all_of_published_models(tmp_path: Path, config: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    described = describe(EngineConfig(model=ModelConfig(model=str(tmp_path), load_format="dummy")), want_mtp=False)
    kept = Storage(False, torch.bfloat16)
    whole, own = (empty_model(described, torch.bfloat16, 8, kept, PlannedRank(0, size)) for size in (1, 8))
    each = [shards_of(whole, own, PlannedRank(rank, 8)) for rank in range(8)]
    divided = 0
    for name, first in each[0].items():
        divided += any(dim.size < dim.whole for dim in first.dims)
        for number, dim in enumerate(first.dims):
            stretches = sorted((part.start, part.stop) for one in each for part in one[name].dims[number].stretches)
            reached = 0
            for start, stop in stretches:
                assert start <= reached, name
                reached = max(reached, stop)
            assert reached == dim.whole, name
    assert divided > 4 * described.arch.num_layers // 2
    assert sum(parameter.numel() for parameter in own.parameters()) < sum(parameter.numel() for parameter in whole.parameters()) / 6


def test_experts_in_any_order() -> None:
    class BlockList(nn.Module):
        experts_first, added_once = True, ("bias",)

        def __init__(self, held: tuple[int, ...] | None) -> None:
            super().__init__()
            self.expert_ids, number = held, 6 if held is None else len(held)
            self.up = nn.Parameter(torch.empty(number, 4, 2))
            self.bias = nn.Parameter(torch.empty(number, 2))
            self.parts = {"up": (2, 2), "bias": (2,)}

    found = shards_of(BlockList(None), BlockList((5, 0, 1)), PlannedRank(1, 2))
    whole, own = torch.arange(48).view(6, 4, 2), torch.empty(3, 4, 2, dtype=torch.int64)
    for move in found["up"].moves():
        move.of(own).copy_(whole[move.taken])
    assert torch.equal(own, whole[[5, 0, 1]])
    assert [[move.expert for move in found["up"].moves(expert, (2, 2))] for expert in range(6)] == [[1], [2], [], [], [], [0]]
    assert found["bias"].filled and len(list(found["bias"].moves(4))) == 0


@pytest.mark.parametrize(
    ("change", "size", "message"),
    [
        ({}, 3, "--tensor-parallel-size 3 does not fit this model's 4 attention heads; sizes that do: 1, 2, 4$"),
        ({"heads": 6}, 3, "this model's 2 key heads; sizes that do: 1, 2, 6$"),
        ({"intermediate": 50}, 2, "this model's 50 numbers of the intermediate size; sizes that do: 1$"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change: dict[str, Any], size: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        one_rank(replace(tiny_arch("mimo"), **change), size)


def test_experts_that_do_not_fit_are_refused() -> None:
    arch = tiny_arch("deepseek")
    assert arch.moe is not None
    with pytest.raises(ConfigError, match=r"this model's 10 numbers of an expert's intermediate size; sizes that do: 1$"):
        one_rank(replace(arch, moe=replace(arch.moe, size=10)), 2)
    assert one_rank(replace(arch, moe=replace(arch.moe, size=10, by_rank=True)), 2).moe == replace(
        arch.moe, size=10, by_rank=True, shared=arch.moe.shared // 2
    )
    with pytest.raises(ConfigError, match=r"this model's 7 routed experts; sizes that do: 1$"):
        one_rank(replace(arch, moe=replace(arch.moe, experts=7, by_rank=True)), 2)
