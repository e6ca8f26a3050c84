"""How work is cut into programs and steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, TypeVar, cast

import torch

from mtpserve_kernels import tuned

MAX_SCORES = 1 << 26  # of attention/select.py, that are in memory at a time: those of rows together, or of one that has more
SHARED_BYTES = 227 << 10  # of a program on sm_90
Rule = TypeVar("Rule")


@dataclass(frozen=True, slots=True)
class Tiling:
    """Of a matrix product: BT rows, BN outputs, BK inputs."""

    BT: int
    BN: int
    BK: int
    stages: int
    warps: int = 4


def with_table(rule: Rule, op: str, shape: str, rows: int, device: torch.device) -> tuple[Rule, int | None]:
    """A kernel's own tiling with what the chip's table has for its fields, and the number of splits that the table has."""
    entry = dict(tuned.tiling(op, shape, rows, device) or {})
    splits = entry.pop("splits", None)
    return cast(Rule, replace(cast(Any, rule), **entry)) if entry else rule, splits


def type_name(dtype: torch.dtype) -> str:
    """`bfloat16`, as the tables' shapes begin."""
    return str(dtype).removeprefix("torch.")


@lru_cache(maxsize=16)
def shared_memory_of(device: torch.device) -> int:
    """Bytes that one program may have."""
    if device.type != "cuda" or torch.version.hip is not None:
        return SHARED_BYTES
    from triton.runtime import driver

    return int(driver.active.utils.get_device_properties(device.index)["max_shared_mem"])


def processors_of(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 4
