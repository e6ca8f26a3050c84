"""Every instruction set's products against torch's; a row's bits are the same alone, among any others, and with any threads."""

from __future__ import annotations

import pytest
import torch
from mtpserve_kernels.cpu.linear import linear, pack
from torch import Tensor

SHAPES = [(16, 2), (48, 34), (160, 62), (352, 130), (64, 256)]  # outputs in whole panels; inputs even, and not whole tiles


def layer(outputs: int, inputs: int, dtype: torch.dtype, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """x [rows, inputs] inside of something wider that is NaN; weight; bias."""
    torch.manual_seed(outputs + inputs + rows)
    x = torch.full((rows, inputs + 6), torch.nan, dtype=dtype)
    x[:, :inputs] = torch.randn(rows, inputs)
    return x[:, :inputs], torch.randn(outputs, inputs).to(dtype), torch.randn(outputs)


@pytest.mark.parametrize("rows", [1, 3, 7, 16, 17, 33, 100])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gated", [False, True])
def test_linear(gated: bool, dtype: torch.dtype, shape: tuple[int, int], rows: int) -> None:
    outputs, inputs = shape
    if gated:
        outputs *= 2
    x, weight, bias = layer(outputs, inputs, dtype, rows)
    expected = x.double() @ weight.double().T + bias.double()
    if gated:
        expected = torch.nn.functional.silu(expected[:, : outputs // 2]) * expected[:, outputs // 2 :]
    matrix = pack(weight, bias)
    got = linear(x, matrix, torch.float32, gated)
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=2e-5 * inputs)
    assert torch.equal(linear(x, matrix, torch.bfloat16, gated), got.bfloat16())
    for row in {0, rows // 2, rows - 1}:
        assert torch.equal(linear(x[row : row + 1], matrix, torch.float32, gated)[0], got[row])
    assert torch.equal(linear(x[rows // 3 :], matrix, torch.float32, gated), got[rows // 3 :])
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(linear(x, matrix, torch.float32, gated), got)
    finally:
        torch.set_num_threads(before)


def test_an_unusual_number_stays_in_its_row() -> None:
    x, weight, _ = layer(48, 34, torch.bfloat16, 5)
    matrix = pack(weight)
    got = linear(x, matrix)
    x[2] = torch.nan
    again = linear(x, matrix)
    assert again[2].isnan().all() and torch.equal(again[[0, 1, 3, 4]], got[[0, 1, 3, 4]])
