"""The processes that compute one model together, each a part of every layer (tensor parallel)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Ranks(Protocol):
    """What a layer needs of the other ranks. All ranks call the same methods in the same order with tensors of the same shapes, and each
    gets the same bits: they choose tokens from these numbers, each for itself."""

    rank: int  # 0 … size - 1
    size: int

    def sum(self, x: Tensor) -> Tensor:
        """The sum over all ranks, in the order of their numbers. May overwrite x."""
        ...

    def gather(self, x: Tensor) -> Tensor:
        """[..., n] → [..., size * n]: the ranks' parts side by side."""
        ...


class OneRank:
    """A model in one process."""

    rank, size = 0, 1

    def sum(self, x: Tensor) -> Tensor:
        return x

    def gather(self, x: Tensor) -> Tensor:
        return x


ALONE: Ranks = OneRank()


@dataclass(slots=True)
class PlannedRank:
    """A rank as far as sizes and weights go: nothing can be computed with it."""

    rank: int
    size: int

    def sum(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def gather(self, x: Tensor) -> Tensor:
        raise NotImplementedError


def share(numbers: int, size: int) -> int:
    """Of so many numbers that each rank has; the last ones may have fewer that count."""
    return -(-numbers // size)
