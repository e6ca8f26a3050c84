"""One call of a kernel on random data: what is timed, and what it is compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

Run = Callable[[int], Any]
CALLS = 20


@dataclass(frozen=True, slots=True)
class Call:
    run: Callable[[int], Tensor]  # the number of the call → its output
    exact: Callable[[int], Tensor]  # the same in float64
    num_bytes: float  # that one call moves
    library: dict[str, Run] = field(default_factory=dict)
    copies: int = 1  # of what calls take one after the other

    @property
    def calls(self) -> int:
        """That are timed together: fewer than the copies would find theirs in the cache."""
        return max(CALLS, self.copies)
