"""What a backend's plan becomes for the layers: index work is done once per store, and a context is a layer
of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, cast

from torch import Tensor

from mtpserve.cache.pool import IndexKeys, KVPool
from mtpserve.cache.stores import Stores
from mtpserve.core.batch import Batch
from mtpserve.core.protocols.attention import Context


class SelectingContext(Context, Protocol):
    """The context of a layer that attends to selected tokens. It stores its rows' index keys, too, and
    selects before it attends; or it does neither, and attends to what the last layer before it has
    selected."""

    @property
    def index_keys(self) -> IndexKeys:
        """The layer's own."""
        ...

    def select(self, q: Tensor, weights: Tensor) -> None:
        """q [T, heads, dim], weights [T, heads] float32: a token's score is the sum of weight * relu(q ·
        index key) over the heads."""
        ...


class Completed(NamedTuple):
    """Entries that rows of a batch complete, and what they are made of."""

    tokens: Tensor  # [n, span] slots of the layer's inputs, in the order of positions
    there: Tensor  # [n, span] bool, False where there is no token so early
    slots: Tensor  # [n] among the entries
    positions: Tensor  # [n], of the first token that an entry stands for


class CompressingContext(Context, Protocol):
    """The context of a layer that attends to entries, too. It stores its rows and their inputs, makes the
    entries that these complete, and selects among them if its kind does, before it attends."""

    @property
    def inputs(self) -> Tensor:
        """The layer's own [slots, 1, numbers]: one place for each token, see
        core.arch.model.Compressed.inputs."""
        ...

    @property
    def completed(self) -> Completed: ...

    @property
    def entries(self) -> Tensor:
        """The layer's own [entries, 1, key_dim]."""
        ...

    @property
    def entry_index_keys(self) -> IndexKeys: ...

    def select(self, q: Tensor, weights: Tensor) -> None:
        """Selects among entries, as SelectingContext.select does among tokens."""
        ...


class BatchAttention(Protocol):
    """A batch, planned for the layers of one store."""

    @property
    def pool(self) -> KVPool: ...

    @property
    def slots(self) -> Tensor: ...

    def attend(self, q: Tensor, layer: int, sinks: Tensor | None) -> Tensor:
        """`layer`: its index in the pool. The rest: core.protocols.attention.Context."""
        ...


class BatchSelection(BatchAttention, Protocol):
    """The same for layers that attend to selected tokens."""

    def select(self, q: Tensor, weights: Tensor, layer: int) -> None: ...


class BatchCompression(BatchSelection, Protocol):
    """The same for layers that attend to entries."""

    @property
    def entries(self) -> KVPool: ...

    @property
    def completed(self) -> Completed: ...


P = TypeVar("P", bound=BatchAttention, covariant=True)


@dataclass(frozen=True, slots=True)
class LayerContext(Generic[P]):
    """core.protocols.attention.Context; SelectingContext for layers that attend to selected tokens,
    CompressingContext for those that attend to entries."""

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
