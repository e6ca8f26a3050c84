"""What layers are handed of a planned batch, and who plans it: an attention backend."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Protocol

from mtpserve.core.arch.model import LayerKind
from mtpserve.core.batch import Batch

if TYPE_CHECKING:
    from torch import Tensor


class Context(Protocol):
    """What a layer is handed of a planned batch: where its rows are stored, and attention over what its
    requests have stored.

    The layer first stores its rows' keys and values in `slots`, and then attends.
    """

    @property
    def slots(self) -> Tensor:
        """[T], where the rows are stored."""
        ...

    @property
    def keys(self) -> Tensor:
        """The layer's own [slots, kv_heads, key_dim]."""
        ...

    @property
    def values(self) -> Tensor:
        """[slots, kv_heads, value_dim]; the latent layout's are a part of its keys."""
        ...

    def attend(self, q: Tensor, sinks: Tensor | None = None) -> Tensor:
        """[T, heads, key_dim] → [T, heads, value_dim]. sinks [heads] float32: one more score for each row,
        which takes its part of the softmax and has no value (https://arxiv.org/abs/2309.17453 §3.3)."""
        ...


class RecurrentContext(Protocol):
    """What a layer that keeps a state is handed of a planned batch."""

    def recur(self, inputs: Tensor, gates: Tensor, conv: Tensor, skip: Tensor | None = None) -> Tensor:
        """inputs [T, channels], gates [T, 2, value_heads] float32 (the logarithm of the decay, and the share
        of the value that is written), conv [taps, channels] float32 → [T, value_heads, value_dim]; of Mamba-2
        also a bias and skip: see mtpserve_kernels.recurrent.reference. Called once for each step."""
        ...


class AttentionBackend(Protocol):
    graph_safe: bool
    # a row's numbers do not depend on the other rows, and neither do those of the layers' kernels that belong
    # to it
    exact: bool

    def supports(self, kind: LayerKind) -> bool: ...

    def plan(self, batch: Batch) -> Seq[Context]:
        """Index work, once per batch and store: one context per layer, in the order of the layers. A
        RecurrentContext for a layer that keeps a state, and any for one that keeps nothing."""
        ...
