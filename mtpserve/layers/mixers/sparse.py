"""Latent attention to selected tokens: DeepSeek-V3.2's sparse attention (https://arxiv.org/abs/2512.02556
§2.1).

The lightning indexer scores tokens with heads of its own: their queries come from the normed latent of q,
their one key from the layer's input, as the weight of each head. With --kv-cache-dtype fp8_e4m3 index keys
have a scale for each token, as in the published code. That rotates queries and keys by a Hadamard matrix
before it rounds them, too: a rotation changes no product, and is left out.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtpserve.attention.selection import SelectingContext
from mtpserve.core.arch.model import Attention, ModelArch
from mtpserve.core.protocols.attention import Context
from mtpserve.core.protocols.linear import LinearMethod
from mtpserve.layers.kernels import Kernels
from mtpserve.layers.linear import Linear
from mtpserve.layers.mixers.mla import MLA
from mtpserve.layers.rope import Rotation

KEY_EPS = 1e-6  # epsilon of the norm of index keys, in every published model


class LayerNorm(nn.Module):
    """Mean and variance (https://arxiv.org/abs/1607.06450), in float32, as which the weights are
    published."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size, dtype=torch.float32), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(size, dtype=torch.float32), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.float(), self.weight.shape, self.weight, self.bias, self.eps).to(x.dtype)


class Indexer(nn.Module):
    def __init__(self, arch: ModelArch, dim: int, method: LinearMethod) -> None:
        super().__init__()
        assert arch.mla is not None and arch.mla.q_rank is not None and arch.indexer is not None
        self.heads, self.interleaved = arch.indexer.heads, arch.indexer.interleaved
        self.scale = (dim * self.heads) ** -0.5
        self.q_up = Linear(arch.mla.q_rank, (self.heads * dim,), method)
        self.key = Linear(arch.hidden, (dim,), method)
        self.key_norm = LayerNorm(dim, KEY_EPS)
        self.weigh = Linear(arch.hidden, (self.heads,), method)

    def forward(self, x: Tensor, latent: Tensor, rotation: Rotation, context: SelectingContext) -> None:
        """x [T, hidden], latent [T, q_rank]: the rows' index keys are stored, and tokens are selected for
        them."""
        self.store(x, rotation, context)
        q = self.q_up(latent).unflatten(-1, (self.heads, -1))
        context.select(self.rotated(q, rotation), self.weigh(x, torch.float32) * self.scale)

    def store(self, x: Tensor, rotation: Rotation, context: SelectingContext) -> None:
        key = self.key_norm(self.key(x)).unsqueeze(1)
        context.index_keys.store(context.slots, self.rotated(key, rotation))

    def rotated(self, x: Tensor, rotation: Rotation) -> Tensor:
        return rotation.rotate(x) if self.interleaved else rotation.rotate_halves(x)


class SparseMLA(MLA):
    """`kind`: of the layer. A layer whose kind stores no index key has no indexer."""

    def __init__(self, arch: ModelArch, kind: Attention, method: LinearMethod, kernels: Kernels) -> None:
        super().__init__(arch, method, kernels)
        self.indexer = Indexer(arch, kind.index_dim, method) if kind.index_dim else None

    def forward(self, x: Tensor, rotation: Rotation, context: Context) -> Tensor:
        assert self.q_norm is not None and self.q_up is not None
        q, row = self.down(x).split(self.down.parts, -1)
        latent = self.q_norm(q)
        if self.indexer is not None:
            self.indexer(x, latent, rotation, cast(SelectingContext, context))
        return self.attended(self.q_up(latent), row, rotation, context)

    def store(self, x: Tensor, rotation: Rotation, context: Context) -> None:
        super().store(x, rotation, context)
        if self.indexer is not None:
            self.indexer.store(x, rotation, cast(SelectingContext, context))
