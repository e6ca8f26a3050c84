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

    batch_attention: P
    layer: int  # its index in the pool

    @property
    def slots(self) -> Tensor:
        return self.batch_attention.slots

    @property
    def keys(self) -> Tensor:
        return self.batch_attention.pool.keys(self.layer)

    @property
    def values(self) -> Tensor:
        return self.batch_attention.pool.values(self.layer)

    def attend(self, q: Tensor, sinks: Tensor | None = None) -> Tensor:
        return self.batch_attention.attend(q, self.layer, sinks)

    @property
    def index_keys(self) -> IndexKeys:
        return self.batch_attention.pool.index_keys(self.layer)

    def select(self, q: Tensor, weights: Tensor) -> None:
        cast(BatchSelection, self.batch_attention).select(q, weights, self.layer)

    @property
    def inputs(self) -> Tensor:
        return self.batch_attention.pool.inputs_of(self.layer)

    @property
    def completed(self) -> Completed:
        return cast(BatchCompression, self.batch_attention).completed

    @property
    def entries(self) -> Tensor:
        return cast(BatchCompression, self.batch_attention).entries.keys(self.layer)

    @property
    def entry_index_keys(self) -> IndexKeys:
        return cast(BatchCompression, self.batch_attention).entries.index_keys(self.layer)


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
    """One for each layer of `stores`; `batch_attentions`: one for each store."""

    def __init__(self, stores: Stores, batch_attentions: Sequence[P]) -> None:
        self.stores, self.batch_attentions = stores, batch_attentions

    def __len__(self) -> int:
        return len(self.stores.places)

    def __getitem__(self, index: Any) -> Any:
        """A layer's, or those of some layers."""
        if isinstance(index, slice):
            store_indices = sorted({location.store for location in self.stores.places[index]})
            return Contexts(
                self.stores.select_layers(index), [self.batch_attentions[store] for store in store_indices]
            )
        location = self.stores.places[index]
        return LayerContext(self.batch_attentions[location.store], location.layer)
