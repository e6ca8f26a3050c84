"""Where layers keep what they stored: one pool per kind of layer. A layer is an index in it, and knows neither.

    layers   full  full  window  full  window  full           stores   full: 4 layers        window: 2 layers
    place    0, 0  0, 1  1, 0    0, 2  1, 1    0, 3

Stores whose layers have one window share their pages: see cache/groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import NamedTuple

import torch
from mtpserve_kernels.cache import reference
from torch import Tensor

from mtpserve.cache.pool import Compact, KVPool
from mtpserve.core.arch import Attention, page_groups


class Store(NamedTuple):
    kind: Attention
    pool: KVPool
    group: int  # of its pages


class Place(NamedTuple):
    """Of a layer."""

    store: int
    layer: int  # among the layers of this store


class Stores:
    """`pages`: of each group, in the order of core.arch.page_groups. `dtype`, `poison`, `compact` and `stored` are KVPool's."""

    def __init__(
        self, layers: Sequence[Attention], pages: Sequence[int], page_size: int, dtype: torch.dtype, device: torch.device,
        poison: bool = False, compact: Compact = reference.compact, stored: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        self.page_size = page_size
        kinds, windows = list(dict.fromkeys(layers)), page_groups(layers)
        groups = [windows.index(kind.window) for kind in kinds]

        def pool(kind: Attention, pages: int) -> KVPool:
            count = layers.count(kind)
            return KVPool(kind.kv, count, pages, page_size, dtype, device, poison, compact, stored, kind.index_dim)

        self.stores = [Store(kind, pool(kind, pages[group]), group) for kind, group in zip(kinds, groups, strict=True)]
        self.places = [Place(kinds.index(kind), layers[:i].count(kind)) for i, kind in enumerate(layers)]

    def part(self, layers: slice) -> Stores:
        """Some of the layers, and the stores that these have."""
        places = self.places[layers]
        used = sorted({place.store for place in places})
        part = copy(self)
        part.stores = [self.stores[i] for i in used]
        part.places = [Place(used.index(place.store), place.layer) for place in places]
        return part

    @property
    def nbytes(self) -> int:
        return sum(store.pool.nbytes for store in self.stores)

    @property
    def groups(self) -> list[int]:
        return sorted({store.group for store in self.stores})

    def clear_last(self) -> None:
        """Zeros in the last page of each group, for one that is read before anything is written to it."""
        for store in self.stores:
            store.pool.clear(store.pool.pages - 1)

    def move(self, group: int, source: Tensor, target: Tensor) -> None:
        """Copy whole slots [R, D] to others, in all layers with these pages: see mtpserve_kernels.cache. The paths of trees move so."""
        for store in self.stores:
            if store.group == group:
                store.pool.move(source, target)
