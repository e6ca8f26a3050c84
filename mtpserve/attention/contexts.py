"""What a backend's plan becomes for the layers: index work is done once per store, and a context is a layer of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from torch import Tensor

from mtpserve.cache.pool import KVPool
from mtpserve.cache.stores import Stores
from mtpserve.core.batch import Batch


class BatchAttention(Protocol):
    """A batch, planned for the layers of one store."""

    @property
    def pool(self) -> KVPool: ...

    @property
    def slots(self) -> Tensor: ...

    def attend(self, q: Tensor, layer: int) -> Tensor:
        """`layer`: its index in the pool."""
        ...


P = TypeVar("P", bound=BatchAttention, covariant=True)


@dataclass(frozen=True, slots=True)
class LayerContext(Generic[P]):
    """core.protocols.Context"""

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

    def attend(self, q: Tensor) -> Tensor:
        return self.planned.attend(q, self.layer)


def slots_of(batch: Batch, group: int) -> Tensor:
    """[T], where the batch's rows are stored in the pages of this group."""
    if group == 0:
        return batch.slots
    slots = batch.seats.slots(batch.row_seats, batch.index + batch.shift, group)
    return slots if batch.unstored is None else slots.index_fill(0, batch.cu_q[batch.unstored], batch.seats.spare_slots[group])


def contexts(stores: Stores, planned: Sequence[P]) -> list[LayerContext[P]]:
    """`planned`: one for each store → one for each layer."""
    return [LayerContext(planned[place.store], place.layer) for place in stores.places]
