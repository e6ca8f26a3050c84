"""Contexts of layers that attend to selected tokens, or to entries that stand for several tokens."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from mtpserve.cache.pool import IndexKeys, KVPool
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


class BatchSelection(Protocol):
    """A BatchAttention for layers that attend to selected tokens."""

    def select(self, q: Tensor, weights: Tensor, layer: int) -> None: ...


class BatchCompression(BatchSelection, Protocol):
    """A BatchAttention for layers that attend to entries."""

    @property
    def entries(self) -> KVPool: ...

    @property
    def completed(self) -> Completed: ...
