"""A model's rotary position embedding: read from its config, used by layers/rope."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RopeArch:
    """Rotary position embedding of the first `dim` numbers of each head; 0: heads are not rotated."""

    dim: int
    theta: float
    interleaved: bool
    scaling: YarnArch | Llama3RopeArch | LinearRopeArch | PartialRopeArch | None = None


@dataclass(frozen=True, slots=True)
class LinearRopeArch:
    """Positions divided by `factor` (https://arxiv.org/abs/2306.15595)."""

    factor: float


@dataclass(frozen=True, slots=True)
class PartialRopeArch:
    """The first `turning` dimensions turn, with the frequencies of all `dim`, and the others stand still:
    pairs are those of the whole head ("proportional" in transformers). Positions are divided by `factor`."""

    turning: int
    factor: float


@dataclass(frozen=True, slots=True)
class Llama3RopeArch:
    """Dimensions that turn less often than `low` times in the original context are stretched by `factor`,
    those that turn more often than `high` times are left alone (Llama 3.1, https://arxiv.org/abs/2407.21783
    §3.4.2 and its published code)."""

    factor: float
    low: float
    high: float
    original_length: int


@dataclass(frozen=True, slots=True)
class YarnArch:
    """https://arxiv.org/abs/2309.00071"""

    factor: float
    original_length: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 0.0
    truncate: bool = True  # the range of blended dimensions ends at whole ones
