"""Layers that keep stored weights against the same layers, widened."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtpserve.core.arch.model import MoEArch
from mtpserve.layers.devices import torch_kernels
from mtpserve.layers.devices.torch_kernels import STRIP, experts
from mtpserve.layers.linear import Linear
from mtpserve.layers.moe import Experts
from mtpserve.quant.e2m1 import dequantize_e2m1
from mtpserve.quant.fp8 import FP8, dequantize_block, is_finite, make_room, quantize_block
from mtpserve.quant.kept import Kept
from mtpserve.quant.stored import make_room_by_row
from mtpserve.quant.unquantized import Unquantized


def fill(place: Tensor, scales: Tensor, weight: Tensor) -> Tensor:
    """→ what it is worth."""
    stored, scale = quantize_block(weight)
    place.copy_(stored)
    scales.copy_(scale)
    return dequantize_block(stored, scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (130, 200), (384, 128), (STRIP * 128 + 5, 130)])
@pytest.mark.parametrize("bias", [False, True])
def test_linear(outputs: int, inputs: int, bias: bool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    linear = Linear(inputs, (outputs,), Kept(torch_kernels.torch_kernels()), bias)
    make_room(linear, "weight", linear.parts)
    assert linear.weight_scale_inv is not None
    wide = fill(linear.weight, linear.weight_scale_inv, torch.randn(outputs, inputs) * torch.logspace(-3, 3, outputs)[:, None])
    if linear.bias is not None:
        linear.bias.data = torch.randn(outputs, dtype=dtype)
    linear.finish_loading()
    assert linear.weight.dtype == FP8 and linear.weight.nbytes == outputs * inputs
    x = torch.randn(3, inputs, dtype=dtype)
    wanted = F.linear(x, wide.to(dtype)) + (0 if linear.bias is None else linear.bias)
    torch.testing.assert_close(linear(x), wanted)


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 1), (130, 200), (384, 128)])
def test_rows(outputs: int, inputs: int) -> None:
    torch.manual_seed(0)
    linear = Linear(inputs, (outputs,), Kept(torch_kernels.torch_kernels()))
    make_room(linear, "weight", linear.parts)
    assert linear.weight_scale_inv is not None
    wide = fill(linear.weight, linear.weight_scale_inv, torch.randn(outputs, inputs) * torch.logspace(-3, 3, outputs)[:, None])
    linear.finish_loading()
    ids = torch.arange(0, outputs, 7)
    assert torch.equal(linear.rows(ids), wide[ids])


INPUTS = 192
FORMS = {"float8 by row": (8, 1), "float8 in groups": (8, 4), "int4": (4, 4), "int4 with zeros": (4, 4), "int4 by row": (4, 1)}
FORMS |= {"MXFP4": (4, 3), "NVFP4": (4, 3), "one output": (8, 1)}


def by_row(owner: nn.Module, name: str, form: str) -> Tensor:
    """Random stored weights in place of a parameter → what they are worth."""
    bits, groups = FORMS[form]
    groups = owner.get_parameter(name).shape[-1] // {"MXFP4": 32, "NVFP4": 16}[form] if "FP4" in form else groups
    kinds = {"MXFP4": torch.float8_e8m0fnu, "NVFP4": torch.float8_e4m3fn}
    make_room_by_row(
        owner, name, bits, groups, "zeros" in form, kinds.get(form, torch.float32 if bits == 8 else torch.float16), form == "NVFP4"
    )
    numbers, scale = owner.get_parameter(name).data, owner.get_parameter(name + "_scale_inv").data
    if "FP4" in form:
        scale.view(torch.uint8).random_(120, 127)
        numbers.random_(0, 256)
        wide = dequantize_e2m1(numbers, scale)
        return wide if form == "MXFP4" else wide * owner.get_parameter(name + "_global_scale").data.uniform_(1e-4, 1e-3)
    scale.copy_(torch.rand(scale.shape) * 0.1 + 0.01)
    zeros = torch.full(scale.shape, 8)
    if "zeros" in form:
        zeros.random_(0, 17)
        owner.get_parameter(name + "_zeros").data.copy_(zeros)
    if bits == 8:
        numbers.copy_(torch.randn(numbers.shape))
        return (numbers.float().unflatten(-1, (groups, -1)) * scale.unsqueeze(-1)).flatten(-2)
    values = torch.randint(16, (*numbers.shape[:-1], 2 * numbers.shape[-1]))
    numbers.copy_(values[..., ::2] + 16 * values[..., 1::2])
    return ((values.unflatten(-1, (groups, -1)) - zeros.unsqueeze(-1)) * scale.float().unsqueeze(-1)).flatten(-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_scales_by_row(form: str, dtype: torch.dtype) -> None:
    """More than a strip of rows, and single rows of it."""
    torch.manual_seed(0)
    outputs = 1 if form == "one output" else STRIP * 128 + 5
    linear = Linear(INPUTS, (outputs,), Kept(torch_kernels.torch_kernels()), bias=True)
    wide = by_row(linear, "weight", form)
    assert linear.bias is not None
    linear.bias.data = torch.randn(outputs, dtype=dtype)
    linear.finish_loading()
    assert linear.weight.nbytes == outputs * INPUTS * FORMS[form][0] // 8
    x = torch.randn(3, INPUTS, dtype=dtype)
    torch.testing.assert_close(linear(x), F.linear(x, wide.to(dtype)) + linear.bias)
    ids = torch.arange(0, outputs, 7)
    assert torch.equal(linear.rows(ids), wide[ids])


@pytest.mark.parametrize("rows", [5, 70])
@pytest.mark.parametrize("form", [form for form in FORMS if form != "one output"])
def test_experts_by_row(monkeypatch: pytest.MonkeyPatch, form: str, rows: int) -> None:
    torch.manual_seed(0)
    arch = MoEArch(6, 2, 32, 0, dense=(), groups=1, top_groups=1, scale=1.0, renormalise=True)
    here, there = Experts(96, arch), Experts(96, arch)
    for name in ("gate_up", "down"):
        getattr(there, name).data = by_row(here, name, form)
    x, weights = torch.randn(rows, 96), torch.rand(rows, 2)
    chosen = torch.stack([torch.randperm(6)[:2] for _ in range(rows)])
    torch.testing.assert_close(experts(here, None, None, x, weights, chosen), experts(there, None, None, x, weights, chosen))
    monkeypatch.setattr(torch_kernels, "ALL_EXPERTS", 0)
    torch.testing.assert_close(experts(here, None, None, x, weights, chosen), experts(there, None, None, x, weights, chosen))


@pytest.mark.parametrize("outputs", [40, 5000])
def test_rows_of_a_layer_without_scales(outputs: int) -> None:
    linear = Linear(64, (outputs,), Kept(torch_kernels.torch_kernels()))
    linear.weight.data = torch.randn(outputs, 64)
    ids = torch.tensor([3, 17, 39])
    wanted = linear.weight.data[ids].clone()
    linear.finish_loading()
    assert torch.equal(linear.rows(ids), wanted)


def test_a_layer_without_scales_is_multiplied_as_ever() -> None:
    torch.manual_seed(0)
    here = Linear(600, (520,), Kept(torch_kernels.torch_kernels()))
    there = Linear(600, (520,), Unquantized(torch_kernels.torch_kernels()))
    here.weight.data = torch.randn(520, 600)
    there.weight.data = here.weight.data
    here.finish_loading()
    there.finish_loading()
    x = torch.randn(2, 600)
    assert torch.equal(here(x), there(x))


@pytest.mark.parametrize("kept", [("gate_up",), ("down",), ("gate_up", "down")], ids=" ".join)
@pytest.mark.parametrize("rows", [5, 70])
def test_experts(monkeypatch: pytest.MonkeyPatch, rows: int, kept: tuple[str, ...]) -> None:
    """An expert of 140 rows: up does not begin where a block of 128 would, so that it has blocks of its own."""
    torch.manual_seed(0)
    arch = MoEArch(6, 2, 140, 0, dense=(), groups=1, top_groups=1, scale=1.0, renormalise=True)
    here, there = Experts(96, arch), Experts(96, arch)
    for name in ("gate_up", "down"):
        wide: Tensor = getattr(there, name).data.normal_(0, 0.1)
        if name not in kept:
            getattr(here, name).data = wide
            continue
        make_room(here, name, here.parts[name])
        matrices, scales = getattr(here, name), getattr(here, name + "_scale_inv")
        blocks = scales.shape[1] // len(here.parts[name])
        for i in range(6):
            for j, part in enumerate(wide[i].split(here.parts[name])):
                place = matrices[i, j * 140 : j * 140 + len(part)], scales[i, j * blocks : (j + 1) * blocks]
                part.copy_(fill(*place, part))
    x, weights = torch.randn(rows, 96), torch.rand(rows, 2)
    chosen = torch.stack([torch.randperm(6)[:2] for _ in range(rows)])
    torch.testing.assert_close(experts(here, None, None, x, weights, chosen), experts(there, None, None, x, weights, chosen))
    monkeypatch.setattr(torch_kernels, "ALL_EXPERTS", 0)
    torch.testing.assert_close(experts(here, None, None, x, weights, chosen), experts(there, None, None, x, weights, chosen))


def test_nan_is_seen_in_either_sign_and_in_scales() -> None:
    weight, scale = quantize_block(torch.randn(4, 4) * 1000)
    assert is_finite(weight, scale)
    for bits in (0x7F, 0xFF):
        broken = weight.clone()
        broken.view(torch.uint8)[2, 3] = bits
        assert broken.float().isnan().any() and not is_finite(broken, scale)
    assert not is_finite(weight, scale * torch.nan)
