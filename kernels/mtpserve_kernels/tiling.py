"""How a matrix product is cut into programs and steps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tiling:
    """BT rows, BN outputs, BK inputs."""

    BT: int
    BN: int
    BK: int
    stages: int
