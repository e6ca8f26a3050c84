"""Rows that are grouped by expert: the table of tiles, and the experts over it, against their references."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mtpserve_kernels.moe import reference
from mtpserve_kernels.moe.align import MAX_ROWS, align, tile_size
from mtpserve_kernels.moe.experts import experts
from mtpserve_kernels.moe.experts_rows import experts_rows
from torch import Tensor

from tests.kernels.test_moe import in_float8, numbers
from tests.kernels.test_quant import stored_by_row


def choices(device: torch.device, rows: int, number: int, top: int) -> tuple[Tensor, Tensor]:
    """weights and chosen [rows, top]"""
    dice = torch.Generator().manual_seed(rows + number)
    chosen = torch.rand(rows, number, generator=dice).topk(top, -1).indices
    return torch.rand(rows, top, generator=dice).to(device), chosen.to(device)


def poison(chosen: Tensor, number: int, *matrices: Tensor) -> None:
    """NaN where no row chose the expert: it must not be read."""
    unused = [expert for expert in range(number) if not (chosen == expert).any()]
    for matrix in matrices:
        matrix[unused] = torch.nan


@pytest.mark.parametrize("first", [None, 0, 4])
@pytest.mark.parametrize(
    ("rows", "number", "top", "shared", "BT"),
    [(65, 5, 2, 0, 16), (100, 7, 3, 1, 32), (129, 8, 1, 2, 16), (300, 4, 4, 0, 64), (2100, 33, 5, 1, 128)],
)
def test_align(device: torch.device, rows: int, number: int, top: int, shared: int, BT: int, first: int | None) -> None:
    """With `first` most of the numbers are those of experts that are elsewhere. 2,100 rows are more than a program looks at together."""
    everywhere = number if first is None else 3 * number
    _, chosen = choices(device, rows, everywhere, top)
    actual, expected = align(chosen, number, shared, first, BT), reference.align(chosen, number, shared, first, BT)
    assert torch.equal(actual[:, 0], expected[:, 0])
    used = expected[:, 0] >= 0
    assert torch.equal(actual[used], expected[used])
    own = (chosen >= (first or 0)) & (chosen < (first or 0) + number)
    parts = expected[used][:, 1:]
    assert (parts >= 0).sum() == own.sum() + shared * rows and parts[parts >= 0].unique().numel() == (parts >= 0).sum()


@pytest.mark.parametrize("expert", [0, 2, 4])
def test_align_where_all_rows_choose_one_expert(device: torch.device, expert: int) -> None:
    chosen = torch.full((130, 1), expert, device=device)
    tiles = align(chosen, 5, 0, None, 32)
    used = tiles[:, 0] >= 0
    assert used.sum() == 5 and (tiles[used, 0] == expert).all()
    assert tiles[used, 1:].flatten().tolist() == [*range(130), *[-1] * 30]


def test_the_size_of_a_tile() -> None:
    """Qwen3-30B-A3B with 128 to 2,048 rows: an expert's rows fit a tile, most of the time, and a tile is half full or more."""
    assert [tile_size(rows, 8, 128, 128) for rows in (65, 128, 192, 256, 512, 1024, 2048)] == [16, 16, 16, 32, 64, 128, 128]
    assert tile_size(4096, 8, 128, 64) == 64


@pytest.mark.covering(1)
@pytest.mark.parametrize("shared", [0, 1, 2])
@pytest.mark.parametrize(
    ("rows", "hidden", "size", "number", "top"), [(65, 64, 40, 8, 2), (100, 72, 48, 20, 1), (129, 40, 16, 5, 3), (300, 68, 24, 4, 2)]
)
def test_grouped_experts(device: torch.device, rows: int, hidden: int, size: int, number: int, top: int, shared: int) -> None:
    """A third of the experts have no row."""
    weights, chosen = choices(device, rows, max(number * 2 // 3, top), top)
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.float16, 1e-2)):
        gate_up, down = numbers(device, number, 2 * size, hidden).to(dtype) / 8, numbers(device, number, hidden, size).to(dtype) / 8
        beside: tuple[Tensor | None, Tensor | None] = (None, None)
        if shared:
            beside = (numbers(device, 2 * shared * size, hidden).to(dtype) / 8, numbers(device, hidden, shared * size).to(dtype) / 8)
        poison(chosen, number, gate_up, down)
        x = numbers(device, rows, hidden + 8).to(dtype)[:, :hidden]
        arguments = x, weights, chosen, gate_up, down, *beside
        torch.testing.assert_close(experts(*arguments), reference.experts(*arguments), rtol=tolerance, atol=tolerance)


def test_all_rows_choose_one_expert(device: torch.device) -> None:
    x, gate_up, down = numbers(device, 140, 64), numbers(device, 4, 80, 64) / 8, numbers(device, 4, 64, 40) / 8
    weights, chosen = torch.rand(140, 1).to(device), torch.full((140, 1), 2, device=device)
    poison(chosen, 4, gate_up, down)
    arguments = x, weights, chosen, gate_up, down, None, None
    torch.testing.assert_close(experts(*arguments), reference.experts(*arguments), rtol=1e-4, atol=1e-4)


