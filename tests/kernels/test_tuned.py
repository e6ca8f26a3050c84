"""The tables of tilings: what they may have, how they are read, and that kernels compute the same with any of their tilings."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from mtpserve_kernels import tuned
from mtpserve_kernels.attention.span import span_gqa
from mtpserve_kernels.fused import reference as fused
from mtpserve_kernels.fused.linear import skinny_linear
from mtpserve_kernels.fused.norm import add_rms_norm
from mtpserve_kernels.moe import reference as moe
from mtpserve_kernels.moe.experts import experts
from mtpserve_kernels.moe.route import route

from tests.kernels.spans import RAGGED, check
from tests.kernels.table_entries import entries_of
from tests.kernels.test_moe import numbers
from tests.kernels.test_span import Case

FIELDS = {
    "route": {"BE", "BH", "SPLITS", "CHOICE_ROWS", "warps"},
    "gate_up": {"BT", "BN", "BK", "stages", "warps"},
    "down": {"BN", "BK", "stages", "warps"},
    "span_gqa": {"BM", "BN", "warps", "stages", "splits"},
    "span_mla": {"BM", "BN", "warps", "stages", "splits"},
    "skinny_linear": {"BT", "BN", "BK", "stages", "warps", "splits"},
    "skinny_gated": {"BT", "BN", "BK", "stages", "warps", "splits"},
    "add_rms_norm": {"warps"},
    "rope_store": {"BH", "warps"},
}
CHIPS = sorted(path.stem for path in Path(tuned.__file__).parent.glob("*.json"))
SHAPE = "float32 E8 K2 H64 S96"


@pytest.fixture
def chip(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, dict[str, object]]]:
    """The ops of a table for whatever device there is."""
    ops: dict[str, dict[str, dict[str, object]]] = {}
    monkeypatch.setattr(tuned, "chip_of", lambda device: "a chip")
    monkeypatch.setattr(tuned, "table", lambda name: ops)
    tuned.lookup.cache_clear()
    yield ops
    tuned.lookup.cache_clear()


def test_there_is_a_table() -> None:
    assert "sm_90" in CHIPS


@pytest.mark.parametrize("chip_name", CHIPS)
def test_a_table_has_tilings_that_its_op_knows(chip_name: str) -> None:
    """tests/kernels/matrix.py compiles them."""
    entries = list(entries_of(chip_name))
    assert entries
    for entry in entries:
        assert set(entry.tiling) <= FIELDS[entry.op] and all(type(number) is int and number > 0 for number in entry.tiling.values()), entry
        assert entry.rows == tuned.bucket(entry.rows), f"{entry} is never found: {entry.rows} is no bucket of rows"
        assert entry.sizes and entry.dtype.is_floating_point
        assert entry.op != "route" or set(entry.tiling) == FIELDS["route"]


def test_buckets() -> None:
    assert [tuned.bucket(rows) for rows in (1, 2, 3, 4, 5, 16, 17, 256, 257)] == [1, 2, 4, 4, 8, 16, 32, 256, 0]


def test_what_is_found(chip: dict[str, dict[str, dict[str, object]]]) -> None:
    device, narrow, wide = torch.device("cpu"), {"BN": 16}, {"BN": 64}
    chip["gate_up"] = {SHAPE: {"fastest": {"4": narrow}, "invariant": wide}}
    assert tuned.tiling("gate_up", SHAPE, 3, device) == narrow
    assert tuned.tiling("gate_up", SHAPE, 5, device) is tuned.tiling("gate_up", SHAPE, 300, device) is None
    assert tuned.tiling("gate_up", SHAPE, 5, device, invariant=True) == wide
    assert tuned.tiling("gate_up", "float32 E9", 3, device) is tuned.tiling("down", SHAPE, 3, device) is None
    with tuned.override("gate_up", {"BN": 32}):
        with tuned.override("gate_up", {"BN": 128}):
            assert tuned.tiling("gate_up", SHAPE, 5, device) == {"BN": 128}
        assert tuned.tiling("gate_up", SHAPE, 5, device) == {"BN": 32}
    assert tuned.tiling("gate_up", SHAPE, 5, device) is None


def test_no_table_where_the_chip_has_none() -> None:
    assert tuned.chip_of(torch.device("cpu")) is None and tuned.table("sm_75") == {}


def test_experts_take_the_tables_tilings(device: torch.device, chip: dict[str, dict[str, dict[str, object]]]) -> None:
    chip["gate_up"] = {SHAPE: {"fastest": {"4": {"BN": 16, "BK": 32, "stages": 2, "warps": 2}}}}
    chip["down"] = {SHAPE: {"fastest": {"4": {"BN": 64, "BK": 16, "stages": 1}}}}
    x, gate_up, down = numbers(device, 3, 64), numbers(device, 8, 192, 64) / 8, numbers(device, 8, 64, 96) / 8
    weights, expert_ids = torch.rand(3, 2).to(device), torch.tensor([[0, 7], [3, 2], [7, 1]], device=device)
    expected = moe.experts(x, weights, expert_ids, gate_up, down, None, None)
    torch.testing.assert_close(experts(x, weights, expert_ids, gate_up, down, None, None), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("number", [8, 130])
def test_the_router_takes_the_tables_tiling(device: torch.device, chip: dict[str, dict[str, dict[str, object]]], number: int) -> None:
    x, weight, bias = numbers(device, 19, 100), numbers(device, number, 100) / 10, numbers(device, number, seed=1) / 5
    arguments = x, weight, bias, 3, 1, 1, True, 2.5
    expected, best = moe.route(*arguments)
    fields = "BE", "BH", "SPLITS", "CHOICE_ROWS", "warps"
    for tile in ((32, 32, 1, 1, 1), (16, 16, 7, 2, 2), (128, 64, 2, 16, 8)):
        chip["route"] = {f"float32 E{number} H100": {"invariant": dict(zip(fields, tile, strict=True))}}
        tuned.lookup.cache_clear()
        actual, chosen = route(*arguments)
        assert torch.equal(chosen, best)
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_other_kernels_take_the_tables_tilings(device: torch.device, chip: dict[str, dict[str, dict[str, object]]]) -> None:
    x, weight = numbers(device, 3, 96), numbers(device, 70, 96)
    chip["skinny_linear"] = {"float32 N70 K96": {"fastest": {"4": {"BN": 16, "BK": 32, "stages": 1, "warps": 2, "splits": 3}}}}
    torch.testing.assert_close(skinny_linear(x, weight), fused.linear(x, weight), atol=1e-4, rtol=1e-4)
    chip["add_rms_norm"] = {"float32 H96": {"fastest": {"4": {"warps": 2}}}}
    torch.testing.assert_close(add_rms_norm(x, x, x[0], 1e-6)[0], fused.add_rms_norm(x, x, x[0], 1e-6)[0], atol=1e-5, rtol=1e-5)
    case = Case(2, 64, 64, 16)
    inputs = case.make(RAGGED, 4, device)
    chip["span_gqa"] = {
        "float32 heads4 kv2 D64": {
            "fastest": {str(tuned.bucket(inputs["width"])): {"BM": 16, "BN": 32, "warps": 2, "stages": 1, "splits": 3}}
        }
    }
    lookups = list[tuple[int, int]]()
    original = tuned.tiling

    def watch(op: str, shape: str, rows: int, where: torch.device, invariant: bool = False) -> tuned.Tile | None:
        tile = original(op, shape, rows, where, invariant)
        lookups.append((rows, len(tile or {})))
        return tile

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuned, "tiling", watch)
        actual = span_gqa(inputs["q"], *inputs["caches"], *inputs["common"], width=inputs["width"])
    check(actual, case.run(inputs)[1])
    assert lookups == [(inputs["width"], 5)]
