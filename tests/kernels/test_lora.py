"""Low-rank adapters: the reference against merged weights, the kernels against it, and bit by bit where a row must not see others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from mtpserve_kernels.cpu import lora as cpu
from mtpserve_kernels.lora import grouped, reference
from mtpserve_kernels.lora.reference import RowAdapters, row_adapters
from torch import Tensor

AddLora = Callable[[Tensor, Tensor, RowAdapters, Tensor, Tensor, Sequence[int]], Tensor]
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
# inputs, outputs of each part, rank: one part and three, nothing even, a block of outputs that belongs to three parts
SHAPES = [(7, (1,), 1), (130, (300,), 3), (64, (40, 9, 9), 8), (257, (96, 33, 31), 20)]


def inputs(
    rows: int, shape: tuple[int, tuple[int, ...], int], dtype: torch.dtype, device: torch.device, slots: Sequence[int] | None = None
) -> tuple[Tensor, Tensor, RowAdapters, Tensor, Tensor, tuple[int, ...]]:
    """Four slots, of which the third is full of NaN and nobody's; x lies in something wider that is NaN."""
    width, parts, rank = shape
    dice = torch.Generator().manual_seed(rows + width)
    wide = torch.full((rows, width + 3), torch.nan)
    wide[:, :width] = torch.randn(rows, width, generator=dice)
    a = torch.randn(4, len(parts) * rank, width, generator=dice) / width**0.5
    b = torch.randn(4, rank, sum(parts), generator=dice) / rank**0.5
    a[2], b[2] = torch.nan, torch.nan
    chosen = torch.tensor([-1, 0, 1, 3])[torch.randint(4, (rows,), generator=dice)] if slots is None else torch.tensor(slots)
    y = torch.randn(rows, sum(parts), generator=dice)
    where = row_adapters(chosen.to(device, torch.int64))
    return wide.to(device, dtype)[:, :width], y.to(device, dtype), where, a.to(device, dtype), b.to(device, dtype), parts


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_reference_is_the_product_with_merged_weights(shape: tuple[int, tuple[int, ...], int]) -> None:
    x, y, where, a, b, parts = inputs(23, shape, FP32, torch.device("cpu"))
    rank, added = shape[2], torch.zeros_like(y)
    for row, slot in enumerate(where.slots.tolist()):
        if slot >= 0:
            ups = b[slot].split(list(parts), 1)
            merged = torch.cat([up.T @ a[slot, part * rank : (part + 1) * rank] for part, up in enumerate(ups)])
            added[row] = merged @ x[row]
    torch.testing.assert_close(reference.add_lora(x, y.clone(), where, a, b, parts), y + added, atol=1e-5, rtol=1e-5)


def close(actual: Tensor, expected: Tensor) -> None:
    tolerance = {FP32: 3e-5, FP16: 1e-2, BF16: 6e-2}[expected.dtype]
    torch.testing.assert_close(actual.float(), expected.float(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", [FP32, FP16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rows", [0, 1, 5, 37])
def test_grouped(device: torch.device, rows: int, shape: tuple[int, tuple[int, ...], int], dtype: torch.dtype) -> None:
    x, y, *rest = inputs(rows, shape, dtype, device)
    close(grouped.add_lora(x, y.clone(), *rest), reference.add_lora(x, y.clone(), *rest))
    wide = y.float()
    close(grouped.add_lora(x, wide.clone(), *rest).to(dtype), reference.add_lora(x, wide.clone(), *rest).to(dtype))


@pytest.mark.parametrize("out", [FP32, BF16], ids=str)
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (640, (520,), 64)], ids=str)
@pytest.mark.parametrize("rows", [0, 1, 5, 37])
def test_cpu(rows: int, shape: tuple[int, tuple[int, ...], int], dtype: torch.dtype, out: torch.dtype) -> None:
    x, y, *rest = inputs(rows, shape, dtype, torch.device("cpu"))
    close(cpu.add_lora(x, y.to(out), *rest), reference.add_lora(x, y.to(out), *rest))


@pytest.mark.parametrize("add_lora", [cpu.add_lora, grouped.add_lora, reference.add_lora], ids=["cpu", "triton", "torch"])
def test_rows_without_an_adapter_keep_every_bit(device: torch.device, add_lora: AddLora) -> None:
    place = torch.device("cpu") if add_lora is cpu.add_lora else device
    x, y, where, *rest = inputs(37, SHAPES[3], FP32, place)
    alone = where.slots < 0
    assert 0 < alone.sum() < 37
    out = add_lora(x, y.clone(), where, *rest)
    assert out[alone].equal(y[alone]) and not out[~alone].isnan().any() and (out[~alone] != y[~alone]).any(1).all()
    nobody = row_adapters(torch.full_like(where.slots, -1))
    assert add_lora(x, y.clone(), nobody, *rest).equal(y)


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_a_row_is_the_same_alone_and_among_others(dtype: torch.dtype) -> None:
    x, y, where, *rest = inputs(40, (640, (320, 64, 64), 16), dtype, torch.device("cpu"))
    together = cpu.add_lora(x, y.clone(), where, *rest)
    for row in range(40):
        one = slice(row, row + 1)
        assert cpu.add_lora(x[one], y[one].clone(), row_adapters(where.slots[one]), *rest).equal(together[one]), row
