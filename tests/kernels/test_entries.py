"""Attention to a window and to entries against plain torch. What nobody sees is NaN."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from mtpserve_kernels.attention import reference
from mtpserve_kernels.attention.entries import window_and_entries
from torch import Tensor

PAGES, EVERY = 20, 4


def memory(table: Tensor, size: int, dim: int, columns: list[range]) -> Tensor:
    """[slots, 1, dim] with numbers in these columns of each request."""
    slots = torch.full((table.numel() * size, 1, dim), torch.nan)
    for pages, those in zip(table, columns, strict=True):
        places = torch.tensor(those)
        slots[pages[places // size] * size + places % size] = torch.randn(len(those), 1, dim)
    return slots


def arguments(heads: int, dim: int, page: int, entry_page: int, window: int, tree: bool) -> list[Any]:
    """Of each request the row before the root, the root, and with a tree nodes 1, 2 and 3: the last is a child of the first. Nodes 1 and 3
    complete entries."""
    roots = [5, 2 * page + 1, (PAGES - 2) * page - 9]
    rows = list[tuple[int, ...]]()  # request, index, bits, root, entries, bits of entries, entries before those of nodes
    for request, root in enumerate(roots):
        for node, bits in ((-1, -1), (0, -1), *(((1, 0b11), (2, 0b101), (3, 0b1011)) if tree else ())):
            before = (min(root + node, root) + 1) // EVERY
            completes = bits & 0b1010 if bits > 0 else 0
            rows.append((request, root + node, bits, root, before + (node + 1 if completes else 0), completes or -1, before))
    request, index, bits, starts, ends, entry_bits, entry_starts = torch.tensor(rows).t().contiguous()
    table, entry_table = (torch.randperm(len(roots) * PAGES).view(len(roots), PAGES) for _ in range(2))
    tokens = memory(table, page, dim, [range(max(0, root - window), root + 4) for root in roots])
    entries = memory(entry_table, entry_page, dim, [range((root + 1) // EVERY + 4) for root in roots])
    trees, entry_trees = ((bits, starts), (entry_bits, entry_starts)) if tree else ((None, None), (None, None))
    return [
        torch.randn(len(rows), heads, dim), tokens, table, entries, entry_table, torch.stack([request, request]), index, *trees, ends,
        *entry_trees, torch.randn(heads), page, entry_page, window, dim**-0.5,
    ]  # fmt: skip


def compared(given: list[Any], splits: int | None, device: torch.device) -> None:
    here = [part.to(device) if isinstance(part, Tensor) else part for part in given]
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float16, 1e-2)):
        memories = (here[0].to(dtype), here[1].to(dtype), here[2], here[3].to(dtype))
        actual = window_and_entries(*memories, *here[4:], splits=splits)
        expected = reference.window_and_entries(*memories, *here[4:])
        assert actual.dtype == dtype and not expected.isnan().any()
        torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("tree", [False, True], ids=["chains", "trees"])
@pytest.mark.parametrize(
    ("heads", "dim", "page", "entry_page", "window", "splits"),
    [(3, 24, 16, 4, 7, 1), (20, 40, 8, 2, 33, 3), (40, 64, 20, 5, 64, None), (1, 16, 16, 16, 1, 8)],
)
def test_window_and_entries(
    device: torch.device, heads: int, dim: int, page: int, entry_page: int, window: int, splits: int | None, tree: bool
) -> None:
    torch.manual_seed(dim)
    compared(arguments(heads, dim, page, entry_page, window, tree), splits, device)


def test_lists_of_rows(device: torch.device) -> None:
    """Of selected entries, with pages of one; a row that has none sees its window alone."""
    torch.manual_seed(0)
    given = arguments(5, 32, 8, 2, 9, False)
    rows, places = len(given[0]), torch.randperm(len(given[3]))[:60].view(-1, 10)[: len(given[0])]
    given[3] = torch.full_like(given[3], torch.nan).index_copy(0, places.flatten(), torch.randn(places.numel(), 1, 32))
    given[4], given[5] = places, torch.stack([given[5][0], torch.arange(rows)])
    given[9], given[14] = torch.arange(rows) * 2, 1
    compared(given, None, device)
