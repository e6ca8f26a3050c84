"""The part of each parameter that a rank has, if several ranks compute one model. Each dimension is one of
these kinds:

    replicated    all of it
    blocks        one of as many equal blocks as the rank's dimension is smaller: rows of a first matrix
                  (gate, up, q), heads, columns of a second one (down, out). Of fused matrices each has blocks
                  of its own. With fewer blocks than ranks (key heads) several ranks have the same one
    tokens        a block of the vocabulary; the last one is filled up with zeros
    once          on the first rank all, on the others zeros: biases of what the ranks sum
    experts       any of the experts' numbers, in any order

The kind follows from the shapes of two modules that were built of the whole dimensions and of one rank's
(core/arch/sharding.py), and from what their parts say of themselves: `parts` and `cuts`, `added_once`
(layers/linear.py), `shared_tokens`, and of experts, which are the first dimension of their parameters
(`experts_first`), `held`: the numbers of those that the rank has; None: all.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, product
from typing import Any

from torch import Tensor, nn

from mtpserve.core.protocols.parallel import ALONE, Ranks
from mtpserve.weights.audit import parameters

Slices = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class Stretch:
    """Numbers start … stop - 1 of the whole dimension, which are at `at` in the rank's."""

    start: int
    stop: int
    at: int

    def inside(self, start: int, stop: int) -> Stretch | None:
        """What of it lies there, counted from `start`."""
        first, last = max(self.start, start), min(self.stop, stop)
        return Stretch(first - start, last - start, self.at + first - self.start) if first < last else None

    @property
    def slices(self) -> tuple[slice, slice]:
        """The slices in the whole dimension and in the rank's."""
        return slice(self.start, self.stop), slice(self.at, self.at + self.stop - self.start)


@dataclass(frozen=True, slots=True)
class Dim:
    """One dimension of a parameter: its size on the rank, and the stretches of the whole one, which has
    `whole`."""

    whole: int
    size: int
    stretches: tuple[Stretch, ...]

    @property
    def replicated(self) -> bool:
        return self.stretches == (Stretch(0, self.whole, 0),)

    @property
    def filled(self) -> bool:
        """True if the stretches, which do not overlap, fill the dimension."""
        return sum(stretch.stop - stretch.start for stretch in self.stretches) == self.size

    def divides(self, block: int) -> bool:
        """Pieces begin where blocks of so many numbers do, and end there or with the whole."""
        numbers = (
            number
            for stretch in self.stretches
            for number in (stretch.start, stretch.at, stretch.stop % self.whole)
        )
        return self.replicated or not any(number % block for number in numbers)


@dataclass(frozen=True, slots=True)
class Move:
    """A copy of the slices `taken` of a checkpoint's tensor to the slices `to` of a parameter, or of one of
    its experts."""

    expert: int | None
    taken: Slices
    to: Slices

    def of(self, parameter: Tensor) -> Tensor:
        """The place, a view."""
        return (parameter if self.expert is None else parameter[self.expert])[self.to]

    def by(self, rows: int, columns: int) -> Move:
        """Returns the move for tensors in which one number stands for so many rows and columns: each part
        begins a new number. columns 0: one number for all."""
        block_shape = (*(1,) * (len(self.to) - 2), rows, columns)
        taken, to = (tuple(map(coarse, slices, block_shape)) for slices in (self.taken, self.to))
        return Move(self.expert, taken, to)


