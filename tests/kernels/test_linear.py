"""Products of few rows with weights as they are: both forms, with the sum over K in one part and in several."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from mtpserve_kernels import arrivals, tuned
from mtpserve_kernels.fused import reference
from mtpserve_kernels.fused.linear import skinny_gated, skinny_linear
from torch import Tensor

from tests.kernels.test_fused import numbers

DOT = {"BN": 16, "BK": 32, "stages": 3, "warps": 4}
GEMV = {"BN": 4, "BK": 256, "stages": 3, "warps": 1}


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs and parts are full of NaN before a kernel writes them."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *sizes, **options: empty(*sizes, **options).fill_(torch.nan))


@pytest.fixture(params=[DOT, GEMV], ids=["dot", "gemv"])
def tile(request: pytest.FixtureRequest) -> dict[str, int]:
    return dict(request.param)


def tile_for(tile: dict[str, int], rows: int, splits: int) -> dict[str, int]:
    return tile | {"BT": max(16, 1 << (rows - 1).bit_length()) if tile["BN"] == DOT["BN"] else rows, "splits": splits}


def operands(device: torch.device, rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x is a part of something wider."""
    x = numbers(device, rows, inputs + 8, dtype=dtype)[:, :inputs] / 8
    return x, numbers(device, outputs, inputs, dtype=dtype, seed=1) / 4, numbers(device, outputs, dtype=dtype, seed=2)


def cases() -> Iterator[tuple[int, int, bool]]:
    """Rows, splits, whether there is a bias."""
    yield from ((rows, splits, bias) for rows in (1, 2) for splits, bias in ((1, False), (3, True), (8, True)))
    yield from ((rows, splits, rows % 2 == 0) for rows, splits in ((3, 1), (4, 2), (7, 3), (16, 5), (17, 2), (33, 8)))


@pytest.mark.parametrize(("rows", "splits", "bias"), list(cases()))
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_odd_sizes(device: torch.device, tile: dict[str, int], rows: int, splits: int, bias: bool, dtype: torch.dtype) -> None:
    if tile == GEMV and rows > 2:
        pytest.skip("of one or two rows")
    for outputs, inputs in ((37, 100), (8, 1000)):
        x, weight, b = operands(device, rows, outputs, inputs, dtype)
        with tuned.override("skinny_linear", tile_for(tile, rows, splits)):
            actual = skinny_linear(x, weight, b if bias else None)
        exact = x.double() @ weight.double().T + (b.double() if bias else 0)
        tolerance = 1e-4 if dtype == torch.float32 else 4e-3
        torch.testing.assert_close(actual.double(), exact, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize(("rows", "splits", "bias"), [(1, 1, False), (1, 3, True), (2, 2, False), (5, 1, True), (16, 4, False)])
def test_gates_and_ups(device: torch.device, tile: dict[str, int], rows: int, splits: int, bias: bool) -> None:
    if tile == GEMV and rows > 2:
        pytest.skip("of one or two rows")
    x, weight, b = operands(device, rows, 2 * 37, 100, torch.float32)
    with tuned.override("skinny_gated", tile_for(tile, rows, splits)):
        actual = skinny_gated(x, weight, b if bias else None)
    torch.testing.assert_close(actual, reference.silu_mul(reference.linear(x, weight, b if bias else None)), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("rows", [1, 2, 3, 16, 40])
def test_the_rule(device: torch.device, rows: int) -> None:
    x, weight, b = operands(device, rows, 70, 520, torch.float16)
    torch.testing.assert_close(skinny_linear(x, weight, b), reference.linear(x, weight, b), atol=1e-2, rtol=1e-2)
    gated = skinny_gated(x, weight, b)
    torch.testing.assert_close(gated, reference.silu_mul(reference.linear(x, weight, b)), atol=1e-2, rtol=1e-2)


def test_bits_do_not_depend_on_who_arrives_last(device: torch.device, tile: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A counter that has counted before makes another program the last one. It finds the parts of the launch before."""
    x, weight, _ = operands(device, 2, 16, 2048, torch.float32)
    parts, empty = dict[tuple[int, ...], Tensor](), torch.empty

    def same_memory(*sizes: int, **options: object) -> Tensor:
        return parts.setdefault(sizes, empty(*sizes, **options))

    monkeypatch.setattr(torch, "empty", same_memory)
    with tuned.override("skinny_linear", tile_for(tile, 2, 4)):
        expected = skinny_linear(x, weight).clone()
        counters = arrivals.arrival_counters("skinny_linear", 1, x.device)
        for before in (1, 2, 3):
            counters[:4] = before
            actual = skinny_linear(x, weight)
            counters.zero_()
            assert torch.equal(actual, expected)


def test_a_row_has_the_same_bits_alone(device: torch.device, tile: dict[str, int]) -> None:
    x, weight, _ = operands(device, 2, 37, 1000, torch.float32)
    rows = []
    for row in x.split(1):
        with tuned.override("skinny_linear", tile_for(tile, 1, 3)):
            rows.append(skinny_linear(row, weight))
    with tuned.override("skinny_linear", tile_for(tile, 2, 3)):
        together = skinny_linear(x, weight)
    if tile == DOT:
        assert torch.equal(torch.cat(rows), together)
    else:  # one row and two are different kernels
        torch.testing.assert_close(torch.cat(rows), together, atol=1e-5, rtol=1e-5)


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    x, weight, _ = operands(device, 1, 37, 100, torch.float32)
    with pytest.raises(AssertionError, match="37, 100"):
        skinny_gated(x, weight)
    with pytest.raises(AssertionError, match="float16"):
        skinny_linear(x.half(), weight)
