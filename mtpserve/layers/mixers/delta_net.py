"""Gated delta-net: a layer that keeps a state instead of keys and values (https://arxiv.org/abs/2412.06464,
as Qwen3-Next has it)."""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtpserve.core.arch.model import ModelArch, Recurrent
from mtpserve.core.protocols.attention import Context, RecurrentContext
from mtpserve.core.protocols.linear import LinearMethod
from mtpserve.layers.kernels import Kernels
from mtpserve.layers.linear import Linear
from mtpserve.layers.norm import RMSNorm
from mtpserve.layers.rope import Rotation


class GatedDeltaNet(nn.Module):
    """`inputs` are q, k and v, which a convolution mixes with those of the rows before, and z, which gates
    the output. `gates` are b and a, two numbers for each head: the share of what a key holds that is
    replaced, and how much is forgotten."""

    packs = ("conv", "decay")  # as in Linear

    def __init__(self, arch: ModelArch, kind: Recurrent, method: LinearMethod, kernels: Kernels) -> None:
        super().__init__()
        self.kind, size, self.ranks = kind, kind.value_heads * kind.value_dim, kernels.ranks
        self.inputs = Linear(
            arch.hidden, (kind.channels + size,) if kind.grouped else (kind.channels, size), method
        )
        self.gates = Linear(
            arch.hidden,
            (2 * kind.value_heads,) if kind.grouped else (kind.value_heads, kind.value_heads),
            method,
        )
        keys = kind.key_heads * kind.key_dim
        if not kind.grouped:
            self.inputs.cuts = (keys, keys, size, size)
        self.cuts = {"conv": (keys, keys, size)}
        self.conv = nn.Parameter(torch.empty(kind.channels, 1, kind.taps), requires_grad=False)
        # its logarithm
        self.decay = nn.Parameter(torch.empty(kind.value_heads, dtype=torch.float32), requires_grad=False)
        self.decay_bias = nn.Parameter(
            torch.empty(kind.value_heads, dtype=torch.float32), requires_grad=False
        )
        self.norm = RMSNorm(kind.value_dim, arch.norm_eps, kernels)
        self.out = Linear(size, (arch.hidden,), method)
        self.taps: Tensor  # [taps, channels] float32
        self.rate: Tensor  # [value_heads]

    def finish_loading(self) -> None:
        self.taps, self.rate = self.conv.squeeze(1).float().T.contiguous(), -self.decay.exp()

    def forward(self, x: Tensor, rotation: Rotation, context: Context) -> Tensor:
        """x [T, hidden]"""
        inputs, z, b, a = self.projected(x)
        forgotten = self.rate * F.softplus(a.float() + self.decay_bias)
        gates = torch.stack([forgotten, b.float().sigmoid()], 1)
        # [T, value_heads, value_dim]
        output = cast(RecurrentContext, context).recur(inputs, gates, self.taps)
        gated = self.norm(output.flatten(0, 1)).view_as(output) * F.silu(z.reshape(output.shape))
        return self.ranks.sum(self.out(gated.flatten(1)))

    def projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x [T, hidden] → the convolution's inputs [T, channels], z [T, value_heads * value_dim], b and a [T,
        value_heads]"""
        kind, inputs, gates = self.kind, self.inputs(x), self.gates(x)
        if not kind.grouped:
            return *inputs.split(self.inputs.parts, -1), *gates.split(self.gates.parts, -1)
        group_size = kind.value_heads // kind.key_heads  # heads that a key head serves
        parts = kind.key_dim, kind.key_dim, group_size * kind.value_dim, group_size * kind.value_dim
        q, k, v, z = (
            chunk.flatten(1) for chunk in inputs.unflatten(-1, (kind.key_heads, -1)).split(parts, -1)
        )
        b, a = (chunk.flatten(1) for chunk in gates.unflatten(-1, (kind.key_heads, -1)).split(group_size, -1))
        return torch.cat([q, k, v], -1), z, b, a
