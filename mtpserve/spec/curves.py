"""Published acceptance curves, and the acceptance rates that follow from them: for measurements with
synthetic acceptance.

A curve is the mean number of tokens that a verification commits, including the target's own, with chains of
1, 2, 3 … drafts.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from mtpserve.core.errors import ConfigError

# SPEED-Bench coding, outputs of 4096 tokens, the models' own sampling: InferenceX, golden_al_distribution/.
# DeepSeek-R1: NVIDIA's TensorRT-LLM blog on R1's MTP. Curves that are published for one depth only are left
# out.
CURVES: dict[str, tuple[float, ...]] = {
    "glm-5.2-mtp": (1.84, 2.50, 2.99, 3.33, 3.61, 3.78, 3.91, 4.06),
    "minimax-m3-eagle3-thinking": (1.78, 2.38, 2.83, 3.11, 3.35, 3.45, 3.53, 3.74),
    "minimax-m3-eagle3": (1.84, 2.52, 2.93, 3.41, 3.59, 3.57, 3.85, 4.06),
    "deepseek-r1-mtp": (1.92, 2.58, 2.82, 2.99, 3.01),
}
NAME = "--speculative-synthetic-acceptance"


@dataclass(frozen=True, slots=True)
class Curve:
    name: str  # as the user gave it
    lengths: tuple[float, ...]  # at 1, 2, 3 … drafts

    def rates(self, depth: int) -> list[float]:
        """Returns the acceptance of drafts 1 … depth, given that all before were accepted. After the curve's
        end its last rate is repeated."""
        rates = conditional(self.lengths)
        return (rates + rates[-1:] * depth)[:depth]


def conditional(lengths: Sequence[float]) -> list[float]:
    """length(k) = 1 + Σ_{i≤k} Π_{j≤i} rate(j), solved for the rates.

    The products P(i) = length(i) - length(i-1) cannot increase with i. Where measured ones do, neighbours get
    their mean (pool adjacent violators), which does not change the last length.
    """
    pools: list[tuple[float, int]] = []  # mean, members
    for before, now in pairwise((1.0, *lengths)):
        mean, members = now - before, 1
        while pools and pools[-1][0] < mean:
            other, others = pools.pop()
            mean, members = (mean * members + other * others) / (members + others), members + others
        pools.append((mean, members))
    products = [1.0, *(max(mean, 0.0) for mean, members in pools for _ in range(members))]
    return [now / before if before > 0 else 0.0 for before, now in pairwise(products)]


def read_curve(value: str) -> Curve:
    """A published curve's name, numbers with commas between them, or a JSON file of such numbers. Raises
    ConfigError."""
    if value in CURVES:
        return Curve(value, CURVES[value])
    try:
        return Curve(value, checked(value, [float(number) for number in value.split(",")]))
    except ValueError:
        return Curve(value, checked(value, from_file(value)))


def from_file(path: str) -> object:
    try:
        contents = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{NAME} must be one of {', '.join(CURVES)}, numbers like 1.84,2.50,2.99, or a JSON "
            f"file, got {path!r}"
        ) from error
    except ValueError as error:
        raise ConfigError(f"{NAME} {path}: is not JSON: {error}") from error
    return contents.get("acceptance_length") if isinstance(contents, dict) else contents


def checked(value: str, lengths: object) -> tuple[float, ...]:
    if (
        not isinstance(lengths, list)
        or not lengths
        or not all(type(length) in (int, float) for length in lengths)
    ):
        raise ConfigError(
            f"{NAME} {value}: must hold acceptance lengths, a list of numbers or an object with one "
            f"as 'acceptance_length'"
        )
    for drafts, length in enumerate(lengths, 1):
        if not (math.isfinite(length) and 1 <= length <= drafts + 1):
            raise ConfigError(
                f"{NAME} {value}: the acceptance length of {drafts} drafts must be in [1, "
                f"{drafts + 1}], got {length}"
            )
    return tuple(float(length) for length in lengths)
