"""Tilings that were chosen for a chip, in files beside this module; a kernel's own rule holds where a key is missing.

    sm_90.json      {"chip", "source", "ops": {op: {shape: {"fastest": {rows bucket: tiling}, "invariant": tiling}}}}

`fastest` has a tiling for each bucket of rows: 1, 2, 4, … up to MAX_ROWS, each for so many rows and fewer. `invariant` is one tiling, with
one split of the sum, for all numbers of rows: a row's bits then do not depend on who shares the launch. A tiling is a record of integers
whose names are those of the op's own tiling. `benchmarks/gpu_profile.py --write-tuned` writes such a file.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

MAX_ROWS = 256
Tile = Mapping[str, int]

_overrides: dict[str, Tile] = {}


def tiling(op: str, shape: str, rows: int, device: torch.device, invariant: bool = False) -> Tile | None:
    """What the table of the device's chip says of `op` with this shape and so many rows; None: nothing."""
    if op in _overrides:
        return _overrides[op]
    chip = chip_of(device)
    return None if chip is None else lookup(chip, op, shape, bucket(rows), invariant)


@contextmanager
def override(op: str, tile: Tile) -> Iterator[None]:
    """The op's wrapper takes this tiling, whatever shape it is called with: to measure a candidate, or to compile it."""
    previous = _overrides.get(op)
    _overrides[op] = tile
    try:
        yield
    finally:
        del _overrides[op]
        if previous is not None:
            _overrides[op] = previous


def bucket(rows: int) -> int:
    """The smallest power of two that is not below `rows`; 0 above MAX_ROWS, where no table has an entry."""
    return 0 if rows > MAX_ROWS else 1 << max(rows - 1, 0).bit_length()


@lru_cache(maxsize=4096)
def lookup(chip: str, op: str, shape: str, rows_bucket: int, invariant: bool) -> Tile | None:
    entry = table(chip).get(op, {}).get(shape)
    if entry is None:
        return None
    tile: Tile | None = entry.get("invariant") if invariant else entry.get("fastest", {}).get(str(rows_bucket))
    return tile


@lru_cache(maxsize=8)
def table(chip: str) -> dict[str, dict[str, dict[str, Any]]]:
    """op → shape → columns; empty for a chip without a file."""
    path = path_of(chip)
    ops: dict[str, dict[str, dict[str, Any]]] = json.loads(path.read_text())["ops"] if path.is_file() else {}
    return ops


def path_of(chip: str) -> Path:
    return Path(__file__).with_name(f"{chip}.json")


@lru_cache(maxsize=16)
def chip_of(device: torch.device) -> str | None:
    """`sm_90`; None: not an NVIDIA GPU."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"
