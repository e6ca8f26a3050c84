from __future__ import annotations

import math

import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from mtpserve.quant import mxfp4
from mtpserve.quant.mxfp4 import dequantize_mxfp4


def by_hand(byte: int, high: bool, scale: int) -> float:
    """From the bits: sign, two of an exponent, one of a mantissa; without an exponent the number is subnormal."""
    bits = byte >> 4 if high else byte & 15
    exponent, mantissa = bits >> 1 & 3, bits & 1
    value = mantissa * 0.5 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return math.copysign(value, -1 if bits & 8 else 1) * 2.0 ** (scale - 127)


def test_every_byte_with_some_exponents() -> None:
    blocks = torch.arange(256, dtype=torch.uint8).view(4, 4, 16)
    scales = torch.tensor([0, 1, 100, 126, 127, 128, 140, 200] * 2, dtype=torch.uint8).view(4, 4)
    found = dequantize_mxfp4(blocks, scales)
    assert found.shape == (4, 128) and found.dtype == torch.float32
    flat = zip(blocks.flatten().tolist(), scales.flatten().repeat_interleave(16).tolist(), strict=True)
    assert found.flatten().tolist() == [by_hand(byte, high, scale) for byte, scale in flat for high in (False, True)]


@pytest.mark.parametrize("shape", [(2, 6, 3), (1, 1, 1), (3, 5, 2)])
def test_as_transformers_decodes_experts(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]) -> None:
    """[experts, rows, groups]; in transformers columns come first."""
    monkeypatch.setattr(mxfp4, "STRIP", 37)
    dice = torch.Generator().manual_seed(0)
    blocks = torch.randint(256, (*shape, 16), generator=dice, dtype=torch.uint8)
    scales = torch.randint(110, 140, shape, generator=dice, dtype=torch.uint8)
    wanted = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert torch.equal(dequantize_mxfp4(blocks, scales), wanted.mT)


def test_the_largest_exponent_is_not_a_number() -> None:
    found = dequantize_mxfp4(torch.full((1, 2, 16), 0x22, dtype=torch.uint8), torch.tensor([[127, 255]], dtype=torch.uint8))
    assert found[0, :32].eq(1).all() and found[0, 32:].isnan().all()
