"""Draft models that the package knows nothing of: one that taps the trunk's layers (lag 1), and a small model of its own (lag 0).

Each has weights of its own and a layer whose keys and values have another shape than the trunk's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mtpserve.core.arch.model import Attention, Features, KVLayout, ModelArch
from mtpserve.core.arch.rope import RopeArch
from mtpserve.core.batch import Hidden
from mtpserve.core.protocols.attention import Context
from mtpserve.core.protocols.models import Trunk
from mtpserve.layers.decoder import DecoderLayer
from mtpserve.layers.devices.torch_kernels import torch_kernels
from mtpserve.layers.embedding import Embedding
from mtpserve.layers.linear import Linear
from mtpserve.layers.mixers.attention import GQA
from mtpserve.layers.mlp import MLP
from mtpserve.layers.norm import RMSNorm
from mtpserve.layers.rope import Rope
from mtpserve.quant.unquantized import Unquantized

HIDDEN, POSITIONS = 16, 400


class OwnModel(nn.Module):
    """core.protocols.models.DraftModel: one layer of grouped-query attention."""

    at_once, mask, tokens = False, None, None

    def __init__(self, trunk: ModelArch, lag: int, features: Features) -> None:
        super().__init__()
        # The attention backend has as many query heads as the trunk; everything else differs.
        kind = Attention(KVLayout("gqa", 1, 4, 4))
        arch = ModelArch(
            family="own", layers=(kind,), hidden=HIDDEN, vocab=trunk.vocab, heads=trunk.heads, head_dim=4, intermediate=24,
            rope=RopeArch(4, 100.0, interleaved=False), norm_eps=1e-6, scale=trunk.scale, max_positions=POSITIONS, tied_head=False,
            eos_ids=(), dtype="float32",
        )  # fmt: skip
        kernels = torch_kernels()
        method = Unquantized(kernels)
        self.lag, self.features, self.layers, self.width = lag, features, (kind,), features.width(trunk.hidden)
        self.embed = Embedding(arch.vocab, HIDDEN)
        self.fuse = Linear(HIDDEN + self.width, (HIDDEN,), method)
        self.again = Linear(2 * HIDDEN, (HIDDEN,), method)
        self.layer = DecoderLayer(arch, GQA(arch, kind, method, kernels), MLP(HIDDEN, 24, method, kernels), kernels)
        self.norm, self.head = RMSNorm(HIDDEN, 1e-6, kernels), Linear(HIDDEN, (arch.vocab,), method)
        self.rope = Rope(arch.rope, POSITIONS, torch.float32)
        generator = torch.Generator().manual_seed(5)
        for parameter in self.parameters():
            if parameter.device.type != "meta":
                parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)

    def extend(self, ids: Tensor, positions: Tensor, features: Tensor | None, contexts: Sequence[Context]) -> Hidden:
        assert (features is None) == (self.width == 0)
        x = self.embed(ids)
        return self.passed(self.fuse(x if features is None else torch.cat([x, features], -1)), positions, contexts)

    def store_kv(self, ids: Tensor, positions: Tensor, features: Tensor | None, contexts: Sequence[Context]) -> None:
        self.extend(ids, positions, features, contexts)

    def step(self, ids: Tensor, positions: Tensor, state: Tensor | None, contexts: Sequence[Context]) -> Hidden:
        if self.width == 0:
            return self.extend(ids, positions, None, contexts)
        assert state is not None
        return self.passed(self.again(torch.cat([self.embed(ids), state], -1)), positions, contexts)

    def passed(self, x: Tensor, positions: Tensor, contexts: Sequence[Context]) -> Hidden:
        (context,) = contexts
        x, residual = self.layer(x, None, self.rope(positions), context)
        normed, x = self.norm.add(x, residual)
        return Hidden(normed, x if self.width else None)

    def logits(self, head: Tensor, depth: int) -> Tensor:
        return self.head(head).float()  # type: ignore[no-any-return]


class Own:
    """core.protocols.DraftSource"""

    def __init__(self, lag: int, features: Features) -> None:
        self.lag, self.features = lag, features

    def in_checkpoint(self, path: str | None) -> bool:
        return False

    def build(self, trunk: Trunk) -> OwnModel:
        return OwnModel(trunk.arch, self.lag, self.features)


TAPPING = Own(1, Features(taps=(0, 1)))
SMALL = Own(0, Features())
