"""A module with one of everything that rules can fill, its rules, and the tensors of a checkpoint for it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from mtpserve.weights.rules import Drop, Expert, Rule, Stack

RULES = (
    Rule(r"norm\.weight", "norm.weight"),
    Rule(r"layers\.(?P<layer>\d+)\.q\.weight", "layers.{layer}.weight", Stack(0)),
    Rule(r"layers\.(?P<layer>\d+)\.k\.weight", "layers.{layer}.weight", Stack(1)),
    Rule(r"layers\.(?P<layer>\d+)\.q\.bias", "layers.{layer}.bias", Stack(0)),
    Rule(r"layers\.(?P<layer>\d+)\.k\.bias", "layers.{layer}.bias", Stack(1)),
    Rule(r"experts\.(?P<expert>\d+)\.gate", "experts.gate_up", Expert(0)),
    Rule(r"experts\.(?P<expert>\d+)\.up", "experts.gate_up", Expert(1)),
    Rule(r"counts", "counts"),
    Rule(r".*inv_freq", None, Drop("computed")),
)


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = (3, 2)
        self.weight = nn.Parameter(torch.full((5, 4), torch.nan))
        self.bias = nn.Parameter(torch.full((5,), torch.nan))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = {"gate_up": (2, 2)}  # by parameter, where a module holds several fused ones
        self.gate_up = nn.Parameter(torch.full((3, 4, 4), torch.nan))


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), torch.nan))


class Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.experts = Norm(), Experts()
        self.layers = nn.ModuleList([Fused(), Fused()])
        self.register_buffer("counts", torch.zeros(2, dtype=torch.int64))
        self.register_buffer("table", torch.ones(3), persistent=False)


def tensors() -> dict[str, Tensor]:
    torch.manual_seed(0)
    found = {"norm.weight": torch.randn(4), "counts": torch.tensor([3, 4]), "rotary.inv_freq": torch.randn(2)}
    for layer in range(2):
        found |= {f"layers.{layer}.q.weight": torch.randn(3, 4), f"layers.{layer}.k.weight": torch.randn(2, 4)}
        found |= {f"layers.{layer}.q.bias": torch.randn(3), f"layers.{layer}.k.bias": torch.randn(2)}
    for expert in range(3):
        found |= {f"experts.{expert}.gate": torch.randn(2, 4), f"experts.{expert}.up": torch.randn(2, 4)}
    return found


def write(directory: Path, *shards: Mapping[str, Tensor]) -> Path:
    """One file without an index for one shard, else numbered files and an index."""
    directory.mkdir(exist_ok=True)
    if len(shards) == 1:
        save_file(dict(shards[0]), directory / "model.safetensors")
        return directory
    weight_map: dict[str, str] = {}
    for i, shard in enumerate(shards):
        save_file(dict(shard), directory / f"model-{i}.safetensors")
        weight_map |= dict.fromkeys(shard, f"model-{i}.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory
