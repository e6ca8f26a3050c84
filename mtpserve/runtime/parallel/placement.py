"""The process of each routed expert, if experts are spread over several engines: evenly in their order, or as
a file says.

The processes are EP ranks: rank r of engine e has the number e * ranks + r, the engine's own where it has one
rank. A file (`--expert-map`) is JSON: {"3": [0, 1, 1, 0], …}, for layers by their numbers the EP rank of each
expert. Layers that it does not name are spread in order.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mtpserve.core.errors import ConfigError

Owners = Mapping[int, Sequence[int]]  # layer → the EP rank of each expert


@dataclass(frozen=True, slots=True)
class ExpertPlacement:
    """Seen from `rank` of engine `engine`."""

    engine: int
    engines: int
    layer_owners: Owners = field(default_factory=dict)
    rank: int = 0
    ranks: int = 1  # ranks of each engine

    def owners(self, layer: int, experts: int) -> Sequence[int]:
        return (
            self.layer_owners[layer]
            if layer in self.layer_owners
            else in_order(experts, self.engines * self.ranks)
        )

    def owned(self, layer: int, experts: int) -> list[int]:
        me = self.engine * self.ranks + self.rank
        return [expert for expert, owner in enumerate(self.owners(layer, experts)) if owner == me]

    def places(self, layer: int, experts: int) -> list[tuple[int, int]]:
        """Returns for each expert its engine, and its number among its EP rank's. The engine is -1 if another
        rank of each engine must ask for it: all ranks of an engine have the same rows, and each asks those of
        its own number."""
        owners = self.owners(layer, experts)
        engines = (owner // self.ranks if owner % self.ranks == self.rank else -1 for owner in owners)
        return [
            (engine, sum(other == owners[expert] for other in owners[:expert]))
            for expert, engine in enumerate(engines)
        ]


def in_order(experts: int, size: int) -> list[int]:
    return [expert * size // experts for expert in range(experts)]


def read_owners(file: str, size: int, layers: Mapping[int, int]) -> Owners:
    """`size`: how many EP ranks there are. `layers`: those with experts, and how many. Raises ConfigError
    that names file, layer and what is wrong."""
    try:
        owners_by_layer = json.loads(Path(file).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--expert-map {file}: {error}") from error
    if not isinstance(owners_by_layer, dict):
        raise ConfigError(
            f"--expert-map {file} must be a JSON object: for each layer the EP ranks of its experts"
        )
    for name, owners in owners_by_layer.items():
        if not name.isdecimal() or int(name) not in layers:
            raise ConfigError(f"--expert-map {file}: {name!r} is not the number of a layer with experts")
        count = layers[int(name)]
        good = (
            isinstance(owners, list)
            and len(owners) == count
            and all(type(owner) is int and 0 <= owner < size for owner in owners)
        )
        if not good:
            raise ConfigError(
                f"--expert-map {file}: layer {name} must have {count} numbers of EP ranks in [0, {size - 1}]"
            )
        if missing := sorted(set(range(size)) - set(owners)):
            raise ConfigError(
                f"--expert-map {file}: in layer {name} EP rank {missing[0]} has no expert, and each "
                f"must have one"
            )
    return {int(name): owners for name, owners in owners_by_layer.items()}


def balanced(load: Sequence[int], size: int) -> list[int]:
    """The EP rank of each expert: the one with the highest load that is left goes to the rank with the
    lowest, of those that have room, as all have the same number of experts (longest processing time first,
    Graham 1969)."""
    owners, carried, room = (
        [0] * len(load),
        [0] * size,
        [len(in_order_of(rank, len(load), size)) for rank in range(size)],
    )
    for expert in sorted(range(len(load)), key=lambda expert: -load[expert]):
        rank = min((rank for rank in range(size) if room[rank]), key=lambda rank: (carried[rank], rank))
        owners[expert] = rank
        carried[rank] += load[expert]
        room[rank] -= 1
    return owners


def in_order_of(rank: int, experts: int, size: int) -> list[int]:
    return [expert for expert, owner in enumerate(in_order(experts, size)) if owner == rank]


def imbalance(load: Sequence[int], owners: Sequence[int], size: int) -> float:
    """The busiest EP rank's load as a multiple of the mean: 1.0 is even."""
    carried = [
        sum(expert_load for expert_load, owner in zip(load, owners, strict=True) if owner == rank)
        for rank in range(size)
    ]
    return max(carried) * size / sum(carried) if any(carried) else 1.0
