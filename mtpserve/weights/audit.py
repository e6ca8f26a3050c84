"""Checks that a load fills every row of every parameter exactly once, and with finite numbers. Moves no data.

A parameter's rows are numbered consecutively: row r of expert e of a parameter [experts, rows, columns] is
number e * rows + r.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from mtpserve.core.errors import LoadError


@dataclass(frozen=True, slots=True, order=True)
class Fill:
    """Rows start … stop - 1 come from `source`."""

    start: int
    stop: int
    source: str

    def overlaps(self, other: Fill) -> bool:
        return self.start < other.stop and other.start < self.stop


def parameters(module: nn.Module) -> dict[str, Tensor]:
    """What a checkpoint has to fill: parameters and persistent buffers. A shared tensor is listed under each
    of its names."""
    return {
        name: value for name, value in module.state_dict(keep_vars=True).items() if isinstance(value, Tensor)
    }


def row_count(parameter: Tensor) -> int:
    """The number of rows, as numbered above; a scalar is one row."""
    shape = parameter.shape
    return 1 if not shape else shape[0] * shape[1] if len(shape) == 3 else shape[0]


@dataclass(frozen=True, slots=True)
class Audit:
    """Shared parameters count once: fills are kept by tensor, not by name."""

    parameters: dict[str, Tensor]
    fills: dict[int, list[Fill]] = field(default_factory=dict)

    def record(self, name: str, fill: Fill) -> None:
        """Raises LoadError where one of the rows is already taken."""
        fills = self.fills.setdefault(id(self.parameters[name]), [])
        place = bisect(fills, fill)
        # The list is sorted and free of overlaps, so only the two neighbours can overlap.
        for other in fills[max(place - 1, 0) : place + 1]:
            if fill.overlaps(other):
                raise LoadError(f"{fill.source} and {other.source} both fill the parameter {name}")
        fills.insert(place, fill)

    def gaps(self) -> Iterator[tuple[str, int, int]]:
        """(parameter, start, stop) of the rows that nothing fills; a shared parameter under its first
        name."""
        seen: set[int] = set()
        for name, parameter in self.parameters.items():
            if id(parameter) in seen:
                continue
            seen.add(id(parameter))
            position, end = 0, row_count(parameter)
            for fill in self.fills.get(id(parameter), []):
                if fill.start > position:
                    yield name, position, fill.start
                position = fill.stop
            if position < end:
                yield name, position, end


def all_finite(tensor: Tensor) -> bool:
    """True if there is no NaN and no infinity. One pass and no copy: either of them shows in the minimum or
    maximum."""
    if not tensor.is_floating_point() or tensor.numel() == 0:
        return True
    return bool(torch.isfinite(torch.stack(torch.aminmax(tensor))).all())
