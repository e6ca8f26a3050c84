"""Batches of ragged spans, chains and trees, for the tests of attention; everything that must not be read is NaN."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Span = tuple[int, int]  # tokens in the cache before the step, rows of the step


@dataclass
class SpanCase:
    """Pages are dealt at random; what no row may read is NaN, or an entry of the page table that leads out of the cache."""

    kv_heads: int
    key_dim: int
    value_dim: int
    page_size: int
    latent: bool = False
    dtype: torch.dtype = torch.float32
    tree: bool = False
    window: int = 0
    shift: int = 0
    sinks: bool = False

    def make(self, spans: list[Span], heads: int, device: torch.device, seed: int = 0) -> dict[str, Any]:
        dice = torch.Generator().manual_seed(seed)
        page, lengths = self.page_size, [before + rows for before, rows in spans]
        per = [-(-(n + self.shift) // page) for n in lengths]
        order = torch.randperm(sum(per) + 3, generator=dice)
        table = torch.full((len(spans) + 2, max(per) + 1), 1 << 40)  # an unused entry must not be followed
        req_indices = torch.randperm(len(spans) + 2, generator=dice)[: len(spans)]
        slots = (sum(per) + 3) * page
        k = torch.full((slots, self.kv_heads, self.key_dim), torch.nan)
        v = torch.full((slots, self.kv_heads, self.value_dim), torch.nan)
        first, index, bits, starts, ends = 0, [], [], [], [0]
        for (before, rows), req_idx, pages, n in zip(spans, req_indices.tolist(), per, lengths, strict=True):
            mine = order[first : first + pages]
            first += pages
            nodes = min(rows, 64)  # the last rows are a tree's: its root, and what continues it
            ancestors = [1]
            for node in range(1, nodes):
                ancestors.append(ancestors[int(torch.randint(node, (1,), generator=dice))] | 1 << node)
            depth = max(a.bit_count() for a in ancestors) - 1 if self.tree else nodes - 1
            assert not self.tree or not self.window or depth < self.window
            index += range(before, n)
            bits += [-1] * (rows - nodes + 1) + [a - (1 << 64) if a >> 63 else a for a in ancestors[1:]]
            starts.append(n - nodes)
            # The row that sees farthest back is the span's first.
            seen = range(max(before - self.window + 1, 0) if self.window else 0, n)
            table[req_idx, (seen.start + self.shift) // page : pages] = mine[(seen.start + self.shift) // page :]
            written = (mine.unsqueeze(1) * page + torch.arange(page)).flatten()[seen.start + self.shift : n + self.shift]
            k[written] = torch.randn(len(seen), self.kv_heads, self.key_dim, generator=dice)
            v[written] = torch.randn(len(seen), self.kv_heads, self.value_dim, generator=dice)
            ends.append(ends[-1] + rows)
        q = torch.randn(ends[-1], heads, self.key_dim, generator=dice)

        def on(values: Any) -> Tensor:
            return torch.as_tensor(values, dtype=torch.int64, device=device)

        k, v, q = (x.to(device, self.dtype) for x in (k, v, q))
        caches = (k,) if self.latent else (k, v)
        common = (
            on(table), on(req_indices), on(ends), on(lengths), on(index), on(bits) if self.tree else None,
            on(starts) if self.tree else None,
            page, self.key_dim**-0.5,
        )  # fmt: skip
        # From one that hardly counts to one that hardly leaves anything to the keys.
        sinks = torch.linspace(-4, 8, heads, device=device) if self.sinks else None
        return {"q": q, "caches": caches, "common": common, "sinks": sinks, "width": max(rows for _, rows in spans)}


def check(actual: Tensor, expected: Tensor) -> None:
    assert actual.isfinite().all()
    tolerance = 2e-5 if expected.dtype == torch.float32 else 2e-2 if expected.dtype == torch.bfloat16 else 4e-3
    torch.testing.assert_close(actual.float(), expected.float(), atol=tolerance, rtol=tolerance)


RAGGED: list[Span] = [(0, 5), (37, 1), (130, 4), (3, 8), (64, 1), (0, 1)]
