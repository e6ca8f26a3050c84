"""SplitMix64 in plain torch: random numbers that are a function of a key (Steele et al. 2014, https://doi.org/10.1145/2660193.2660195)."""

from __future__ import annotations

import torch
from torch import Tensor

GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15
STREAMS = 3  # independent numbers for each index


def shifted(x: Tensor, bits: int) -> Tensor:
    """Logical right shift; torch's own keeps the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def unit(bits: Tensor) -> Tensor:
    """int64 → (0, 1) float64, both ends left out: a race divides by the logarithm."""
    return (shifted(bits, 12).double() + 0.5) * 2.0**-52


def finalise(x: Tensor) -> Tensor:
    """The finaliser: a bijection of int64 in which every bit depends on every bit."""
    x = (x ^ shifted(x, 30)) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    x = (x ^ shifted(x, 27)) * -7723592293110705685  # 0x94D049BB133111EB
    return x ^ shifted(x, 31)


def keyed(seed: Tensor, index: Tensor, stream: int) -> Tensor:
    """int64, the key of one stream of numbers at one index: `unit(finalise(…))` is its number."""
    return finalise((index * STREAMS + stream) * GOLDEN) ^ seed


def noise(key: Tensor, count: int) -> Tensor:
    """key [...] → exponential noise [..., count] float64, one number for each token."""
    tokens = torch.arange(1, count + 1, device=key.device)
    return -torch.log1p(-unit(finalise(finalise(key).unsqueeze(-1) + tokens * GOLDEN)))
