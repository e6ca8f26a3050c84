"""The largest number of rows against torch's: ties within and across chunks, NaN, infinities, rows that are a part of wider ones."""

from __future__ import annotations

import pytest
import torch
from mtpserve_kernels.arrivals import arrival_counters
from mtpserve_kernels.spec import reference
from mtpserve_kernels.spec.argmax import CHUNK, argmax, chunk_keys
from torch import Tensor

VOCABS = [1, 7, 1000, 4099, 9001]
TYPES = [torch.float32, torch.bfloat16, torch.float16]


def compare(device: torch.device, logits: Tensor) -> Tensor:
    """Twice: the first call must leave the counters as it found them."""
    expected = reference.argmax(logits)
    for _ in range(2):
        actual = argmax(logits.to(device)).cpu()
        assert actual.dtype == torch.int64 and actual.equal(expected), (actual, expected)
    assert not arrival_counters("argmax", len(logits), device).any()
    return actual


@pytest.mark.parametrize("dtype", TYPES, ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("vocab", VOCABS)
def test_random_rows(device: torch.device, vocab: int, dtype: torch.dtype) -> None:
    dice = torch.Generator().manual_seed(vocab)
    for shift in (0.0, -50.0):  # numbers of both signs, and negative ones alone
        compare(device, (torch.randn(3, vocab, generator=dice) + shift).to(dtype))


@pytest.mark.parametrize("vocab", VOCABS)
def test_the_first_of_equal_numbers(device: torch.device, vocab: int) -> None:
    dice = torch.Generator().manual_seed(vocab)
    compare(device, torch.randint(-3, 3, (4, vocab), generator=dice).float())
    assert not compare(device, torch.full((2, vocab), -torch.inf)).any()


def test_ties_of_zeros_and_across_chunks(device: torch.device) -> None:
    logits = torch.full((3, 2 * CHUNK + 5), -1.0)
    logits[0, 3], logits[0, CHUNK + 1] = -0.0, 0.0
    logits[1, CHUNK - 1], logits[1, 2 * CHUNK] = 2.0, 2.0
    logits[2, 7], logits[2, 2 * CHUNK + 4] = torch.inf, torch.inf
    assert compare(device, logits).tolist() == [3, CHUNK - 1, 7]


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_nan_is_above_all(device: torch.device, sign: float) -> None:
    """As in torch.argmax, whatever its sign."""
    logits = torch.randn(2, CHUNK + 9, generator=torch.Generator().manual_seed(1))
    logits[0, 11] = torch.inf
    logits[0, CHUNK + 2 :] = torch.copysign(torch.tensor(torch.nan), torch.tensor(sign))
    assert compare(device, logits)[0] == CHUNK + 2


def test_rows_of_wider_ones(device: torch.device) -> None:
    """What lies after a row's numbers is not read."""
    wide = torch.randn(3, CHUNK + 30, generator=torch.Generator().manual_seed(2)).to(device)
    wide[:, CHUNK + 10 :] = torch.nan
    part = wide[:, : CHUNK + 10]
    assert argmax(part).cpu().equal(part.cpu().argmax(-1))


def test_no_rows(device: torch.device) -> None:
    assert argmax(torch.empty(0, 12, device=device)).shape == (0,)


@pytest.mark.parametrize("vocab", [7, 9001])
def test_masses_of_chunks(device: torch.device, vocab: int) -> None:
    """Sums of exponentials of a chunk, of float64's to a rounding of each number; a row of minus infinity alone has none."""
    logits = torch.randn(2, 2, vocab, generator=torch.Generator().manual_seed(vocab)) * 5
    logits[1, 1], logits[0, 1, : vocab // 2] = -torch.inf, -torch.inf
    temperature = torch.tensor([0.5, 2.0])
    _, masses = chunk_keys(logits.to(device), torch.tensor([1, 0], device=device), temperature.to(device))
    assert masses is not None
    for row in range(4):
        chunks = logits.view(4, vocab)[row].double().split(CHUNK)
        scaled = [(chunk - chunk.max().clamp(min=-1e30)) / temperature[1 - row // 2].double() for chunk in chunks]
        exact = torch.stack([chunk.exp().sum() for chunk in scaled])
        torch.testing.assert_close(masses[row].cpu().double(), exact, rtol=1e-5, atol=0)
