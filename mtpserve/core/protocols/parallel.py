"""The processes that compute one model together: each a part of every layer (tensor parallel), or each its
own requests with the experts spread over all of them (expert parallel)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Ranks(Protocol):
    """What a layer needs of the other ranks. All ranks call the same methods in the same order with tensors
    of the same shapes, and each gets the same bits: they choose tokens from these numbers, each for
    itself."""

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
    """Numbers per rank, rounded up: the last ranks may use fewer."""
    return -(-numbers // size)


class Peers(Protocol):
    """How engines that share their experts talk, or their ranks of one number. All call the same methods in
    the same order. Raises EngineDead where one of them is gone or does not answer in time."""

    rank: int  # 0 … size - 1: the engine's number
    size: int

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        """The same count of numbers from each rank, by rank."""
        ...

    def swap(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """rows [sum(sent), n], for rank 0 first → [sum(received), n], from rank 0 first. n is the same
        everywhere."""
        ...


# x [P, H], chosen [P, 1] of this rank's experts → [P, H], not weighted
ComputeExperts = Callable[["Tensor", "Tensor"], "Tensor"]


class SpreadExperts(Protocol):
    """The places of a model's routed experts, and the rows' way to them and back. Layers have the numbers of
    `ModelArch.layers`."""

    def owned(self, layer: int, experts: int) -> Sequence[int]:
        """The numbers of this process's experts, of so many of that layer, rising."""
        ...

    def serve(self, layer: int, experts: int, compute: ComputeExperts) -> None:
        """From now on this computes what any rank sends to this one's experts."""
        ...

    def outputs(self, layer: int, x: Tensor, topk_ids: Tensor) -> Tensor:
        """x [T, H], topk_ids [T, K] → [T, K, H]: what each chosen expert makes of the row; zeros where
        another rank of this engine has it computed. Raises EngineDead."""
        ...
