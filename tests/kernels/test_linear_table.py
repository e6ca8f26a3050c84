"""Layers take the own products of few rows where the chip's table has a tiling for them, and the library's elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mtpserve_kernels import tuned
from mtpserve_kernels.fused.gemv import gemv_kernel
from mtpserve_kernels.fused.linear import skinny_kernel

from mtpserve.layers.linear import Linear
from mtpserve.layers.mlp import MLP
from mtpserve.layers.torch_kernels import torch_kernels
from mtpserve.layers.triton_kernels import triton_kernels
from mtpserve.quant.unquantized import Unquantized
from tests.kernels.test_fused import numbers

GEMV = {"BT": 1, "BN": 4, "BK": 256, "warps": 1, "stages": 3, "splits": 2}
DOT = {"BN": 16, "BK": 32, "warps": 4, "stages": 2, "splits": 1}


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The ops of a table for whatever device there is."""
    table: dict[str, Any] = {}
    monkeypatch.setattr(tuned, "chip_of", lambda device: "a chip")
    monkeypatch.setattr(tuned, "table", lambda name: table)
    tuned.lookup.cache_clear()
    yield table
    tuned.lookup.cache_clear()


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the kernels of products, as they are launched."""
    kind, names = type(gemv_kernel), list[str]()
    original: Any = kind.__getitem__  # type: ignore[attr-defined]

    def select(kernel: Any, grid: Any) -> Any:
        if kernel in (gemv_kernel, skinny_kernel):
            names.append("gemv" if kernel is gemv_kernel else "dot")
        return original(kernel, grid)

    monkeypatch.setattr(kind, "__getitem__", select)
    return names


def layer_of(device: torch.device, bias: bool) -> Linear:
    layer = Linear(100, (37,), Unquantized(triton_kernels()), bias=bias).to(device)
    layer.weight.copy_(numbers(device, 37, 100))
    if layer.bias is not None:
        layer.bias.copy_(numbers(device, 37))
    layer.finish_loading()
    return layer


@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_takes_the_own_product_where_the_table_has_it(
    device: torch.device, ops: dict[str, Any], launches: list[str], bias: bool
) -> None:
    ops["skinny_linear"] = {"float32 N37 K100": {"fastest": {"1": GEMV, "4": DOT}}}
    layer = layer_of(device, bias)
    for rows, expected in ((1, ["gemv"]), (2, []), (3, ["dot"]), (4, ["dot"]), (5, []), (100, [])):
        launches.clear()
        x = numbers(device, rows, 100)
        torch.testing.assert_close(layer(x), F.linear(x, layer.weight, layer.bias), atol=1e-4, rtol=1e-4)
        assert launches == expected, rows


def test_a_layer_takes_the_librarys_product_without_a_table(device: torch.device, ops: dict[str, Any], launches: list[str]) -> None:
    layer, x = layer_of(device, True), numbers(device, 1, 100)
    assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias)) and not launches
    ops["skinny_linear"] = {"float32 N37 K104": {"fastest": {"1": GEMV}}, "bfloat16 N37 K100": {"fastest": {"1": GEMV}}}
    assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias)) and not launches


def test_a_gated_product_of_the_table(device: torch.device, ops: dict[str, Any], launches: list[str]) -> None:
    ops["skinny_gated"] = {"float32 N74 K100": {"fastest": {"1": GEMV, "4": DOT}}}
    block, plain = (MLP(100, 37, Unquantized(kernels), kernels).to(device) for kernels in (triton_kernels(), torch_kernels()))
    for mine, other in zip(block.parameters(), plain.parameters(), strict=True):
        mine.copy_(numbers(device, *mine.shape) / 10)
        other.copy_(mine)
    for rows, expected in ((1, ["gemv"]), (2, []), (4, ["dot"])):
        launches.clear()
        x = numbers(device, rows, 100)
        torch.testing.assert_close(block(x), plain(x), atol=1e-4, rtol=1e-4)
        assert launches == expected, rows
