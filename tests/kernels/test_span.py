"""Attention kernels against the reference: ragged spans, trees, odd sizes; everything that must not be read is NaN."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from mtpserve_kernels.arrivals import arrival_counters
from mtpserve_kernels.attention import reference, span
from mtpserve_kernels.attention.span import SpanTiling, span_gqa, span_mla
from torch import Tensor

from mtpserve.attention.gpu.triton import typical_width
from tests.kernels.spans import RAGGED, SpanCase, check


@dataclass
class Case(SpanCase):
    def run(self, made: dict[str, Any], **options: Any) -> tuple[Tensor, Tensor]:
        """→ the kernel's and the reference's."""
        arguments = (made["q"], *made["caches"], *made["common"], *([self.value_dim] if self.latent else []))
        seen = {"window": self.window, "shift": self.shift, "sinks": made["sinks"]}
        kernel, plain = (span_mla, reference.span_mla) if self.latent else (span_gqa, reference.span_gqa)
        return kernel(*arguments, **seen, width=made["width"], **options), plain(*arguments, **seen)


def test_tiles_follow_the_spans_that_are_most() -> None:
    assert typical_width(128 * 4, 128, 4) == 4 and typical_width(3, 2, 4) == 4, "without prompts"
    assert typical_width(500, 1, 1) == 500, "a prompt alone"
    assert typical_width(128 + 192, 128 + 8, 1) == 3, "prompts beside requests that decode"


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "page"),
    [(1, 1, 64, 16), (4, 4, 64, 64), (6, 2, 80, 16), (7, 1, 128, 32), (16, 1, 64, 128), (10, 2, 96, 16), (4, 2, 256, 16), (4, 2, 512, 16)],
)
def test_grouped_heads(device: torch.device, heads: int, kv_heads: int, dim: int, page: int, splits: int, tree: bool) -> None:
    case = Case(kv_heads, dim, dim, page, tree=tree)
    check(*case.run(case.make(RAGGED, heads, device), splits=splits))


def test_values_narrower_than_keys(device: torch.device) -> None:
    case = Case(2, 192, 128, 16)
    check(*case.run(case.make(RAGGED, 4, device), splits=2))


@pytest.mark.parametrize("page", [16, 24, 64])
def test_a_block_of_keys_in_one_page_in_two_or_in_more(device: torch.device, page: int) -> None:
    for shift, tile in ((0, SpanTiling(16, 16, 4, 1)), (1, SpanTiling(16, 16, 4, 1)), (16, SpanTiling(16, 16, 4, 1)), (1, None)):
        for case in (Case(2, 64, 64, page, shift=shift), Case(2, 64, 64, page, shift=shift, tree=True, window=30)):
            check(*case.run(case.make(RAGGED[1:4], 4, device), splits=3, tile=tile))


@pytest.mark.parametrize("last_splits", [0, 64], ids=["a kernel adds the parts", "the last program adds them"])
def test_who_adds_the_parts(device: torch.device, last_splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More splits than one kernel reads at a time, of which some are empty, and twice: counters are as the second launch wants them."""
    monkeypatch.setattr(span, "LAST_SPLITS", last_splits)
    monkeypatch.setattr(span, "LAST_BYTES", 1 << 30)
    for case in (Case(2, 64, 48, 16, tree=True), Case(1, 64, 64, 16, window=40, sinks=True), Case(1, 576, 512, 16, latent=True)):
        inputs = case.make([(0, 3), (330, 4), (9, 1)], 4, device)
        for splits, launches in ((2, 1), (11, 2), (32, 1)):
            for _ in range(launches):
                check(*case.run(inputs, splits=splits, tile=SpanTiling(16, 16, 4, 1)))
    assert not any(arrival_counters("span", 1, device).tolist())
    key = inputs["caches"][0]
    table, seats = inputs["common"][:2]
    key[table[seats[1], 200 // 16] * 16 + 200 % 16, 0, -1] = torch.nan
    out, expected = case.run(inputs, splits=11, tile=SpanTiling(16, 16, 4, 1))
    torch.testing.assert_close(out, expected, equal_nan=True, atol=2e-5, rtol=2e-5)
    assert out[3:7].isnan().all() and not out[:3].isnan().any() and not out[7:].isnan().any()


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize(("heads", "splits"), [(2, 1), (16, 4), (5, 2), (40, 3)])
def test_latent(device: torch.device, heads: int, splits: int, tree: bool) -> None:
    case = Case(1, 576, 512, 16, latent=True, tree=tree)
    check(*case.run(case.make([(0, 3), (70, 4), (9, 1)], heads, device), splits=splits))


@pytest.mark.parametrize("widest", [32, 64])
def test_wide_trees(device: torch.device, widest: int) -> None:
    """All 64 bits are used."""
    case = Case(2, 64, 64, 16, tree=True)
    check(*case.run(case.make([(50, widest), (1, 29)], 4, device), splits=4))


def test_prompt_chunks_beside_decoding(device: torch.device) -> None:
    for tree in (False, True):
        case = Case(2, 64, 64, 16, tree=tree)
        check(*case.run(case.make([(0, 70), (90, 1), (40, 33), (17, 4)], 6, device), splits=2))


@pytest.mark.parametrize("tile", [SpanTiling(16, 16, 4, 1), SpanTiling(32, 64, 4, 1), SpanTiling(64, 32, 8, 2), SpanTiling(128, 64, 8, 2)])
def test_any_tiling_gives_the_same(device: torch.device, tile: SpanTiling) -> None:
    case = Case(1, 64, 64, 16, tree=True)
    check(*case.run(case.make([(11, 9), (300, 1), (33, 16)], 3, device), splits=3, tile=tile))


def test_half_precision(device: torch.device) -> None:
    kinds = [torch.float16, torch.bfloat16] if device.type == "cuda" else [torch.float16]  # the interpreter's bf16 products are wrong
    for dtype in kinds:
        for case in (Case(2, 128, 128, 16, dtype=dtype, tree=True), Case(1, 576, 512, 64, latent=True, dtype=dtype)):
            check(*case.run(case.make(RAGGED, 8, device), splits=4))


def test_float8_cache(device: torch.device) -> None:
    if device.type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("no e4m3 before sm_89")
    for case in (Case(2, 64, 64, 16, tree=True), Case(1, 576, 512, 16, latent=True)):
        made = case.make([(30, 4), (99, 1)], 4, device)
        made["q"] = made["q"].half()
        made["caches"] = tuple(cache.to(torch.float8_e4m3fn) for cache in made["caches"])
        arguments = (made["q"], *made["caches"], *made["common"], *([512] if case.latent else []))
        actual = (span_mla if case.latent else span_gqa)(*arguments, width=4, splits=2)
        check(actual, (reference.span_mla if case.latent else reference.span_gqa)(*arguments))


@pytest.mark.parametrize(
    ("tree", "window", "shift"),
    [(False, 0, 1), (False, 1, 0), (False, 7, 3), (False, 50, 1), (True, 0, 1), (True, 9, 0), (True, 70, 1)],
)
@pytest.mark.parametrize("splits", [1, 3])
def test_windows_and_shifts(device: torch.device, splits: int, tree: bool, window: int, shift: int) -> None:
    for seed, case in enumerate(
        [
            Case(2, 64, 64, 16, tree=tree, window=window, shift=shift),
            Case(1, 80, 48, 4, tree=tree, window=window, shift=shift),
            Case(1, 576, 512, 16, latent=True, tree=tree, window=window, shift=shift),
        ]
    ):
        spans = [*RAGGED, (257, 5)] if not case.latent else [(0, 3), (140, 4)]
        tile = None if case.latent else SpanTiling(16, 16, 4, 1)  # narrow, so that whole blocks are before the window
        check(*case.run(case.make(spans, 4, device, seed), splits=splits, tile=tile))


@pytest.mark.covering(1)
@pytest.mark.parametrize(("tree", "window", "shift"), [(False, 0, 0), (False, 7, 1), (True, 0, 1), (True, 40, 0)])
@pytest.mark.parametrize("splits", [1, 4])
def test_sinks(device: torch.device, splits: int, tree: bool, window: int, shift: int) -> None:
    """With splits of which some are empty, and rows that see nothing of the first."""
    tile = SpanTiling(16, 16, 4, 1)
    case = Case(2, 80, 48, 16, tree=tree, window=window, shift=shift, sinks=True)
    check(*case.run(case.make([*RAGGED, (257, 5)], 6, device), splits=splits, tile=tile))
    case = Case(1, 576, 512, 16, latent=True, tree=tree, window=window, shift=shift, sinks=True)
    check(*case.run(case.make([(0, 3), (140, 4)], 5, device), splits=splits, tile=tile))


@pytest.mark.parametrize("window", [5, 64])
def test_long_spans_in_a_window(device: torch.device, window: int) -> None:
    """Many tiles of one request, each with a first column of its own."""
    case = Case(1, 64, 64, 8, window=window, shift=1)
    check(*case.run(case.make([(30, 150), (3, 70)], 3, device), splits=2, tile=SpanTiling(16, 16, 4, 1)))


def test_a_branch_sees_what_it_would_see_alone(device: torch.device) -> None:
    """A window reaches back from a row's position, not from where its siblings have pushed it: the path of a tree gives what the same
    rows give as a chain, up to the order of the sum."""
    case = Case(1, 64, 64, 16, tree=True, window=20)
    made = case.make([(60, 5)], 2, device)
    table, seats, ends, lengths, index, bits, _, *rest = made["common"]
    k, v = made["caches"]
    bits.copy_(torch.tensor([-1, 0b00011, 0b00101, 0b01101, 0b11101], device=device))  # 0 → 2 → 3 → 4 is a path, 1 a leaf
    whole = span_gqa(made["q"], k, v, *made["common"], window=20, width=5, splits=2)
    torch.testing.assert_close(whole, reference.span_gqa(made["q"], k, v, *made["common"], window=20), atol=2e-5, rtol=2e-5)
    slots = table[seats[0], index // 16] * 16 + index % 16
    for cache in (k, v):
        cache[slots[1:4]] = cache[slots[2:5]]
    chain = (table, seats, ends - torch.tensor([0, 1], device=device), lengths - 1, index[:4], None, None, *rest)
    alone = span_gqa(made["q"][[0, 2, 3, 4]], k, v, *chain, window=20, width=4, splits=2)
    torch.testing.assert_close(whole[[0, 2, 3, 4]], alone, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("splits", [1, 2, 5, 16])
@pytest.mark.parametrize("latent", [False, True])
def test_nan_in_a_key_is_not_lost(device: torch.device, latent: bool, splits: int) -> None:
    """Every row that sees it is NaN, whichever split it is in, and no other row is."""
    case = Case(1, 576, 512, 16, latent=True) if latent else Case(1, 64, 64, 16)
    for column, rows in ((200, [3]), (198, [1, 2, 3]), (90, [0, 1, 2, 3])):
        made = case.make([(197, 4), (50, 1)], 2, device)
        table, seats = made["common"][:2]
        key = made["caches"][0]
        key[table[seats[0], column // 16] * 16 + column % 16, 0, -1] = torch.nan  # of the latent layout too this is no value
        out, expected = case.run(made, splits=splits, tile=SpanTiling(16, 16, 4, 1))
        broken = torch.zeros(5, dtype=torch.bool, device=device)
        broken[rows] = True
        assert torch.equal(out.isnan().all((1, 2)), broken) and torch.equal(out.isnan().any((1, 2)), broken)
        torch.testing.assert_close(out, expected, equal_nan=True, atol=2e-5, rtol=2e-5)


def test_a_row_does_not_depend_on_its_neighbours(device: torch.device) -> None:
    """Bitwise, for one tiling and split count: other requests, and how many there are."""
    case = Case(2, 64, 64, 16)
    made = case.make(RAGGED, 4, device)
    tile = SpanTiling(16, 32, 4, 1)
    whole, _ = case.run(made, splits=4, tile=tile)
    q, common = made["q"], list(made["common"])
    table, seats, ends, lengths, index = common[:5]
    for r in range(len(RAGGED)):
        start, stop = int(ends[r]), int(ends[r + 1])
        one = [table, seats[r : r + 1], ends[r : r + 2] - start, lengths[r : r + 1], index[start:stop], *common[5:]]
        alone = span_gqa(q[start:stop].contiguous(), *made["caches"], *one, width=8, splits=4, tile=tile)
        assert torch.equal(alone, whole[start:stop])


def test_a_sink_counts_once_however_many_splits_there_are(device: torch.device) -> None:
    case = Case(1, 64, 64, 8, sinks=True)
    check(*case.run(case.make([(140, 4)], 3, device), splits=4, tile=SpanTiling(16, 16, 4, 1)))
