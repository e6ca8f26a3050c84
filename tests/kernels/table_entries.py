"""The entries of a chip's table of tilings (mtpserve_kernels/tuned), and a launch of each that takes no memory to speak of."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from mtpserve_kernels import tuned


@dataclass(frozen=True, slots=True)
class Entry:
    op: str
    shape: str  # `bfloat16 E32 H1024`
    rows: int  # the largest number of its bucket; of the column `invariant` one that all tiles are for
    tiling: tuned.Tile

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.shape.split()[0])
        return dtype

    @property
    def sizes(self) -> dict[str, int]:
        return {name: int(number) for name, number in re.findall(r"([A-Za-z]+)(\d+)", self.shape.split(maxsplit=1)[1])}


def entries_of(chip: str) -> Iterator[Entry]:
    for op, shapes in tuned.table(chip).items():
        for shape, columns in shapes.items():
            for rows, tiling in columns.get("fastest", {}).items():
                yield Entry(op, shape, int(rows), tiling)
            if "invariant" in columns:
                yield Entry(op, shape, 1, columns["invariant"])
                yield Entry(op, shape, tuned.MAX_ROWS, columns["invariant"])


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def launch(entry: Entry) -> None:
    """Calls the op's wrapper, which takes the entry's tiling, with two of the experts where there are more."""
    size, rows = entry.sizes, entry.rows
    with tuned.override(entry.op, entry.tiling):
        if entry.op == "route":
            route(entry.dtype, rows, size)
        elif entry.op in ("gate_up", "down"):
            experts(entry.dtype, rows, size)
        elif entry.op in ("span_gqa", "span_mla"):
            span(entry.op, entry.dtype, rows, size)
        elif entry.op in ("skinny_linear", "skinny_gated"):
            few_rows(entry.op, entry.dtype, min(rows, 64), size)
        elif entry.op == "add_rms_norm":
            add_rms_norm(entry.dtype, rows, size)
        elif entry.op == "rope_store":
            rope_store(entry.dtype, rows, size)
        else:
            raise ValueError(f"no wrapper consults a table for the op {entry.op!r}")


def route(dtype: torch.dtype, rows: int, size: dict[str, int]) -> None:
    from mtpserve_kernels.moe.route import route

    x, weight, groups = torch.zeros(rows, size["H"], dtype=dtype), torch.zeros(size["E"], size["H"]), 8 if size["E"] % 8 == 0 else 1
    route(x, weight, None, 8, 1, 1, True, 1.0)
    route(x, weight, torch.zeros(size["E"]), min(8, size["E"] // groups), groups, max(groups // 2, 1), True, 1.0)


def experts(dtype: torch.dtype, rows: int, size: dict[str, int]) -> None:
    from mtpserve_kernels.moe.experts import experts

    x = torch.zeros(rows, size["H"], dtype=dtype if dtype.itemsize > 1 else torch.bfloat16)
    gate_up, down = torch.zeros(2, 2 * size["S"], size["H"], dtype=dtype), torch.zeros(2, size["H"], size["S"], dtype=dtype)
    scales = (None, None)
    if dtype.itemsize == 1:
        blocks, deep = -(-size["S"] // 128), -(-size["H"] // 128)
        scales = torch.zeros(2, 2 * blocks, deep), torch.zeros(2, deep, blocks)
    experts(x, torch.zeros(rows, size["K"]), ints(rows, size["K"]), gate_up, down, None, None, *scales)


def span(op: str, dtype: torch.dtype, width: int, size: dict[str, int]) -> None:
    from mtpserve_kernels.attention.span import span_gqa, span_mla

    heads, kv_heads, dim = size["heads"], size["kv"], size["D"]
    q = torch.zeros(width, heads, dim, dtype=dtype if dtype.itemsize > 1 else torch.bfloat16)
    cache = torch.zeros(64, kv_heads, dim, dtype=dtype)
    where = ints(2, 16), ints(1), ints(2), ints(1), ints(width), None, None, 64, 0.1
    if op == "span_mla":
        span_mla(q, cache, *where, 512, width=width)
    else:
        span_gqa(q, cache, cache.clone(), *where, width=width)


def few_rows(op: str, dtype: torch.dtype, rows: int, size: dict[str, int]) -> None:
    from mtpserve_kernels.fused.linear import skinny_gated, skinny_linear

    weight, x = (
        torch.zeros(size["N"], size["K"], dtype=dtype),
        torch.zeros(rows, size["K"], dtype=dtype if dtype.itemsize > 1 else torch.bfloat16),
    )
    if op == "skinny_gated":
        skinny_gated(x, weight)
    else:
        skinny_linear(x, weight, None, torch.zeros(-(-size["N"] // 128), -(-size["K"] // 128)) if dtype.itemsize == 1 else None)


def add_rms_norm(dtype: torch.dtype, rows: int, size: dict[str, int]) -> None:
    from mtpserve_kernels.fused.norm import add_rms_norm

    x = torch.zeros(rows, size["H"], dtype=dtype)
    add_rms_norm(x, x, x[0], 1e-6)


def rope_store(dtype: torch.dtype, rows: int, size: dict[str, int]) -> None:
    from mtpserve_kernels.fused.rope import rope_store

    heads, kv_heads, dim = size["heads"], size["kv"], size["D"]
    qkv, table, cache = torch.zeros(rows, heads + 2 * kv_heads, dim, dtype=dtype), torch.zeros(64, dim // 2), torch.zeros(64, kv_heads, dim)
    for norm in (None, qkv[0, 0]):
        rope_store(qkv, ints(rows), table, table, ints(rows), cache.to(dtype), cache.to(dtype), heads, norm, norm)
