"""A decoder layer with norms before and after each block. What is left in the residual is multiplied by a
number of the layer's own (Gemma 4)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtpserve.core.arch.model import ModelArch
from mtpserve.core.protocols.attention import Context
from mtpserve.core.protocols.linear import LinearMethod
from mtpserve.layers.kernels import Kernels
from mtpserve.layers.linear import Linear
from mtpserve.layers.norm import RMSNorm
from mtpserve.layers.rope import Rotation
from mtpserve.layers.sandwich.token_inputs import TokenRotation


class TokenBlock(nn.Module):
    """The last block of a layer, norm(out(gelu(gate(x)) * numbers)): it gets the layer's own numbers of each
    row's token."""

    def __init__(self, arch: ModelArch, dim: int, method: LinearMethod, kernels: Kernels) -> None:
        super().__init__()
        self.gate, self.out = Linear(arch.hidden, (dim,), method), Linear(dim, (arch.hidden,), method)
        self.norm = RMSNorm(arch.hidden, arch.norm_eps, kernels)

    def forward(self, x: Tensor, numbers: Tensor) -> Tensor:
        """x [T, hidden], numbers [T, dim]"""
        gated = F.gelu(self.gate(x), approximate="tanh") * numbers
        return self.norm(self.out(gated))  # type: ignore[no-any-return]


class SandwichLayer(nn.Module):
    """layers.kernels.Layer. `number`: in the model. With `method`, the layer ends with a TokenBlock."""

    def __init__(
        self, arch: ModelArch, number: int, attention: nn.Module, mlp: nn.Module, kernels: Kernels,
        method: LinearMethod | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.attention, self.mlp, self.number = attention, mlp, number
        norms = (RMSNorm(arch.hidden, arch.norm_eps, kernels) for _ in range(4))
        self.attention_norm, self.after_attention, self.mlp_norm, self.after_mlp = norms
        self.scale = nn.Parameter(torch.empty(1), requires_grad=False)
        self.token: TokenBlock | None = None
        if method is not None and arch.sandwich is not None:
            self.token = TokenBlock(arch, arch.sandwich.token_dim, method, kernels)

    def forward(
        self, x: Tensor, residual: Tensor | None, rotation: Rotation, context: Context
    ) -> tuple[Tensor, Tensor]:
        """The layer's input is residual + x, its output the sum of the two that it gives."""
        normed, residual = self.attention_norm.add(x, residual)
        x = self.after_attention(self.attention(normed, rotation, context))
        normed, residual = self.mlp_norm.add(x, residual)
        x = self.after_mlp(self.mlp(normed))
        if self.token is not None:
            assert isinstance(rotation, TokenRotation)
            residual = residual + x
            x = self.token(residual, rotation.inputs[:, self.number])
        return x * self.scale, residual * self.scale
