"""Packed linear layers against float64, and bit by bit against themselves: a row's numbers do not depend on its company."""

from __future__ import annotations

import pytest
import torch
from mtpserve_kernels.cpu.linear import Matrix, linear, pack, pack_int8, quantize, rows
from mtpserve_kernels.quant import reference
from torch import Tensor

FP32, BF16 = torch.float32, torch.bfloat16
# N, K: not whole panels, not whole tiles, K = 2 mod 4, more inputs than one block of rows keeps in the cache.
SHAPES = [(1, 2), (16, 6), (17, 30), (96, 64), (100, 250), (208, 66), (343, 130), (40, 5122)]
MANY = 40


def randn(*shape: int, dtype: torch.dtype = FP32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def between_nans(x: Tensor) -> Tensor:
    """The same rows with NaN after each: what is read there is seen."""
    wide = x.new_full((len(x), x.shape[1] + 3), torch.nan)
    wide[:, : x.shape[1]] = x
    return wide[:, : x.shape[1]]


def close(actual: Tensor, expected: Tensor) -> None:
    tolerance = {FP32: 2e-5, BF16: 1e-2}[actual.dtype]
    torch.testing.assert_close(actual.double(), expected, atol=tolerance * float(expected.abs().max() + 1), rtol=tolerance)


def gate(y: Tensor) -> Tensor:
    half = y.shape[1] // 2
    return torch.nn.functional.silu(y[:, :half]) * y[:, half:]


@pytest.mark.parametrize("out", [FP32, BF16])
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("weights", [FP32, BF16])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_against_float64(outputs: int, inputs: int, weights: torch.dtype, dtype: torch.dtype, out: torch.dtype) -> None:
    weight, bias = randn(outputs, inputs, dtype=weights) / inputs**0.5, randn(outputs)
    matrix, plain = pack(weight.clone(), bias), pack(weight.clone())
    for count in (1, 2, 3, 5, 8, 13, 67, 200):
        x = between_nans(randn(count, inputs, dtype=dtype))
        # AVX512-BF16 multiplies bfloat16 by bfloat16: its inputs are rounded.
        expected = x.to(BF16 if weights == BF16 and out == BF16 else dtype).double() @ weight.double().T
        if weights == BF16 and dtype == FP32 and out == FP32:
            torch.testing.assert_close(linear(x, plain, out).double(), expected, atol=1e-2 * float(expected.abs().max() + 1), rtol=1e-2)
            continue
        close(linear(x, plain, out), expected)
        close(linear(x, matrix, out), expected + bias.double())


@pytest.mark.parametrize("weights", [FP32, BF16])
@pytest.mark.parametrize(("outputs", "inputs"), [(32, 10), (96, 64), (352, 130)])
def test_gated(outputs: int, inputs: int, weights: torch.dtype) -> None:
    weight, bias = randn(outputs, inputs, dtype=weights) / inputs**0.5, randn(outputs)
    matrix = pack(weight.clone(), bias)
    for count in (1, 2, 3, 4, 7, 40):
        x = between_nans(randn(count, inputs, dtype=weights))
        close(linear(x, matrix, gated=True), gate(x.double() @ weight.double().T + bias.double()))


def made(kind: str, outputs: int, inputs: int) -> Matrix:
    if kind == "int8":
        return pack_int8(*quantize(randn(outputs, inputs)), randn(outputs))
    return pack(randn(outputs, inputs, dtype={"fp32": FP32, "bf16": BF16}[kind]))


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize(("outputs", "inputs", "gated"), [(17, 30, False), (352, 130, False), (96, 1100, False), (224, 66, True)])
def test_a_row_is_the_same_alone_and_among_others(outputs: int, inputs: int, gated: bool, kind: str, dtype: torch.dtype) -> None:
    matrix = made(kind, outputs, inputs)
    x = randn(150, inputs, dtype=dtype)
    alone = torch.cat([linear(x[i : i + 1], matrix, FP32, gated) for i in range(MANY)])
    for count in range(1, MANY + 1):
        assert linear(between_nans(x[:count]), matrix, FP32, gated).equal(alone[:count]), count
    assert linear(x, matrix, FP32, gated)[:MANY].equal(alone)


@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("gated", [False, True])
def test_a_result_is_rounded_once(gated: bool, kind: str) -> None:
    matrix = made(kind, 224, 66)
    for count in (1, 7, 17, 100):
        x = between_nans(randn(count, 66, dtype=BF16))
        assert linear(x, matrix, BF16, gated).equal(linear(x, matrix, FP32, gated).bfloat16())


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_a_nan_stays_in_its_row(dtype: torch.dtype) -> None:
    x, matrix = randn(5, 34, dtype=dtype), pack(randn(48, 34, dtype=dtype))
    before = linear(x, matrix)
    x[2] = torch.nan
    after = linear(x, matrix)
    assert after[2].isnan().all() and after[[0, 1, 3, 4]].equal(before[[0, 1, 3, 4]])


@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize(("outputs", "inputs", "gated"), [(1, 2, False), (17, 30, False), (343, 130, False), (224, 66, True)])
def test_threads_change_nothing(outputs: int, inputs: int, gated: bool, kind: str) -> None:
    matrix, before = made(kind, outputs, inputs), torch.get_num_threads()
    for count in (1, 2, 7, 40, 130):
        x = randn(count, inputs)
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(linear(x, matrix, gated=gated))
        torch.set_num_threads(before)
        assert results[0].isfinite().all()
        assert results[0].equal(results[1])
        assert results[0].equal(results[2])


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_rows_of_a_packed_weight(dtype: torch.dtype) -> None:
    weight = randn(50, 14, dtype=dtype)
    ids = torch.tensor([49, 0, 16, 15, 16])
    assert rows(pack(weight.clone()), ids).equal(weight[ids])


def test_whole_panels_are_packed_in_place() -> None:
    weight = randn(32, 6)
    matrix, before = pack(weight), randn(32, 6)
    assert matrix.data == weight.data_ptr()
    assert weight[:16].flatten().equal(before[:16].T.flatten())


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (17, 30), (40, 5121), (96, 64), (343, 131)])
def test_int8_is_the_reference(outputs: int, inputs: int, dtype: torch.dtype) -> None:
    weight, scale = quantize(randn(outputs, inputs))
    bias = randn(outputs)
    plain, matrix = pack_int8(weight.clone(), scale), pack_int8(weight.clone(), scale, bias)
    for count in (1, 2, 5, 13, 67):
        x = randn(count, inputs, dtype=dtype)
        x[count // 2] = 0
        given = between_nans(x)
        assert linear(given, plain, FP32).equal(reference.linear_int8(x, weight, scale))
        assert linear(given, matrix, FP32).equal(reference.linear_int8(x, weight, scale, bias))
        assert linear(given, matrix, BF16).equal(reference.linear_int8(x, weight, scale, bias).bfloat16())


def test_int8_with_the_largest_numbers() -> None:
    """Every product at its limit: nothing saturates."""
    weight, scale = torch.full((32, 4096), 127, dtype=torch.int8), torch.ones(32)
    weight[1] = -127
    weight[2, ::2] = -127
    x = torch.full((7, 4096), 127.0)
    x[1] = -127
    x[2, ::2] = -127
    assert linear(x, pack_int8(weight.clone(), scale)).equal(x @ weight.float().T)


def test_int8_gated() -> None:
    weight, scale = quantize(randn(224, 66))
    matrix = pack_int8(weight.clone(), scale)
    for count in (1, 3, 4, 40):
        x = randn(count, 66)
        close(linear(x, matrix, gated=True), gate(reference.linear_int8(x, weight, scale).double()))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_int8_shows_what_is_not_finite(bad: float) -> None:
    x = randn(3, 30)
    x[1, 29] = bad
    out = linear(x, made("int8", 17, 30))
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()


def test_rows_of_an_int8_weight() -> None:
    weight, scale = quantize(randn(50, 15))
    ids = torch.tensor([49, 0, 16, 15, 16])
    assert rows(pack_int8(weight.clone(), scale), ids).equal(weight[ids] * scale[ids].unsqueeze(1))
    assert (weight * scale.unsqueeze(1) - randn(50, 15)).abs().max() <= scale.max() * 0.501
