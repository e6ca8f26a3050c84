"""The largest number of rows against torch's: ties within and across chunks, NaN, infinities, rows that are a part of wider ones."""

from __future__ import annotations

import pytest
import torch
from mtpserve_kernels.arrivals import arrival_counters
from mtpserve_kernels.spec import reference
from mtpserve_kernels.spec.argmax import CANDIDATES, CHUNK, argmax, chunks
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
    masses = chunks(logits.to(device), torch.tensor([1, 0], device=device), temperature.to(device), has_cuts=False).masses
    assert masses is not None
    for row in range(4):
        parts = logits.view(4, vocab)[row].double().split(CHUNK)
        scaled = [(part - part.max().clamp(min=-1e30)) / temperature[1 - row // 2].double() for part in parts]
        exact = torch.stack([chunk.exp().sum() for chunk in scaled])
        torch.testing.assert_close(masses[row].cpu().double(), exact, rtol=1e-5, atol=0)


@pytest.mark.parametrize("shape", ["normal", "one far away", "few numbers", "equal", "mostly forbidden"])
def test_candidates_of_chunks(device: torch.device, shape: str) -> None:
    """Just the numbers above the bound, no more than there is room for, and few only where many are equal."""
    logits = torch.randn(1, 2, 2 * CHUNK + 70, generator=torch.Generator().manual_seed(5)) * 4
    match shape:
        case "one far away":
            logits[..., 5] = 1e4
        case "few numbers":
            logits = logits.round()
        case "equal":
            logits[:] = 0.5
        case "mostly forbidden":
            logits[..., 40:-10] = -torch.inf
    req_indices = torch.zeros(1, dtype=torch.int64, device=device)
    parts = chunks(logits.to(device), req_indices, torch.ones(1, device=device), has_cuts=True)
    assert parts.candidates is not None and parts.bounds is not None
    for row, bounds, candidates in zip(logits[0], parts.bounds.cpu(), parts.candidates.cpu(), strict=True):
        for chunk, bound, some in zip(row.split(CHUNK), bounds, candidates, strict=True):
            above = chunk[chunk > bound]
            assert len(above) <= CANDIDATES and some[: len(above)].equal(above) and (some[len(above) :] == -torch.inf).all()
            if shape == "normal":
                assert len(above) >= min(CANDIDATES // 4, len(chunk))
            if shape == "mostly forbidden":
                assert bound == -torch.inf
