"""The checkpoint's own MTP layers as a draft model: one for all depths, or one for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from mtpserve.core.arch.model import Features, ModelArch
from mtpserve.core.batch import Hidden
from mtpserve.core.protocols.attention import Context
from mtpserve.layers.decoder import DecoderModel, MakeBlock, MakeLayer, Methods, MTPHead
from mtpserve.layers.kernels import Kernels


def decoder(
    arch: ModelArch,
    make_block: MakeBlock,
    methods: Methods,
    dtype: torch.dtype,
    positions: int,
    kernels: Kernels,
    make_layer: MakeLayer | None = None,
) -> DecoderModel:
    """Returns a model with its MTP layers, if it has any. `make_layer`: of the trunk, where a layer is more
    than its blocks."""
    model = DecoderModel(arch, make_layer or make_block, methods, dtype, positions, kernels)
    if arch.mtp is not None and arch.mtp.each_depth:
        model.mtp_head = MTPModules(arch, make_block, methods, kernels, model)
    elif arch.mtp is not None:
        model.mtp_head = MTPHead(arch, make_block(arch.num_layers), methods, kernels, model)
    return model


class MTPModules(nn.Module):
    """core.protocols.models.DraftModel: several MTP layers, one for each depth. In MiMo-V2 each gets the
    trunk's hidden state, and none another one's output:

    draft         1           2                 3        Module i's row in slot s has h of token s - 1 - i,
    module 0    h3 t4                                    and token s. To draft with its next row it needs
    module 1    h2 t4       h3 d1                        those before, also the ones that are made with
    module 2    h1 t4       h2 d1             h3 d2      drafts; committed tokens make them anew.

    In Step-3.5 they are chained. Module i + 1 gets module i's output for the same hidden state, which is that
    of the slot before:

    module 0    h3 t4 → a4                                     a4 comes of h3, b4 of h2 by way of a3.
    module 1    a3 t4 → b4  a4 d1 → b5
    module 2    b3 t4       b4 d1             b5 d2
    """

    lag, at_once, mask, tokens = 1, False, None, None

    def __init__(
        self, arch: ModelArch, make_block: MakeBlock, methods: Methods, kernels: Kernels, trunk: DecoderModel
    ) -> None:
        super().__init__()
        assert arch.mtp is not None
        numbers = range(arch.num_layers, len(arch.layers))
        self.depths = nn.ModuleList(MTPHead(arch, make_block(i), methods, kernels, trunk) for i in numbers)
        self.hidden, self.layers = arch.hidden, arch.layers[arch.num_layers :]
        self.features = Features(last=arch.mtp.hidden_in, rows=len(numbers), chained=arch.mtp.chained)

    def extend(
        self, ids: Tensor, positions: Tensor, features: Tensor | None, contexts: Sequence[Context]
    ) -> Hidden:
        return self.step(ids, positions, features, contexts)

    def step(
        self, ids: Tensor, positions: Tensor, state: Tensor | None, contexts: Sequence[Context]
    ) -> Hidden:
        """Output of the first of the modules that are left, of the others keys and values."""
        assert state is not None
        first = self.fill_after(1, ids, positions, state, contexts)
        head = cast(MTPHead, self.depths[first])
        out = head.extend(ids, positions, state[:, : self.hidden], contexts[first : first + 1])
        return Hidden(out.head, state[:, : -self.hidden])

    def store_kv(
        self, ids: Tensor, positions: Tensor, features: Tensor | None, contexts: Sequence[Context]
    ) -> None:
        assert features is not None
        self.fill_after(0, ids, positions, features, contexts)

    def fill_after(
        self, skipped: int, ids: Tensor, positions: Tensor, state: Tensor, contexts: Sequence[Context]
    ) -> int:
        """state [T, left * hidden], for as many modules as are left, without the first `skipped` of these →
        the number of their first."""
        parts = state.split(self.hidden, -1)
        first = len(self.depths) - state.shape[1] // self.hidden
        for i, chunk in enumerate(parts[skipped:], first + skipped):
            cast(MTPHead, self.depths[i]).store_kv(ids, positions, chunk, contexts[i : i + 1])
        return first

    def module(
        self, number: int, ids: Tensor, positions: Tensor, features: Tensor, contexts: Sequence[Context]
    ) -> Hidden:
        """Runs one of the chained modules: features [T, hidden] → its output. The next module gets the
        output's `features`."""
        return cast(MTPHead, self.depths[number]).extend(
            ids, positions, features, contexts[number : number + 1]
        )

    def store_last_kv(
        self, ids: Tensor, positions: Tensor, features: Tensor, contexts: Sequence[Context]
    ) -> None:
        """Stores what later rows need of the last module."""
        cast(MTPHead, self.depths[-1]).store_kv(ids, positions, features, contexts[-1:])

    def logits(self, head: Tensor, depth: int) -> Tensor:
        return cast(MTPHead, self.depths[depth]).logits(head, depth)
