from __future__ import annotations

import pytest
import torch

from mtpserve.quant.fp8 import FP8, dequantize_block, quantize_block, scale_shape

SHAPES = [(128, 128), (256, 384), (130, 200), (1, 1), (127, 129), (300, 5)]


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_each_number_takes_its_blocks_scale(rows: int, columns: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(rows, columns).to(FP8)
    scale = torch.rand(scale_shape(rows, columns)) + 0.5
    wanted = torch.tensor([[float(weight[i, j]) * float(scale[i // 128, j // 128]) for j in range(columns)] for i in range(rows)])
    found = dequantize_block(weight, scale)
    assert found.dtype == torch.float32 and torch.equal(found, wanted.float())


@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_there_and_back(rows: int, columns: int) -> None:
    torch.manual_seed(0)
    weight = torch.randn(rows, columns) * torch.logspace(-6, 6, rows)[:, None]
    stored, scale = quantize_block(weight)
    assert stored.dtype == FP8 and stored.shape == weight.shape and scale.shape == scale_shape(rows, columns)
    largest = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns] * 448
    error = (dequantize_block(stored, scale) - weight).abs()
    # Three bits of mantissa: half a step is 1/16 of the number, and below the normal range 2^-10 of the scale.
    assert (error <= weight.abs() / 16 + largest / 448 * 2**-10 * 1.001).all()


def test_a_block_of_zeros_and_smaller_blocks() -> None:
    stored, scale = quantize_block(torch.zeros(3, 5), (2, 2))
    assert scale.shape == (2, 3) and torch.equal(dequantize_block(stored, scale, (2, 2)), torch.zeros(3, 5))


def test_the_input_is_left_alone_and_scales_may_be_half_precision() -> None:
    weight = torch.ones(4, 4)
    assert dequantize_block(weight, torch.full((1, 1), 2.0, dtype=torch.bfloat16)).unique().tolist() == [2]
    assert weight.unique().tolist() == [1]


def test_scales_of_another_shape_are_a_mistake() -> None:
    with pytest.raises(AssertionError):
        dequantize_block(torch.ones(4, 4).to(FP8), torch.ones(2, 1))
