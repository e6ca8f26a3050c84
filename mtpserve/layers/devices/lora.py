"""The kernels of a model whose linear layers have low-rank adapters, and the place of these.

The adapters of a layer are tensors with a fixed number of slots, so that a captured step finds them where
they were. In a pass in which no row has an adapter nothing else runs than without them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from mtpserve_kernels.lora.reference import RowAdapters
from torch import Tensor, nn

from mtpserve.core.arch.gates import ClampedGate, GeluGate
from mtpserve.core.protocols.attention import Context
from mtpserve.layers.decoder import DecoderLayer, DecoderModel
from mtpserve.layers.devices.torch_kernels import pack_layers as one_by_one
from mtpserve.layers.kernels import AddLoRA, Kernels, LastNorm, Layer, RunLayers
from mtpserve.layers.linear import Linear
from mtpserve.layers.mixers.attention import GQA
from mtpserve.layers.mlp import MLP
from mtpserve.layers.rope import Rotation


@dataclass(frozen=True, slots=True)
class LoRASizes:
    slots: int  # adapters in one batch
    rank: int  # of each adapter, at most


class PassAdapters:
    """Which adapter each row of the pass has that is computed now; None: no row has one."""

    def __init__(self) -> None:
        self.rows: RowAdapters | None = None


class LinearAdapters(nn.Module):
    """The adapters of one linear layer. Their buffers are no part of a checkpoint."""

    a: Tensor  # [slots, parts rank, inputs]
    b: Tensor  # [slots, rank, outputs]

    def __init__(self, linear: Linear, sizes: LoRASizes, current: PassAdapters, add: AddLoRA) -> None:
        super().__init__()
        outputs, inputs = linear.weight.shape
        self.parts, self.current, self.add = linear.parts, current, add
        self.register_buffer("a", torch.zeros(sizes.slots, len(self.parts) * sizes.rank, inputs), False)
        self.register_buffer("b", torch.zeros(sizes.slots, sizes.rank, outputs), False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x [T, inputs], y [T, outputs] → y, with the products of the rows' adapters."""
        rows = self.current.rows
        return y if rows is None else self.add(x, y, rows, self.a, self.b, self.parts)


def with_adapters(kernels: Kernels) -> tuple[Kernels, PassAdapters]:
    """Kernels that take whole layers in one call, or a gate with its product, know no adapters: while a row
    has one they are replaced by those that call each linear layer."""
    current = PassAdapters()

    def gated(gate_up: Callable[[Tensor], Tensor], x: Tensor, gate: ClampedGate | GeluGate | None) -> Tensor:
        if current.rows is None or not isinstance(gate_up, Linear) or gate_up.adapters is None:
            return kernels.gated(gate_up, x, gate)
        # Sums are rounded once, after the gate, as in one call: rows without an adapter are the same.
        return kernels.gated(partial(gate_up, dtype=torch.float32), x, gate).to(x.dtype)

    def pack_layers(layers: Sequence[Layer], norm: LastNorm) -> RunLayers:
        together, apart = kernels.pack_layers(layers, norm), one_by_one(layers, norm)

        def run(
            x: Tensor, rotation: Rotation, contexts: Sequence[Context], taps: tuple[int, ...]
        ) -> tuple[Tensor, Tensor, list[Tensor]]:
            return (together if current.rows is None else apart)(x, rotation, contexts, taps)

        return run

    return replace(kernels, gated=gated, pack_layers=pack_layers), current


def attach(model: DecoderModel, sizes: LoRASizes, current: PassAdapters) -> None:
    """Gives adapters to the linear layers of grouped-query attention and of dense feed-forward blocks, in
    all layers of the trunk. Before the weights are loaded."""
    for layer in model.layers:
        for linear in adaptable(layer):
            linear.adapters = LinearAdapters(linear, sizes, current, model.kernels.add_lora)


def adaptable(layer: nn.Module) -> list[Linear]:
    if not isinstance(layer, DecoderLayer):
        return []
    linears = [layer.attention.qkv, layer.attention.out] if isinstance(layer.attention, GQA) else []
    return linears + ([layer.mlp.gate_up, layer.mlp.down] if isinstance(layer.mlp, MLP) else [])


def adapters_of(model: nn.Module) -> dict[str, LinearAdapters]:
    """By the names of their linear layers."""
    return {
        name.removesuffix(".adapters"): module
        for name, module in model.named_modules()
        if isinstance(module, LinearAdapters)
    }


def has_adapters(model: nn.Module) -> bool:
    return bool(adapters_of(model))