def coarse(numbers: slice, block: int) -> slice:
    if not block:
        return slice(0, 1)
    start = -(-numbers.start // block)
    return slice(start, start - (-(numbers.stop - numbers.start) // block))


@dataclass(frozen=True, slots=True)
class Shard:
    """The rank's part of one parameter."""

    dims: tuple[Dim, ...]

    @property
    def filled(self) -> bool:
        return all(dim.filled for dim in self.dims)

    @property
    def columns(self) -> int:
        """The columns of the whole parameter."""
        return self.dims[-1].whole

    @property
    def whole(self) -> tuple[int, ...]:
        """The whole parameter's shape."""
        return tuple(dim.whole for dim in self.dims)

    def moves(
        self, expert: int | None = None, rows: tuple[int, int] | None = None, every: bool = False
    ) -> Iterator[Move]:
        """Yields the moves for a tensor that is these rows (start, number) of the whole parameter, or of one
        expert's matrix in it, or of `every` one's; None: all rows. Yields nothing if the rank has no part of
        it."""
        dims, places = self.dims, list[int | None]([None])
        if expert is not None:
            held = (stretch.inside(expert, expert + 1) for stretch in self.dims[0].stretches)
            dims, places = self.dims[1:], [stretch.at for stretch in held if stretch is not None]
        stretches = [list(dim.stretches) for dim in dims]
        if rows is not None:
            within = (stretch.inside(rows[0], sum(rows)) for stretch in stretches[int(every)])
            stretches[int(every)] = [stretch for stretch in within if stretch is not None]
        for place, combined in product(places, product(*stretches)):
            both = [stretch.slices for stretch in combined]
            yield Move(place, tuple(taken for taken, _ in both), tuple(to for _, to in both))


def replicated(size: int) -> Dim:
    return Dim(size, size, (Stretch(0, size, 0),))


def blocks(whole: Sequence[int], local: Sequence[int], ranks: Ranks) -> Dim:
    """`whole`: sizes of the parts of the dimension, `local`: of the rank's."""
    stretches = []
    for size, mine, start, at in zip(whole, local, starts(whole), starts(local), strict=True):
        number, rest = divmod(size, mine)
        assert not rest and (ranks.size % number == 0 or number % ranks.size == 0), (size, mine, ranks.size)
        first = start + ranks.rank * number // ranks.size * mine
        stretches.append(Stretch(first, first + mine, at))
    return Dim(sum(whole), sum(local), tuple(joined(stretches)))


def tokens(whole: int, local: int, ranks: Ranks) -> Dim:
    start, stop = min(ranks.rank * local, whole), min((ranks.rank + 1) * local, whole)
    return Dim(whole, local, (Stretch(start, stop, 0),) if start < stop else ())


def once(size: int, ranks: Ranks) -> Dim:
    return replicated(size) if ranks.rank == 0 else Dim(size, size, ())


def experts(whole: int, numbers: Sequence[int]) -> Dim:
    """`numbers`: of the rank's experts, in the order of its parameter."""
    return Dim(
        whole,
        len(numbers),
        tuple(joined(Stretch(number, number + 1, at) for at, number in enumerate(numbers))),
    )


def starts(sizes: Sequence[int]) -> list[int]:
    return list(accumulate(sizes, initial=0))[:-1]


def joined(stretches: Sequence[Stretch] | Iterator[Stretch]) -> Iterator[Stretch]:
    """Neighbours that are neighbours in both become one."""
    last: Stretch | None = None
    for stretch in stretches:
        if last is not None and last.stop == stretch.start and last.at + last.stop - last.start == stretch.at:
            last = Stretch(last.start, stretch.stop, last.at)
            continue
        if last is not None:
            yield last
        last = stretch
    if last is not None:
        yield last


def shards_of(whole: nn.Module, local: nn.Module, ranks: Ranks = ALONE) -> dict[str, Shard]:
    """Returns the shards by the names of the parameters. `whole` may be on no device, and is `local` itself
    where there is one rank."""
    places = parameters(local)
    return {
        name: shard_of(
            name,
            tuple(parameter.shape),
            tuple(places[name].shape),
            owner_of(whole, name),
            owner_of(local, name),
            ranks,
        )
        for name, parameter in parameters(whole).items()
    }


def owner_of(module: nn.Module, name: str) -> nn.Module:
    return module.get_submodule(name.rpartition(".")[0])


def shard_of(
    name: str, whole: tuple[int, ...], local: tuple[int, ...], of_whole: Any, of_own: Any, ranks: Ranks
) -> Shard:
    leaf, held = name.rpartition(".")[2], getattr(of_own, "expert_ids", None)
    if held is None and leaf in getattr(of_own, "added_once", ()) and divided(of_whole, of_own):
        return Shard((once(whole[0], ranks), *map(replicated, whole[1:])))
    if whole != local and getattr(of_own, "shared_tokens", False):
        return Shard((tokens(whole[0], local[0], ranks), *map(replicated, whole[1:])))
    in_parts = int(getattr(of_own, "experts_first", False))  # the dimension that has parts
    dims = []
    for number, (size, mine) in enumerate(zip(whole, local, strict=True)):
        if number == 0 and held is not None:
            dims.append(experts(size, held))
        elif size == mine:
            dims.append(replicated(size))
        else:
            parts = (
                (cuts_of(of_whole, leaf, size), cuts_of(of_own, leaf, mine))
                if number == in_parts
                else ((size,), (mine,))
            )
            dims.append(blocks(*parts, ranks))
    return Shard(tuple(dims))


def divided(whole: nn.Module, local: nn.Module) -> bool:
    """A rank has a part of what the module holds: it has everything of models that each rank computes
    alone."""
    pairs = zip(whole.parameters(recurse=False), local.parameters(recurse=False), strict=True)
    return any(one.shape != other.shape for one, other in pairs)


def cuts_of(owner: Any, leaf: str, size: int) -> tuple[int, ...]:
    """What ranks divide each for itself."""
    cuts = getattr(owner, "cuts", None) or getattr(owner, "parts", None) or (size,)
    sizes: tuple[int, ...] = cuts.get(leaf, (size,)) if isinstance(cuts, Mapping) else cuts
    assert sum(sizes) == size, (leaf, sizes, size)
    return sizes


def clear(targets: Mapping[str, Tensor], shards: Mapping[str, Shard]) -> None:
    """What no number of the whole model fills."""
    for name, shard in shards.items():
        if not shard.filled:
            targets[name].detach().zero_()
