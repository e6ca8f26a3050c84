"""Mamba-2: a layer that keeps a state instead of keys and values (https://arxiv.org/abs/2405.21060, as
Nemotron-H has it)."""

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
from mtpserve.layers.rope import Rotation


class Mamba2(nn.Module):
    """`inputs` are z, which gates the output, then x, B and C, which a convolution mixes with those of the
    rows before, and a step for each head: how much of x is written, and how much is forgotten. The output is
    normed in as many groups as there are key heads.

    A step is not limited: models are trained without limits (`time_step_limit`), those of their configs are
    for initial weights."""

    packs = ("conv", "conv_bias", "decay", "skip")  # as in Linear

    def __init__(self, arch: ModelArch, kind: Recurrent, method: LinearMethod, kernels: Kernels) -> None:
        super().__init__()
        size = kind.value_heads * kind.value_dim
        self.kernels, self.eps, self.group = kernels, arch.norm_eps, size // kind.key_heads
        self.sizes = size, kind.channels, kind.value_heads
        self.inputs = Linear(arch.hidden, (sum(self.sizes),), method)
        keys = kind.key_heads * kind.key_dim
        mixed = size, keys, keys
        self.inputs.cuts, self.cuts = (size, *mixed, kind.value_heads), {"conv": mixed, "conv_bias": mixed}
        self.conv = nn.Parameter(torch.empty(kind.channels, 1, kind.taps), requires_grad=False)
        self.conv_bias = (
            nn.Parameter(torch.empty(kind.channels), requires_grad=False) if kind.conv_bias else None
        )
        # its logarithm
        self.decay = nn.Parameter(torch.empty(kind.value_heads, dtype=torch.float32), requires_grad=False)
        # the bias of the steps
        self.decay_bias = nn.Parameter(
            torch.empty(kind.value_heads, dtype=torch.float32), requires_grad=False
        )
        self.skip = nn.Parameter(torch.empty(kind.value_heads), requires_grad=False)
        self.norm = nn.Parameter(torch.empty(size), requires_grad=False)
        self.out = Linear(size, (arch.hidden,), method)
        self.taps: Tensor  # [taps + 1, channels] float32, the last row is the bias
        self.direct: Tensor  # [value_heads] float32
        self.rate: Tensor  # [value_heads]
        self.ones: Tensor  # [group] float32

    def finish_loading(self) -> None:
        taps = self.conv.squeeze(1).float().T
        bias = torch.zeros_like(taps[0]) if self.conv_bias is None else self.conv_bias.float()
        self.taps, self.rate, self.direct = (
            torch.cat([taps, bias.unsqueeze(0)]),
            -self.decay.exp(),
            self.skip.float(),
        )
        self.ones = torch.ones(self.group, device=self.norm.device)

    def forward(self, x: Tensor, rotation: Rotation, context: Context) -> Tensor:
        """x [T, hidden]"""
        z, inputs, step = self.inputs(x).split(self.sizes, -1)
        step = F.softplus(step.float() + self.decay_bias)
        gates = torch.stack([self.rate * step, step], 1)
        # [T, value_heads, value_dim]
        output = cast(RecurrentContext, context).recur(inputs, gates, self.taps, self.direct)
        gated = output.flatten(1).float() * F.silu(z.float())
        normed, _ = self.kernels.add_rms_norm(gated.reshape(-1, self.group), None, self.ones, self.eps)
        return self.kernels.ranks.sum(self.out(normed.view_as(gated).to(x.dtype) * self.norm))