def test_the_order_of_rows_changes_no_row(device: torch.device) -> None:
    """Bit by bit, though other rows share a row's tiles then."""
    (weights, chosen), x = choices(device, 90, 6, 2), numbers(device, 90, 64)
    gate_up, down = numbers(device, 6, 64, 64) / 8, numbers(device, 6, 64, 32) / 8
    order = torch.randperm(90, generator=torch.Generator().manual_seed(0)).to(device)
    there, here = experts(x, weights, chosen, gate_up, down, None, None), (x[order], weights[order], chosen[order])
    assert torch.equal(experts(*here, gate_up, down, None, None), there[order])


@pytest.mark.parametrize("kind", ["clamped", "squared", "float8", "int4", "mxfp4", "nvfp4"])
def test_grouped_experts_of_every_form(device: torch.device, kind: str) -> None:
    if kind == "float8" and device.type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no e4m3 before sm_89")
    rows, hidden, size, number, top = 66, 128, 64, 4, 2
    (weights, chosen), x = choices(device, rows, number - 1, top), numbers(device, rows, hidden) / 16
    gate_up, down = numbers(device, number, 2 * size, hidden) / 8, numbers(device, number, hidden, size) / 8
    biases = numbers(device, number, 2 * size), numbers(device, number, hidden)
    poison(chosen, number, gate_up, down, *biases)
    call: Any = experts_rows if kind in ("int4", "mxfp4", "nvfp4") else experts
    matrices: tuple[Any, ...] = (gate_up, down, None, None)
    options: dict[str, Any] = {}
    if kind == "clamped":
        options = {"gate_up_bias": biases[0], "down_bias": biases[1], "clamped": (1.702, 1.1, 0.7, 0.4)}
    elif kind == "squared":
        matrices, options = (gate_up[:, :size].contiguous(), down, None, None), {"squared": True}
    elif kind == "float8":
        gate_up, down = numbers(device, number, 2 * size, hidden), numbers(device, number, hidden, size)
        stored = [in_float8(part, halves) for part, halves in ((gate_up, 2), (down, 1), (gate_up[0], 2), (down[0], 1))]
        matrices = (*(part[0] for part in stored), *(part[1] for part in stored))
    else:
        matrices = (*stored_by_row(device, gate_up.shape, 2, kind), *stored_by_row(device, down.shape, 2, kind))
        options = {"gate_up_bias": biases[0], "down_bias": biases[1], "clamped": (1.7, 0.5, 0.5, 1.0)}
    arguments = x, weights, chosen, *matrices
    expected = getattr(reference, call.__name__)(*arguments, **options)
    torch.testing.assert_close(call(*arguments, **options), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shared", [0, 2])
def test_some_of_the_grouped_experts(device: torch.device, shared: int) -> None:
    """Those with numbers of others add nothing, also where a row has none here. Room that nobody has written is NaN."""
    hidden, size, number, rows = 64, 32, 9, 100
    (weights, chosen), x = choices(device, rows, number, 3), numbers(device, rows, hidden)
    chosen[0] = torch.arange(3, device=device)
    gate_up, down = numbers(device, number, 2 * size, hidden) / 8, numbers(device, number, hidden, size) / 8
    beside = (numbers(device, 2 * shared * size, hidden) / 8, numbers(device, hidden, shared * size) / 8) if shared else (None, None)
    whole, alone = (reference.experts(x, factor * weights, chosen, gate_up, down, *beside) for factor in (1, 0))
    total = alone
    for first in range(0, number, 3):
        own = gate_up[first : first + 3], down[first : first + 3]
        actual = experts(x, weights, chosen, *own, *beside, first=first)
        expected = reference.experts(x, weights, chosen, *own, *beside, first=first)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
        total = total + actual - alone
    torch.testing.assert_close(total, whole, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [64, 256])
def test_weights_are_read_once(device: torch.device, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs read no more bytes than the chosen experts have, but for those with rows for a second tile; and an expert's programs
    follow one another, in the order in which a GPU starts them: along the first axis of the grid first."""
    if device.type == "cuda":
        pytest.skip("reads are watched in the interpreter")
    from triton.runtime.interpreter import InterpreterBuilder

    hidden, size, number, top = 136, 128, 16, 2
    (weights, chosen), x = choices(device, rows, number, top), numbers(device, rows, hidden).half()
    matrices = numbers(device, number, 2 * size, hidden).half() / 8, numbers(device, number, hidden, size).half() / 8
    num_bytes, readers = [0, 0], [dict[tuple[int, ...], int](), dict[tuple[int, ...], int]()]
    load = InterpreterBuilder.create_masked_load

    def watch(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        for i, matrix in enumerate(matrices):
            offsets = pointers.data[mask.data].astype("int64") - matrix.data_ptr()
            if offsets.size and offsets.min() >= 0 and offsets.max() < matrix.nbytes:
                num_bytes[i] += 2 * offsets.size
                readers[i][self.grid_idx] = int(offsets.min()) // matrix[0].nbytes
        return load(self, pointers, mask, *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_masked_load", watch)
    experts(x, weights, chosen, *matrices, None, None)
    hit = len(chosen.unique())
    assert all(hit * matrix[0].nbytes <= count <= 1.1 * hit * matrix[0].nbytes for count, matrix in zip(num_bytes, matrices, strict=True))
    if rows > MAX_ROWS:
        for places in readers:
            order = [places[place] for place in sorted(places, key=lambda place: place[::-1])]
            assert order == sorted(order) and len(set(order)) == hit < len(order)
