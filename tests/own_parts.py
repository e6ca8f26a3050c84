"""Parts that the package knows nothing of, as somebody who adds one would write them: see tests/test_additions.py."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from mtpserve.attention.contexts import LayerContext
from mtpserve.attention.reference import PlannedAttention, ReferenceAttention
from mtpserve.core.arch.gates import ClampedGate
from mtpserve.core.arch.model import ModelArch
from mtpserve.core.batch import Batch
from mtpserve.core.protocols.linear import LinearKernels
from mtpserve.layers.decoder import DecoderModel, Methods
from mtpserve.layers.devices.torch_kernels import gated, torch_kernels
from mtpserve.layers.kernels import Kernels
from mtpserve.models.family import Family
from mtpserve.models.mimo import MIMO
from mtpserve.weights.checkpoint.hf_config import HFConfig

CALLED: list[str] = []  # by what was added


def arch(config: HFConfig, mtp_layers: int) -> ModelArch:
    """MiMo without biases, whatever its config says."""
    CALLED.append("family")
    return replace(MIMO.arch(config, mtp_layers), family="own", qkv_bias=False)


FAMILY = Family(arch, MIMO.build, MIMO.trunk_rules, MIMO.mtp_rules)


class OwnAttention(ReferenceAttention):
    def plan(self, batch: Batch) -> list[LayerContext[PlannedAttention]]:
        CALLED.append("attention")
        return super().plan(batch)


def own_gated(gate_up: Callable[[Tensor], Tensor], x: Tensor, gate: ClampedGate | None = None, /) -> Tensor:
    CALLED.append("kernels")
    return gated(gate_up, x, gate)


def own_kernels() -> Kernels:
    return replace(torch_kernels(), gated=own_gated)


class Doubled:
    """core.protocols.LinearMethod: weights are stored as twice their value."""

    def __init__(self, kernels: LinearKernels) -> None:
        pass

    def finish(self, module: nn.Module, lookups: bool = False) -> None:
        CALLED.append("format")
        module.weight = nn.Parameter(2 * cast(Tensor, module.weight), requires_grad=False)

    def apply(self, module: nn.Module, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        return torch.nn.functional.linear(x, cast(Tensor, module.weight) / 2, cast("Tensor | None", module.bias)).to(dtype or x.dtype)

    def rows(self, module: nn.Module, ids: Tensor) -> Tensor:
        return cast(Tensor, module.weight)[ids] / 2


def built(arch: ModelArch, method: str) -> DecoderModel:
    from mtpserve.quant.registry import METHODS

    kernels = torch_kernels()
    return MIMO.build(arch, Methods.all(METHODS.get(method)(kernels)), torch.float32, 400, kernels)
