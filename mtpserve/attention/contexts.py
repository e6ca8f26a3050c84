"""What a backend's plan becomes for the layers: index work is done once per store, and a context is a layer
of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar, cast

from torch import Tensor

from mtpserve.attention.selection import BatchCompression, BatchSelection, Completed
from mtpserve.cache.pool import IndexKeys, KVPool
from mtpserve.cache.stores import Stores
from mtpserve.core.batch import Batch


class BatchAttention(Protocol):
    """A batch, planned for the layers of one store."""

    @property
    def pool(self) -> KVPool: ...

    @property
    def slots(self) -> Tensor: ...

    def attend(self, q: Tensor, layer: int, sinks: Tensor | None) -> Tensor:
        """`layer`: its index in the pool. The rest: core.protocols.attention.Context."""
        ...


P = TypeVar("P", bound=BatchAttention, covariant=True)


@dataclass(frozen=True, slots=True)
class LayerContext(Generic[P]):
    """core.protocols.attention.Context."""

    planned: P
    layer: int  # its index in the pool

    @property
    def slots(self) -> Tensor:
        return self.planned.slots

    @property
    def keys(self) -> Tensor:
        return self.planned.pool.keys(self.layer)

    @property
    def values(self) -> Tensor:
        return self.planned.pool.values(self.layer)

    def attend(self, q: Tensor, sinks: Tensor | None = None) -> Tensor:
        return self.planned.attend(q, self.layer, sinks)

    @property
    def index_keys(self) -> IndexKeys:
        return self.planned.pool.index_keys(self.layer)

    def select(self, q: Tensor, weights: Tensor) -> None:
        cast(BatchSelection, self.planned).select(q, weights, self.layer)

    @property
    def inputs(self) -> Tensor:
        return self.planned.pool.inputs_of(self.layer)

    @property
    def completed(self) -> Completed:
        return cast(BatchCompression, self.planned).completed

    @property
    def entries(self) -> Tensor:
        return cast(BatchCompression, self.planned).entries.keys(self.layer)

    @property
    def entry_index_keys(self) -> IndexKeys:
        return cast(BatchCompression, self.planned).entries.index_keys(self.layer)


def slots_of(batch: Batch, group: int) -> Tensor:
    """[T], where the batch's rows are stored in the pages of this group."""
    if group == 0:
        return batch.slot_mapping
    slots = batch.req_tensors.slot_mapping(batch.token_req_indices, batch.token_indices + batch.shift, group)
    return (
        slots
        if batch.unstored is None
        else slots.index_fill(
            0, batch.query_start_loc[batch.unstored], batch.req_tensors.padding_slots[group]
        )
    )


class Contexts(Sequence[LayerContext[P]]):
    """One for each layer of `stores`; `planned`: one for each store."""

    def __init__(self, stores: Stores, planned: Sequence[P]) -> None:
        self.stores, self.planned = stores, planned

    def __len__(self) -> int:
        return len(self.stores.places)

    def __getitem__(self, index: Any) -> Any:
        """A layer's, or those of some layers."""
        if isinstance(index, slice):
            used = sorted({place.store for place in self.stores.places[index]})
            return Contexts(self.stores.part(index), [self.planned[store] for store in used])
        place = self.stores.places[index]
        return LayerContext(self.planned[place.store], place.layer)
