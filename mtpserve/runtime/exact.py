"""A model whose numbers for a row depend on that row alone, to the last bit: the exact mode.

Libraries choose how to add up a product by its shape, so a row that is computed among four others may differ
in the last bit from the same row alone, and a near tie between two tokens then falls the other way. Here all
rows go through the trunk in tiles of TILE, the last one padded: every product always has the same shape,
whatever shares the pass. Tiles run one after the other through all layers, which is in order: a row never
looks at a later one.

Proposals are computed as ever: they decide how fast the text comes, not what it says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mtpserve.attention.exact import part_of
from mtpserve.core.arch.model import Features
from mtpserve.core.batch import Hidden
from mtpserve.core.protocols.attention import Context
from mtpserve.core.protocols.models import Trunk

TILE = 8


class ExactModel:
    """core.protocols.Trunk. `trunk` needs the contexts of attention/exact, and a model made with the kernels
    "exact"."""

    def __init__(self, model: Trunk) -> None:
        self.model, self.arch = model, model.arch

    def trunk(
        self, ids: Tensor, positions: Tensor, contexts: Sequence[Context], features: Features
    ) -> Hidden:
        heads, fed = list[Tensor](), list[Tensor]()
        for start in range(0, len(ids), TILE):
            stop = min(start + TILE, len(ids))
            chunk_contexts = part_of(contexts, start, stop, TILE)
            hidden = self.model.trunk(
                tile(ids[start:stop]), tile(positions[start:stop]), chunk_contexts, features
            )
            heads.append(hidden.head[: stop - start])
            if hidden.features is not None:
                fed.append(hidden.features[: stop - start])
        return Hidden(torch.cat(heads), torch.cat(fed) if fed else None)

    def logits(self, head: Tensor) -> Tensor:
        return in_tiles(self.model.logits, head)


def tile(rows: Tensor) -> Tensor:
    """Padded to TILE with the first row."""
    return torch.cat([rows, rows[:1].expand(TILE - len(rows), *rows.shape[1:])])


def in_tiles(function: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    return torch.cat([function(tile(chunk))[: len(chunk)] for chunk in rows.split(TILE)])
