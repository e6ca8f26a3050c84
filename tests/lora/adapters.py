"""Adapters as PEFT saves them, and the checkpoint in which they are merged: what an engine with adapters is compared with."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from mtpserve.config import CacheConfig, EngineConfig, LoRAConfig, ModelConfig, SchedulerConfig, SpecConfig
from mtpserve.core.protocols.adapters import LoRARequest
from mtpserve.core.request import Request
from mtpserve.core.sampling import SamplingParams
from mtpserve.engine.engine import Engine
from tests.models.checkpoints import Tiny

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PLAIN = SpecConfig(speculative_algorithm="none")
CHAIN = SpecConfig(speculative_algorithm="NEXTN", speculative_num_steps=3, speculative_adaptive=False)
TREE = SpecConfig(
    speculative_algorithm="NEXTN", speculative_num_steps=3, speculative_eagle_topk=2, speculative_num_draft_tokens=6,
    speculative_adaptive=False,
)  # fmt: skip


@dataclass(frozen=True)
class Adapter:
    """`config` replaces entries of adapter_config.json; `scale_of` says what the product of a module is scaled with."""

    seed: int
    rank: int = 4
    modules: Sequence[str] = ALL
    config: Mapping[str, Any] = field(default_factory=dict)
    rank_of: Callable[[str], int] | None = None
    scale_of: Callable[[str], float] = lambda module: 2.0
    layers: int = 3  # of the trunk

    def pairs(self, tensors: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, Tensor]]:
        """By the names of the trunk's modules."""
        dice, pairs = torch.Generator().manual_seed(self.seed), {}
        for name, weight in sorted(tensors.items()):
            module = name.removesuffix(".weight")
            layer = re.match(r"model\.layers\.(\d+)\.", module)
            if layer and int(layer[1]) < self.layers and name.endswith(".weight") and module.endswith(tuple(self.modules)):
                rank = self.rank if self.rank_of is None else self.rank_of(module)
                a = torch.randn(rank, weight.shape[1], generator=dice) / weight.shape[1] ** 0.5
                pairs[module] = a, torch.randn(weight.shape[0], rank, generator=dice) / (4 * rank**0.5)
        assert pairs
        return pairs

    def save(self, directory: Path, tensors: Mapping[str, Tensor]) -> Path:
        sides = {
            f"base_model.model.{module}.lora_{letter}.weight": side
            for module, pair in self.pairs(tensors).items()
            for letter, side in zip("AB", pair, strict=True)
        }
        directory.mkdir(parents=True, exist_ok=True)
        save_file(sides, directory / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": self.rank, "lora_alpha": 2 * self.rank, "target_modules": list(self.modules), "bias": "none"}
        (directory / "adapter_config.json").write_text(json.dumps({**config, **self.config}))
        return directory

    def merge(self, directory: Path, tiny: Tiny) -> Path:
        """A checkpoint whose weights have the adapter's products in them."""
        shutil.copytree(tiny.directory, directory)
        for file in directory.glob("*.safetensors*"):
            file.unlink()
        tensors = {name: tensor.clone() for name, tensor in tiny.tensors.items()}
        for module, (a, b) in self.pairs(tiny.tensors).items():
            tensors[f"{module}.weight"] += self.scale_of(module) * (b @ a)
        save_file(tensors, directory / "model.safetensors")
        return directory


def config_of(directory: Path, spec: SpecConfig, lora: LoRAConfig | None = None, backend: str = "auto", **options: Any) -> EngineConfig:
    config = EngineConfig(
        model=ModelConfig(model=str(directory), device="cpu", dtype="float32", attention_backend=backend),
        cache=CacheConfig(page_size=8, max_total_tokens=400),
        spec=spec,
        scheduler=SchedulerConfig(max_running_requests=6, chunked_prefill_size=16),
        lora=lora or LoRAConfig(),
    )
    return replace(config, **options)


PROMPTS = [[5, 7, 11, 3], [9, 2, 17, 20, 21, 4, 6, 8, 19, 3, 12], [5, 7, 11, 3], [9, 2, 17, 20, 21, 4, 6, 8, 19, 3, 12], [3], [7, 7]]
ASKED = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
SEEDED = SamplingParams(temperature=1.0, seed=3, max_tokens=20, ignore_eos=True)


def answers(
    engine: Engine, loras: Sequence[LoRARequest | None], params: SamplingParams = ASKED, prompts: Sequence[list[int]] = PROMPTS
) -> list[list[int]]:
    """The tokens of each prompt with its adapter, all at once. A request that fails fails the test."""
    for i, (prompt, lora) in enumerate(zip(prompts, loras, strict=True)):
        engine.add(Request(str(i), prompt, params, lora=lora))
    tokens: list[list[int]] = [[] for _ in prompts]
    while engine.has_work:
        for event in engine.step():
            assert event.error is None, event.error
            tokens[int(event.id)] += event.tokens
    engine.check_integrity()
    return tokens
