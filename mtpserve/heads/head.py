"""The interface of a draft model that is published apart: described from its config and headers, then a part
of the whole model.

open          directory, the trunk's dimensions → Head: what it stores, what it gets of the trunk, and where
              its tensors go
Head.make     a module, core.protocols.models.DraftModel; its weights are loaded with the trunk's
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, cast

import torch
from torch import nn

from mtpserve.config import EngineConfig
from mtpserve.core.arch.model import DraftArch, ModelArch
from mtpserve.core.errors import ConfigError, LoadError
from mtpserve.core.protocols.models import DraftModel, DraftSource, Trunk
from mtpserve.layers.decoder import DecoderModel, Methods
from mtpserve.layers.kernels import Kernels
from mtpserve.weights.checkpoint.checkpoint import Checkpoint
from mtpserve.weights.checkpoint.hf_config import HFConfig
from mtpserve.weights.rules import Rule

# For a shell. Nothing but tensors is read.
CONVERT = (
    "python -c \"import torch; from safetensors.torch import save_file; tensors = torch.load('{}', "
    "weights_only=True); "
    "save_file({{name: tensor.contiguous().clone() for name, tensor in tensors.items()}}, "
    "'model.safetensors')\""
)
# trunk, methods, dtype, positions, kernels
Make = Callable[[DecoderModel, Methods, torch.dtype, int, Kernels], nn.Module]


@dataclass(frozen=True, slots=True)
class Head:
    """A draft model as far as config and headers tell. `rules`: from its tensors to the parameters of what
    `make` gives. `floor`: as in models.family.Family. `vocab`: of one that reads text by itself, whose
    tokenizer must be the model's, its vocabulary with padding."""

    checkpoint: Checkpoint
    arch: DraftArch
    rules: list[Rule]
    make: Make
    floor: float = 0.2
    vocab: int | None = None

    def inside(self, prefix: str) -> list[Rule]:
        """The rules where the module is a part of another one."""
        return [
            rule if rule.target is None else replace(rule, target=prefix + rule.target) for rule in self.rules
        ]


class HeadSource(DraftSource, Protocol):
    def open(self, directory: Path, config: EngineConfig, trunk: ModelArch) -> Head:
        """Raises LoadError, UnsupportedModel, or ConfigError where head and trunk do not fit together."""
        ...


class Separate:
    """core.protocols.DraftSource: what all draft models have in common that were published apart."""

    def in_checkpoint(self, path: str | None) -> bool:
        return False

    def build(self, trunk: Trunk) -> DraftModel:
        draft = cast(DecoderModel, trunk).draft
        assert draft is not None
        return cast(DraftModel, draft)


def opened(directory: Path, config: EngineConfig) -> Checkpoint:
    """Opens the checkpoint, without tensors for --load-format dummy. Raises LoadError."""
    if config.model.load_format == "dummy":
        return Checkpoint(directory, {})
    pickles = [file.name for pattern in ("*.bin", "*.pt") for file in sorted(directory.glob(pattern))]
    if pickles and not any(directory.glob("*.safetensors")):
        why = (
            f"{pickles[0]} is a pickle, which may run code when it is read. As safetensors it will be "
            f"loaded; in that directory"
        )
        raise LoadError(f"{directory}: {why}: {CONVERT.format(pickles[0])}")
    return Checkpoint.open(directory)


def same(name: str, head: HFConfig, value: int, trunk: int) -> None:
    """A dimension that head and trunk must share. Raises ConfigError."""
    if value != trunk:
        raise ConfigError(
            f"--speculative-draft-model-path: {head.path}: {name} is {value}, and the model's is {trunk}"
        )
