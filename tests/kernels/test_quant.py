"""Products with quantised weights against the widened ones."""

from __future__ import annotations

import pytest
import torch
from mtpserve_kernels.quant import reference
from mtpserve_kernels.quant.linear_fp8 import linear_fp8, linear_fp8_both, quantize_rows
from mtpserve_kernels.quant.rows import linear_rows, widen_rows
from torch import Tensor


def weights(device: torch.device, outputs: int, inputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    dice = torch.Generator().manual_seed(outputs + inputs)
    weight = (torch.randn(outputs, inputs, generator=dice) * 100).clamp(-448, 448).to(torch.float8_e4m3fn)
    scale = torch.rand(-(-outputs // 128), -(-inputs // 128), generator=dice) * 0.01 + 0.001
    return weight.to(device), scale.to(device)


@pytest.fixture(autouse=True)
def has_float8(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no e4m3 before sm_89")


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 128, 128), (5, 200, 300), (16, 64, 1024), (60, 130, 256)])
def test_few_rows_are_not_quantised(device: torch.device, rows: int, outputs: int, inputs: int, bias: bool) -> None:
    weight, scale = weights(device, outputs, inputs)
    x, b = torch.randn(rows, inputs, device=device).half(), torch.randn(outputs, device=device).half() if bias else None
    actual, expected = linear_fp8(x, weight, scale, b), reference.linear_fp8(x, weight, scale, b)
    torch.testing.assert_close(actual.float(), expected.float(), atol=3e-2, rtol=1e-2)


def test_rows_are_quantised_per_128_columns(device: torch.device) -> None:
    x = torch.randn(7, 384, device=device) * torch.logspace(-3, 3, 7, device=device).unsqueeze(1)
    x[2, 128:256] = 0
    actual, scale = quantize_rows(x)
    expected, expected_scale = reference.quantize_rows(x)
    torch.testing.assert_close(scale, expected_scale)
    # The interpreter loses the carry where a mantissa rounds up to the next power of two.
    carries = 0.0 if device.type == "cuda" else 0.03
    assert (actual.float() != expected.float()).float().mean() <= carries


@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(65, 128, 128), (130, 200, 384), (70, 64, 300)])
def test_many_rows(device: torch.device, rows: int, outputs: int, inputs: int) -> None:
    weight, scale = weights(device, outputs, inputs)
    x = torch.randn(rows, inputs, device=device).half()
    if inputs % 128:
        actual, expected = linear_fp8(x, weight, scale), reference.linear_fp8(x, weight, scale)
    else:
        rows8 = reference.quantize_rows(x)
        actual = linear_fp8_both(*rows8, weight, scale, None, x.dtype)
        expected = reference.linear_fp8_both(*rows8, weight, scale, None, x.dtype)
        assert linear_fp8(x, weight, scale).isfinite().all()
    torch.testing.assert_close(actual.float(), expected.float(), atol=5e-2, rtol=1e-2)


Stored = tuple[Tensor, Tensor, Tensor | None, Tensor | None]


def stored_by_row(device: torch.device, shape: tuple[int, ...], groups: int, form: str) -> Stored:
    """[..., N, K] → weight, scale, zeros and global scales; `groups` is not NVFP4's number. Numbers of float8 have no more bits than the
    interpreter converts exactly."""
    dice = torch.Generator().manual_seed(sum(shape))
    scale = torch.rand((*shape[:-1], groups), generator=dice) * 0.02 + 0.01
    if form == "float8":
        numbers = torch.randint(-8, 9, shape, generator=dice).float().to(torch.float8_e4m3fn)
        return numbers.to(device), scale.to(device), None, None
    numbers = torch.randint(256, (*shape[:-1], shape[-1] // 2), generator=dice, dtype=torch.uint8)
    if form == "mxfp4":
        exponents = torch.randint(118, 124, scale.shape, generator=dice, dtype=torch.uint8).view(torch.float8_e8m0fnu)
        return numbers.to(device), exponents.to(device), None, None
    if form == "nvfp4":
        scale = torch.randint(1, 127, (*shape[:-1], shape[-1] // 16), generator=dice, dtype=torch.uint8).view(torch.float8_e4m3fn)
        second = torch.rand((*shape[:-1], 1), generator=dice) * 1e-4 + 1e-5
        return numbers.to(device), scale.to(device), None, second.to(device)
    zeros = torch.randint(17, scale.shape, generator=dice, dtype=torch.uint8) if form == "zeros" else None
    return numbers.to(device), scale.half().to(device), None if zeros is None else zeros.to(device), None


FORMS = ["float8", "int4", "zeros", "mxfp4", "nvfp4"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "groups", "splits"),
    [(5, 70, 304, 1, None), (17, 33, 192, 6, 1), (3, 40, 480, 5, 4), (2, 1, 64, 2, 1)],
)
def test_scales_by_row(device: torch.device, rows: int, outputs: int, inputs: int, groups: int, splits: int | None, form: str) -> None:
    """Beside the rows of x, its last columns and all of the memory around it there is NaN."""
    stored = stored_by_row(device, (outputs, inputs), groups, form)
    bias = torch.randn(outputs, device=device)
    around = torch.full((rows + 1, inputs + 3), torch.nan, device=device)
    around[:rows, :inputs] = torch.randn(rows, inputs, device=device)
    for dtype, b, tolerance in ((torch.float32, None, 1e-4), (torch.float16, bias.half(), 1e-2)):
        x = around.to(dtype)[:rows, :inputs]
        actual, expected = linear_rows(x, *stored, b, splits=splits), reference.linear_rows(x, *stored, b)
        assert actual.dtype == dtype
        torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("outputs", "inputs", "groups"), [(3, 1104, 1), (1, 64, 2), (5, 2048, 16)])
def test_widened(device: torch.device, outputs: int, inputs: int, groups: int, form: str) -> None:
    stored = stored_by_row(device, (outputs, inputs), groups, form)
    for dtype in (torch.float32, torch.float16):
        assert torch.equal(widen_rows(*stored, dtype), reference.widen_rows(*stored).to(dtype))


def test_a_group_that_no_step_fits_into(device: torch.device) -> None:
    with pytest.raises(AssertionError):
        linear_rows(torch.zeros(1, 96, device=device), *stored_by_row(device, (64, 96), 4, "int4"))


@pytest.mark.parametrize(("rows", "outputs", "inputs", "splits"), [(3, 5, 16, 1), (4, 19, 80, 1), (2, 33, 432, 3)])
def test_groups_of_16_need_no_whole_step(device: torch.device, rows: int, outputs: int, inputs: int, splits: int) -> None:
    """NVFP4 with rows that end in the middle of a step, and scales of zero and of the smallest numbers; behind each row there is NaN."""
    weight, scale, _, second = stored_by_row(device, (outputs, inputs), 1, "nvfp4")
    scale.view(torch.uint8)[::2, 0], scale.view(torch.uint8)[1::2, 0] = 0, 1
    around = torch.full((rows, inputs + 64), torch.nan, device=device)
    around[:, :inputs] = torch.randn(rows, inputs, device=device)
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float16, 1e-2)):
        x = around.to(dtype)[:, :inputs]
        actual, expected = (product(x, weight, scale, None, second) for product in (linear_rows, reference.linear_rows))
        torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(linear_rows(x, weight, scale, None, second, splits=splits), expected, atol=tolerance, rtol=tolerance)
