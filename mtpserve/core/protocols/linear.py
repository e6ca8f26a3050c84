"""How the weights of a linear layer are packed, stored and multiplied."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


class Packed(Protocol):
    """A matrix W [N, K] and its bias in the form that a kernel multiplies."""

    def __call__(self, x: Tensor, dtype: torch.dtype, /) -> Tensor:
        """x [T, K] → x W^T + b [T, N] of `dtype`."""
        ...

    def rows(self, ids: Tensor, /) -> Tensor:
        """A copy of W's rows `ids` [n] → [n, K]."""
        ...


# weight [N, K], bias [N], whether every step reads single rows, too → None: torch multiplies the weight as it
# is. It may reorder the weight's own memory, which nobody else reads afterwards.
Pack = Callable[["Tensor", "Tensor | None", bool], "Packed | None"]

# weight [N, K] int8, scale [N], bias [N]. A product rounds each row of x to int8, too. It may reorder the
# weight's memory.
PackInt8 = Callable[["Tensor", "Tensor", "Tensor | None"], "Packed"]


# x [T, K], y [T, N] → y, changed in place: with the products of the rows' adapters
AddAdapters = Callable[["Tensor", "Tensor"], "Tensor"]


class LinearKernels(Protocol):
    """The kernels that linear methods use."""

    @property
    def pack(self) -> Pack: ...

    @property
    def pack_int8(self) -> PackInt8: ...

    @property
    # x [T, K], weight [N, K], bias [N] → x W^T + bias
    def linear(self) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]: ...

    @property
    def linear_stored(self) -> LinearStored: ...


# x [T, K], weight, scale, zeros, global_scale, bias [N] → [T, N]: x W^T + bias. The matrix is float8 [N, K]
# with scales [N / 128, K / 128] rounded up, or float8 or numbers of four bits [N, K / 2] with scales and
# zeros [N, groups] and global scales [N, 1]: see quant/stored.py.
LinearStored = Callable[
    ["Tensor", "Tensor", "Tensor", "Tensor | None", "Tensor | None", "Tensor | None"], "Tensor"
]


class LinearMethod(Protocol):
    """How a linear layer's weights are stored and multiplied."""

    def finish(self, module: nn.Module, lookups: bool = False) -> None:
        """After loading: pack or convert `module.weight`. `lookups`: every step reads single rows, too."""
        ...

    def apply(self, module: nn.Module, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """x [T, inputs] → [T, outputs] of `dtype`, by default x's."""
        ...

    def rows(self, module: nn.Module, ids: Tensor) -> Tensor:
        """A copy of the weight's rows `ids` [n], as numbers [n, inputs], float32 where they are stored in
        fewer bits than the model computes with; after `finish`."""
        ...
