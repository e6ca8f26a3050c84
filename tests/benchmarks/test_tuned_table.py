"""The tables of tilings that the GPU's profile writes, and the order in which products of few rows are tuned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def record(rows: int, times: dict[int, float], default_us: float = 3.0, op: str = "down", **library_us: float | str) -> dict[str, Any]:
    candidates = [{"tiling": {"BN": width, "splits": 1}, "us": us, "gb_s": 1.0} for width, us in times.items()]
    labels = {"op": op, "shape": "bfloat16 N64 K64", "table_rows": rows, "library_us": library_us}
    return labels | {"candidates": candidates, "best_us": min(times.values()), "default_us": default_us}


def check_of(width: int, good: bool, op: str = "down") -> dict[str, Any]:
    return {"op": op, "shape": "bfloat16 N64 K64", "tiling": {"BN": width, "splits": 1}, "good": good}


def test_the_table_of_tilings_is_read_as_it_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpu_kit import tuned_table
    from mtpserve_kernels import tuned

    records = [record(1, {16: 2.0, 32: 1.0, 64: 1.2, 128: 0.1}), record(8, {16: 1.0, 32: 4.0, 64: 1.1, 128: 0.1})]
    checks = [check_of(16, True), check_of(32, True), check_of(64, True), check_of(128, False)]
    assert [tile["BN"] for _, tile in tuned_table.table_tiles(records)] == [128], "it is the fastest, and has to be checked"
    table = tuned_table.table_of(records, checks, "sm_90", "a test", {})
    tuned_table.write(tmp_path / "sm_90.json", table)
    monkeypatch.setattr(tuned, "path_of", lambda chip: tmp_path / f"{chip}.json")
    monkeypatch.setattr(tuned, "chip_of", lambda device: "sm_90")
    for function in (tuned.lookup, tuned.table):
        function.cache_clear()
    try:
        tiles = {
            rows: tuned.tiling("down", "bfloat16 N64 K64", rows, torch.device("cpu"), invariant)
            for rows, invariant in ((1, False), (7, False), (64, False), (3, True))
        }
    finally:
        for function in (tuned.lookup, tuned.table):
            function.cache_clear()
    assert tiles == {1: {"BN": 32, "splits": 1}, 7: {"BN": 16, "splits": 1}, 64: None, 3: {"BN": 64, "splits": 1}}


def test_a_table_keeps_what_was_not_found_slower() -> None:
    from gpu_kit.tuned_table import table_of

    table = {"source": "a guess", "ops": {"route": {"x": {"invariant": {"BN": 8}}}, "down": {"bfloat16 N64 K64": {"fastest": {
        "1": {"BN": 64}, "8": {"BN": 64}}}}}}  # fmt: skip
    records = [record(1, {16: 2.0, 32: 2.5}, default_us=1.9), record(8, {16: 2.0, 32: 2.5})]
    update = table_of(records, [check_of(16, True), check_of(32, True)], "sm_90", "a run", table)
    assert update["ops"]["route"] == table["ops"]["route"]
    assert update["ops"]["down"]["bfloat16 N64 K64"] == {
        "fastest": {"1": {"BN": 64}, "8": {"BN": 16, "splits": 1}}, "invariant": {"BN": 16, "splits": 1},
    }  # fmt: skip
    assert update["source"] == "a run; what it did not find faster: a guess"


def test_a_table_has_products_that_are_faster_than_the_librarys_alone() -> None:
    from gpu_kit.tuned_table import table_of

    op, shape = "skinny_linear", "bfloat16 N64 K64"
    records = [
        record(1, {16: 0.95, 32: 2.0}, default_us=0.5, op=op, torch=1.0),  # by 5 %
        record(2, {16: 0.98, 32: 2.0}, op=op, torch=1.0),  # by 2 %
        record(4, {16: 3.0, 32: 0.5}, op=op, torch=2.0, other=0.4),
        record(8, {16: 0.5, 32: 3.0}, op=op, torch="skipped: it failed"),
    ]
    before = {"ops": {op: {shape: {"fastest": {"2": {"BN": 8}, "64": {"BN": 8}}}, "float16 N8 K8": {"fastest": {"1": {"BN": 8}}}}}}
    checks = [check_of(16, True, op), check_of(32, True, op)]
    shapes = table_of(records, checks, "sm_90", "a run", before)["ops"][op]
    assert shapes == {shape: {"fastest": {"64": {"BN": 8}, "1": {"BN": 16, "splits": 1}}}, "float16 N8 K8": {"fastest": {"1": {"BN": 8}}}}
    none = {"ops": {op: {shape: {"fastest": {"2": {"BN": 8}}}}}}
    assert table_of(records[1:], checks, "sm_90", "a run", none)["ops"] == {}


def test_products_of_few_rows_are_tuned_first() -> None:
    from gpu_kit.candidates import MAX_PRODUCT_TILES, tiles_of
    from gpu_kit.precompile import distinct_kernels
    from gpu_kit.workloads import PRODUCTS, workloads_of

    workloads = workloads_of(["475m", "7b", "0.5b"], toy=False)
    products = [workload for workload in workloads if workload.kind in PRODUCTS]
    assert workloads[: len(products)] == products and products[0].label == "7b qkv" and products[0].rows == 1
    for workload in products:
        tiles = tiles_of(workload)
        assert 1 < len(tiles) <= MAX_PRODUCT_TILES
        assert all(tile.get("BT", 16) in (workload.rows, 16) for tile in tiles)
        assert any("BT" in tile for tile in tiles) == (workload.rows <= 2)
    jobs = distinct_kernels(products)
    assert sum(len(tiles) for _, tiles in jobs) < 100, "one kernel is for all numbers of outputs and inputs"
