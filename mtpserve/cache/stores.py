"""The places where layers keep what they stored: one pool per kind of layer. A layer is an index in it, and
knows neither.

    layers   full  full  window  full  window  full           stores   full: 4 layers        window: 2 layers
    place    0, 0  0, 1  1, 0    0, 2  1, 1    0, 3

A layer that reads what another one has stored has that layer's place.

Stores whose layers have one window share their pages: see cache/groups.

Layers that attend to entries, too (core.arch.model.Compressed), have these in a pool of their own, in the
pages of full attention: the entry of the tokens that end with token i is in slot slot(i) // every, so that a
page holds as many entries as its tokens make. Nodes of a tree complete entries that may come to nothing,
several for the same tokens: these have places of their own beyond the pages, one for each node of each seat,
and are moved to their slots where the node survives.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import NamedTuple, TypeVar

import torch
from mtpserve_kernels.cache import reference
from torch import Tensor

from mtpserve.cache.pool import Compact, KVPool
from mtpserve.core.arch.model import Attention, KVLayout, KVReader, attention_kinds, page_groups

N = TypeVar("N", int, Tensor)


class Store(NamedTuple):
    kind: Attention
    pool: KVPool
    group: int  # the group of its pages
    entries: KVPool | None = None  # in the pages of group 0
    nodes: int = 0  # nodes of each seat that have a place for an entry

    def of_node(self, req_idx: N, node: N) -> N:
        """The place of the entry that a node completes; the first one after the root is 1."""
        assert self.entries is not None
        return req_idx * self.nodes + node - 1 + self.entries.pages * self.entries.page_size

    @property
    def pools(self) -> list[tuple[int, KVPool]]:
        """The pools, with the groups of their pages."""
        return [(self.group, self.pool), *([] if self.entries is None else [(0, self.entries)])]


class Place(NamedTuple):
    """The place of a layer."""

    store: int
    layer: int  # among the layers of this store


class Stores:
    """`pages`: of each group, in the order of core.arch.model.page_groups. `dtype`, `poison`, `compact` and
    `kv_dtype` are KVPool's. `nodes`: how many seats there are, and how many nodes each may have besides the
    root. `routed`: layers, experts of a token in each, and their dtype."""

    def __init__(
        self, layers: Sequence[Attention | KVReader], pages: Sequence[int], page_size: int,
        dtype: torch.dtype, device: torch.device,
        poison: bool = False, compact: Compact = reference.compact, kv_dtype: torch.dtype | None = None,
        nodes: tuple[int, int] = (0, 0), routed: tuple[int, int, torch.dtype] | None = None,
    ) -> None:  # fmt: skip
        self.page_size = page_size
        # which experts each token had [layers, slots, 1, top_k], in the pages of group 0
        self.routed: KVPool | None = None
        if routed is not None:
            layout = KVLayout("mla", 1, routed[1], 0)
            self.routed = KVPool(layout, routed[0], pages[0], page_size, routed[2], device, compact=compact)
        kinds, windows = list(dict.fromkeys(attention_kinds(layers))), page_groups(layers)
        groups = [windows.index(kind.kv_window) for kind in kinds]

        def pool(kind: Attention, pages: int, size: int, *others: int) -> KVPool:
            return KVPool(
                kind.kv, layers.count(kind), pages, size, dtype, device, poison, compact, kv_dtype, *others
            )

        def entries(kind: Attention) -> KVPool | None:
            if (compressed := kind.compressed) is None:
                return None
            assert page_size % compressed.every == 0, "a page ends where an entry does"
            return pool(
                kind, pages[0], page_size // compressed.every, compressed.index_dim, 0, nodes[0] * nodes[1]
            )

        self.stores = [
            Store(
                kind,
                pool(kind, pages[group], page_size, kind.index_dim, kind.inputs),
                group,
                entries(kind),
                nodes[1],
            )
            for kind, group in zip(kinds, groups, strict=True)
        ]
        self.kinds = [kind.kind if isinstance(kind, KVReader) else kind for kind in layers]
        writers = [kind.source if isinstance(kind, KVReader) else i for i, kind in enumerate(layers)]
        self.places = [Place(kinds.index(self.kinds[i]), layers[:i].count(self.kinds[i])) for i in writers]

    def select_layers(self, layers: slice) -> Stores:
        """Returns some of the layers, and the stores that these have, as these layers read them."""
        places, subset = self.places[layers], copy(self)
        subset.kinds = self.kinds[layers]
        kinds = {location.store: kind for location, kind in zip(places, subset.kinds, strict=True)}
        order = sorted(kinds)
        subset.stores = [self.stores[i]._replace(kind=kinds[i]) for i in order]
        subset.places = [Place(order.index(location.store), location.layer) for location in places]
        return subset

    @property
    def nbytes(self) -> int:
        return sum(pool.nbytes for group in self.groups for pool in self.pools_of(group))

    @property
    def tensors(self) -> list[Tensor]:
        return [tensor for store in self.stores for _, pool in store.pools for tensor in pool.parts]

    @property
    def groups(self) -> list[int]:
        return sorted({group for store in self.stores for group, _ in store.pools})

    def pools_of(self, group: int) -> list[KVPool]:
        """All that is stored in the pages of a group."""
        pools = [pool for store in self.stores for its_group, pool in store.pools if its_group == group]
        return pools if self.routed is None or group else [*pools, self.routed]

    def clear_last(self) -> None:
        """Zeros in the last page of each group, for one that is read before anything is written to it."""
        for group in self.groups:
            for pool in self.pools_of(group):
                pool.clear(pool.pages - 1)

    def move(self, group: int, source: Tensor, target: Tensor) -> None:
        """Copy whole slots [R, D] to others, in all layers with these pages: see mtpserve_kernels.cache. The
        paths of trees move so."""
        for store in self.stores:
            if store.group == group:
                store.pool.move(source, target)
        if self.routed is not None and group == 0:
            self.routed.move(source, target)

    def move_entries(
        self, req_indices: Tensor, nodes: Tensor, index: Tensor, slots: Tensor, moved: Tensor
    ) -> None:
        """seats [R]; of the nodes [R, D] that survived where `moved`, and became the tokens `index` [R, D] in
        `slots` of group 0: the entries that they have completed."""
        req_indices = req_indices.unsqueeze(1)
        for store in self.stores:
            compressed = store.kind.compressed
            if compressed is None or store.entries is None or not store.nodes:
                continue
            # What does not move is copied to where it is.
            completes, node_slots = (
                moved & ((index + 1) % compressed.every == 0),
                store.of_node(req_indices, nodes.clamp(min=1)),
            )
            store.entries.move(node_slots, torch.where(completes, slots // compressed.every, node_slots))
