"""The kernels that select tokens against the reference: ragged rows, trees, ties; everything that must not be read is NaN.

Numbers are small and whole, so that scores are exact, and many are equal.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mtpserve_kernels.attention import reference
from mtpserve_kernels.attention.select import select, selected_mla
from torch import Tensor

from tests.kernels.spans import RAGGED, Span, SpanCase, check


def rows_of(spans: list[Span], heads: int, dim: int, page: int, device: torch.device, tree: bool, shift: int, seed: int) -> dict[str, Any]:
    """Queries, weights and keys; what each row sees."""
    made = SpanCase(1, dim, dim, page, latent=True, tree=tree, shift=shift).make(spans, heads, device, seed)
    return {"page": page} | of_case(made, dim, device)


def of_case(made: dict[str, Any], dim: int, device: torch.device) -> dict[str, Any]:
    table, seats, ends, lengths, index, bits, starts, *_ = made["common"]
    span = torch.searchsorted(ends[1:], torch.arange(len(index), device=device), right=True)
    dice, heads = torch.Generator().manual_seed(1), made["q"].shape[1]
    (keys,) = made["caches"]
    return {
        "q": torch.randint(-2, 3, (len(index), heads, dim), generator=dice).to(device, torch.float32),
        "weights": torch.randint(-1, 4, (len(index), heads), generator=dice).to(device, torch.float32),
        "keys": torch.where(keys.isnan(), keys, (2 * keys).round().clamp(-2, 2)),
        "where": (table, seats[span], torch.minimum(index + 1, lengths[span]), bits, None if starts is None else starts[span]),
    }


def run(made: dict[str, Any], best: int, shift: int, **options: Any) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """→ the kernels' and the reference's."""
    given = made["q"], made["weights"], made["keys"], *made["where"], made["page"], best
    return select(*given, shift=shift, **options), reference.select(*given, shift=shift)


def agree(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    assert torch.equal(actual[1], expected[1])
    for slots, wanted, count in zip(actual[0], expected[0], expected[1].tolist(), strict=True):
        assert torch.equal(slots[:count], wanted[:count])


@pytest.mark.covering(1)
@pytest.mark.parametrize(("tree", "shift"), [(False, 0), (False, 1), (True, 0), (True, 1)])
@pytest.mark.parametrize(("heads", "dim", "page", "best"), [(1, 16, 16, 1), (5, 20, 4, 9), (32, 128, 64, 60), (3, 24, 1, 500)])
def test_slots_are_the_references(device: torch.device, heads: int, dim: int, page: int, best: int, tree: bool, shift: int) -> None:
    for seed, options in enumerate([{}, {"splits": 3, "block": 32, "scores": 700}]):
        agree(*run(rows_of(RAGGED, heads, dim, page, device, tree, shift, seed), best, shift, **options))


@pytest.mark.parametrize(("tree", "shift"), [(False, 0), (True, 1)])
def test_keys_have_scales(device: torch.device, tree: bool, shift: int) -> None:
    made = rows_of(RAGGED, 5, 20, 4, device, tree, shift, 0)
    keys = made["keys"]
    dice = torch.Generator().manual_seed(2)
    scales = 2.0 ** torch.randint(-9, 9, (len(keys), 1, 1), generator=dice).to(device)
    scales[keys.isnan().any(-1, keepdim=True)] = torch.nan
    given = made["q"], made["weights"], keys, *made["where"], made["page"], 9
    expected = reference.select(*given, scales=scales, shift=shift)
    agree(select(*given, scales=scales, shift=shift, splits=3, block=32), expected)
    assert not torch.equal(expected[0], reference.select(*given, shift=shift)[0])


@pytest.mark.parametrize("best", [1, 31, 64, 127])
def test_all_scores_are_equal(device: torch.device, best: int) -> None:
    """0, or minus 0, or all alike: the first columns are taken."""
    made = rows_of([(100, 3), (30, 9)], 4, 16, 8, device, True, 0, 0)
    for q, weight in ((0.0, -1.0), (0.0, 1.0), (2.0, 0.0)):
        made["q"].fill_(q)
        made["weights"].fill_(weight)
        agree(*run(made, best, 0, block=32))


def test_numbers_of_every_size(device: torch.device) -> None:
    """All digits decide: scores that differ in their lowest bits, of both signs, tiny and huge."""
    made = rows_of([(250, 1)], 1, 16, 8, device, False, 0, 0)
    dice = torch.Generator().manual_seed(4)
    table, seats = made["where"][:2]
    place = torch.arange(251, device=device)
    keys = torch.zeros(251, 16)
    near, tiny, huge = 1 + torch.arange(100) * 2**-23, torch.rand(100, generator=dice) * 2**-120, 1e30 * torch.rand(51, generator=dice)
    keys[:, 0] = torch.cat([near, tiny, huge])
    made["keys"][table[seats[0], place // 8] * 8 + place % 8, 0] = keys[torch.randperm(251, generator=dice)].to(device)
    made["q"].zero_()[..., 0] = 1
    for weight in (1.0, -1.0):
        made["weights"].fill_(weight)
        for best in (1, 51, 60, 100, 150, 151, 200, 250):
            agree(*run(made, best, 0, block=64))


def test_nan_is_not_lost(device: torch.device) -> None:
    made = rows_of([(100, 3)], 4, 16, 8, device, False, 0, 0)
    table, seats = made["where"][:2]
    broken = int(table[seats[0], 41 // 8] * 8 + 41 % 8)
    made["keys"][broken] = torch.nan
    made["weights"].fill_(-1)
    actual, expected = run(made, 5, 0)
    agree(actual, expected)
    assert (actual[0] == broken).any(1).all()


def test_a_row_does_not_depend_on_its_neighbours(device: torch.device) -> None:
    """Bitwise, with any numbers."""
    made = rows_of(RAGGED, 6, 32, 8, device, True, 1, 0)
    made["q"].normal_(generator=torch.Generator(device).manual_seed(1))
    (slots, counts), _ = run(made, 7, 1)
    for row in range(len(counts)):
        one = {name: made[name][row : row + 1].contiguous() for name in ("q", "weights")} | {"keys": made["keys"], "page": made["page"]}
        one["where"] = (made["where"][0], *(part[row : row + 1] for part in made["where"][1:]))
        (alone, count), _ = run(one, 7, 1, splits=2)
        assert count == counts[row] and torch.equal(alone[0, :count], slots[row, :count])


@pytest.mark.parametrize("best", [7, 1000])
def test_lists_of_slots_are_page_tables(device: torch.device, best: int) -> None:
    """Attention to what was selected; to everything, where nothing is left out."""
    made = SpanCase(1, 80, 64, 16, latent=True, tree=True).make(RAGGED, 4, device)
    seen = of_case(made, 80, device)
    slots, counts = select(seen["q"], seen["weights"], seen["keys"], *seen["where"], 16, best)
    given = made["q"], *made["caches"], slots, counts, made["common"][-1], 64
    out = selected_mla(*given)
    check(out, reference.selected_mla(*given))
    check(selected_mla(*given, splits=3), out)
    if best == 1000:
        check(out, reference.span_mla(made["q"], *made["caches"], *made["common"], 64))
