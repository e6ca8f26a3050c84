from __future__ import annotations

import math

import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from mtpserve.quant import e2m1
from mtpserve.quant.e2m1 import dequantize_e2m1

E8M0, E4M3 = torch.float8_e8m0fnu, torch.float8_e4m3fn


def by_hand(byte: int, high: bool) -> float:
    """From the bits: sign, two of an exponent, one of a mantissa; without an exponent the number is subnormal."""
    bits = byte >> 4 if high else byte & 15
    exponent, mantissa = bits >> 1 & 3, bits & 1
    value = mantissa * 0.5 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return math.copysign(value, -1 if bits & 8 else 1)


def test_every_byte_with_some_exponents() -> None:
    halves = torch.arange(256, dtype=torch.uint8).view(4, 64)
    exponents = [0, 1, 100, 126, 127, 128, 140, 200] * 2
    found = dequantize_e2m1(halves, torch.tensor(exponents, dtype=torch.uint8).view(4, 4).view(E8M0))
    assert found.shape == (4, 128) and found.dtype == torch.float32
    scales = [2.0 ** (exponent - 127) for exponent in exponents for _ in range(16)]
    wanted = [by_hand(byte, high) * scale for byte, scale in zip(range(256), scales, strict=True) for high in (False, True)]
    assert found.flatten().tolist() == wanted


def test_every_byte_with_every_scale_of_nvfp4() -> None:
    """Groups of 16; a scale has no sign."""
    halves, scales = torch.arange(256, dtype=torch.uint8).view(-1, 8), torch.arange(127, dtype=torch.uint8)
    found = dequantize_e2m1(halves.repeat(127, 1), scales.repeat_interleave(32).view(-1, 1).view(E4M3)).view(127, -1)
    numbers = torch.tensor([by_hand(byte, high) for byte in range(256) for high in (False, True)])
    exponent, mantissa = scales >> 3, (scales & 7).float()
    worth = torch.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * (exponent.float() - 7).exp2())
    assert torch.equal(found, worth.unsqueeze(1) * numbers)


@pytest.mark.parametrize("shape", [(2, 6, 3), (1, 1, 1), (3, 5, 2)])
def test_as_transformers_decodes_experts(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]) -> None:
    """[experts, rows, groups]; in transformers columns come first."""
    monkeypatch.setattr(e2m1, "STRIP", 37)
    dice = torch.Generator().manual_seed(0)
    blocks = torch.randint(256, (*shape, 16), generator=dice, dtype=torch.uint8)
    scales = torch.randint(110, 140, shape, generator=dice, dtype=torch.uint8)
    wanted = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert torch.equal(dequantize_e2m1(blocks.flatten(-2), scales.view(E8M0)), wanted.mT)


@pytest.mark.parametrize(("scales", "kind"), [([127, 255], E8M0), ([56, 127], E4M3)], ids=str)
def test_the_largest_scale_is_not_a_number(scales: list[int], kind: torch.dtype) -> None:
    group = 32 if kind == E8M0 else 16
    found = dequantize_e2m1(torch.full((1, group), 0x22, dtype=torch.uint8), torch.tensor([scales], dtype=torch.uint8).view(kind))
    assert found[0, :group].eq(1).all() and found[0, group:].isnan().all()
