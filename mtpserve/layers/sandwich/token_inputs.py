"""Numbers that each layer gets of a row's token by itself ("per-layer embeddings", Gemma 4): a row of a table
that has a part for each layer, and a projection of the token's embedding.

    (row * sqrt(dim) + norm(project(embedding) / sqrt(hidden))) / sqrt(2)

They are made once in a pass, and travel with what else is the same for all layers: the rotation.
"""

from __future__ import annotations

from torch import Tensor, nn

from mtpserve.core.arch.model import ModelArch
from mtpserve.core.protocols.linear import LinearMethod
from mtpserve.layers.embedding import Embedding
from mtpserve.layers.kernels import Kernels
from mtpserve.layers.linear import Linear
from mtpserve.layers.norm import RMSNorm
from mtpserve.layers.rope import Rope, Rotation


class TokenInputs(nn.Module):
    """`embedding`: the model's own, borrowed."""

    def __init__(self, arch: ModelArch, embedding: Embedding, method: LinearMethod, kernels: Kernels) -> None:
        super().__init__()
        assert arch.sandwich is not None
        self.dim, self.borrowed = arch.sandwich.token_dim, [embedding]
        numbers = arch.num_layers * self.dim
        self.table = Embedding(arch.sandwich.token_vocab, numbers, kernels.ranks, self.dim**0.5)
        self.project = Linear(arch.hidden, (numbers,), method)
        self.norm, self.divisor = RMSNorm(self.dim, arch.norm_eps, kernels), arch.hidden**-0.5

    def forward(self, ids: Tensor) -> Tensor:
        """[T] → [T, layers, dim]"""
        projected = (self.project(self.borrowed[0](ids)) * self.divisor).view(-1, self.dim)
        rows = self.table(ids).view(-1, self.dim) + self.norm(projected)
        return (rows * 2**-0.5).view(len(ids), -1, self.dim)  # type: ignore[no-any-return]


class TokenRotation(Rotation):
    """A rotation that has the numbers of the rows' tokens [T, layers, dim], too."""

    def __init__(self, rope: Rope, positions: Tensor, ids: Tensor, inputs: Tensor) -> None:
        super().__init__(rope, positions, ids)
        self.inputs = inputs


class TokenRope(nn.Module):
    """layers.rope.Rope, whose rotations have the numbers of the rows' tokens."""

    def __init__(self, rope: Rope, inputs: TokenInputs) -> None:
        super().__init__()
        self.rope, self.inputs = rope, inputs

    def forward(self, positions: Tensor, ids: Tensor | None = None) -> Rotation:
        """[T], [T]; without ids a rotation alone, for other models' layers."""
        if ids is None:
            return self.rope.forward(positions)
        return TokenRotation(self.rope, positions, ids, self.inputs(ids))
