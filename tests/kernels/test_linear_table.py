"""Layers take the own products of few rows where the chip's table has a tiling for them, and the library's elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mtpserve_kernels import tuned
from mtpserve_kernels.fused.gemv import gemv_kernel
from mtpserve_kernels.fused.linear import skinny_kernel

from mtpserve.layers.devices.torch_kernels import torch_kernels
from mtpserve.layers.devices.triton_kernels import triton_kernels
from mtpserve.layers.linear import Linear
from mtpserve.layers.mlp import MLP
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


def test_what_the_profile_finds_faster_is_what_layers_take(
    device: torch.device, launches: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Candidates, their checks, the table's file, a layer: as benchmarks/gpu_profile.py --write-tuned has them, at toy size."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    from gpu_kit import tuned_table
    from gpu_kit.check import tile_check
    from gpu_kit.models import DeviceConfig
    from gpu_kit.timing import Alarm
    from gpu_kit.tune import families, family_records
    from gpu_kit.workloads import product_workloads

    config, records = DeviceConfig(device, toy=True), list[dict[str, Any]]()
    for family in families([workload for workload in product_workloads(["0.5b"], toy=True) if workload.label == "0.5b gate_up"]):
        records += family_records(config, family, Alarm(60.0))
    assert {(record["op"], record["rows"]) for record in records} == {(op, r) for op in ("skinny_linear", "skinny_gated") for r in (1, 4)}
    outputs, inputs = records[0]["sizes"]
    for record in records:
        faster = record["op"] == "skinny_gated" or record["rows"] == 1
        record["library_us"] = {"a library": record["best_us"] * (1.1 if faster else 1.0)}
    checks = [tile_check(config, *pair) for pair in tuned_table.table_tiles(records)]
    assert checks and all(check["good"] for check in checks)
    monkeypatch.setattr(tuned, "chip_of", lambda device: "a chip")
    monkeypatch.setattr(tuned, "path_of", lambda chip: tmp_path / f"{chip}.json")
    tuned_table.write(tmp_path / "a chip.json", tuned_table.table_of(records, checks, "a chip", "a test", {}))
    for function in (tuned.table, tuned.lookup):
        function.cache_clear()
    try:
        block = MLP(inputs, outputs // 2, Unquantized(triton_kernels()), triton_kernels()).to(device, config.dtype)
        for parameter in block.parameters():
            parameter.copy_(numbers(device, *parameter.shape) / 10)
        launches.clear()
        for rows, number in ((1, 2), (4, 1)):  # the gated product, and one alone of one row
            block.gate_up(x := numbers(device, rows, inputs).to(config.dtype))
            block(x)
            assert len(launches) == number, rows
            launches.clear()
    finally:
        for function in (tuned.table, tuned.lookup):
            function.cache_clear()
