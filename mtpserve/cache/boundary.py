"""One row of hidden numbers for each page: what follows a page may need the trunk's output for the page's
last token.

page          | t0 t1 t2 t3 | t4 …     Slot 4 may combine the trunk's output for t3 with token t4.
rows                     h3            The row is here if the page was computed for another request.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from mtpserve_kernels.cache import reference
from torch import Tensor

StoreBoundary = Callable[[Tensor, Tensor, Tensor, int], None]


class BoundaryRows:
    """rows [pages, width]; the last page is the one that pads batches."""

    def __init__(
        self, pages: int, page_size: int, width: int, dtype: torch.dtype, device: torch.device,
        store_boundary: StoreBoundary = reference.store_boundary,
    ) -> None:  # fmt: skip
        self.page_size, self._store = page_size, store_boundary
        self.rows = torch.zeros(pages, width, dtype=dtype, device=device)

    def store(self, slots: Tensor, rows: Tensor) -> None:
        """slots [T], rows [T, width]: keep the rows of tokens that are the last of their page."""
        self._store(self.rows, slots, rows.contiguous(), self.page_size)

    def before(self, slots: Tensor) -> Tensor:
        """slots [n] of last tokens of pages → [n, width]"""
        return self.rows[slots // self.page_size]
