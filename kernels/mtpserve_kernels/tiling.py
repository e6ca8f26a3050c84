"""How work is cut into programs and steps."""

from __future__ import annotations

from dataclasses import dataclass

MAX_SCORES = 1 << 26  # of attention/select.py, that are in memory at a time: those of rows together, or of one that has more


@dataclass(frozen=True, slots=True)
class Tiling:
    """Of a matrix product: BT rows, BN outputs, BK inputs."""

    BT: int
    BN: int
    BK: int
    stages: int
