"""The cases that `mtpserve doctor` tests a device with: they pass for right kernels, and fail for wrong ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mtpserve_kernels.cpu.library import Unavailable, library
from mtpserve_kernels.self_test.cases import CASES, KernelCase, KernelDifference, compare, difference, function_of
from torch import Tensor

SLOW = ("recur", "accept", "accept, tree", "experts, 3 rows", "experts, 70 rows")  # interpreted


def dtype_of(device: torch.device) -> torch.dtype:
    """The interpreter's bfloat16 products are wrong."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case.name, marks=pytest.mark.thorough if case.name in SLOW else ()) for case in CASES]
)
def test_triton_kernels_pass(device: torch.device, case: KernelCase) -> None:
    result = compare(case, function_of(case.triton), device, dtype_of(device))
    assert result.good, result


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("case", [case for case in CASES if case.cpu], ids=lambda case: case.name)
def test_cpu_kernels_pass(case: KernelCase, dtype: torch.dtype) -> None:
    try:
        library()
    except Unavailable as error:
        pytest.skip(str(error))
    result = compare(case, function_of(case.cpu), torch.device("cpu"), dtype)
    assert result.good, result


def spoiled(value: Any) -> Any:
    """The first tensor that is not empty has another number at its start."""
    if isinstance(value, Tensor):
        value = value.clone()
        value.view(-1)[0] = 1 - value.view(-1)[0].bool().int() if not value.is_floating_point() else value.view(-1)[0] + 1
        return value
    return (spoiled(value[0]), *value[1:])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_wrong_kernel_fails(case: KernelCase) -> None:
    """Its result differs in one number; of an op that returns nothing, it does nothing."""
    reference = function_of(case.reference)

    def wrong(*arguments: Any) -> Any:
        if case.name in ("compact", "hold", "advance", "store_boundary"):
            return None
        return spoiled(reference(*arguments))

    assert compare(case, reference, torch.device("cpu"), torch.float32) == KernelDifference(0.0, 0.001) or case.name != "linear"
    assert not compare(case, wrong, torch.device("cpu"), torch.float32).good


def test_differences_of_shape_nan_and_whole_numbers_are_infinite() -> None:
    nan = torch.tensor([1.0, torch.nan])
    assert difference(nan, nan).good
    for actual, expected in ((torch.ones(2), nan), (torch.ones(3), torch.ones(2)), (torch.tensor([1]), torch.tensor([2]))):
        assert difference(actual, expected).error == float("inf")
    assert difference(torch.tensor([1.01]), torch.tensor([1.0])) == KernelDifference(pytest.approx(0.01), 0.001)
