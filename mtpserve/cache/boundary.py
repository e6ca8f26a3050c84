"""One row of hidden numbers for each page: what follows a page may need the trunk's output for the page's last token.

page          | t0 t1 t2 t3 | t4 …        A layer whose row for slot 4 joins the trunk's output for t3 with token t4 finds
rows                     h3               that output here when the page was computed for another request.
"""

from __future__ import annotations

import torch
from torch import Tensor


class BoundaryRows:
    """rows [pages, width]; the last page is the one that pads batches, and takes what is at no boundary."""

    def __init__(self, pages: int, page_size: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.page_size, self.spare = page_size, pages - 1
        self.rows = torch.zeros(pages, width, dtype=dtype, device=device)

    def store(self, index: Tensor, slots: Tensor, rows: Tensor) -> None:
        """index [T] in the request, slots [T], rows [T, width]: keep those of the last token of a page."""
        inside = ((index + 1) % self.page_size).bool()
        self.rows[(slots // self.page_size).masked_fill(inside, self.spare)] = rows

    def before(self, slots: Tensor) -> Tensor:
        """slots [n] of last tokens of pages → [n, width]"""
        return self.rows[slots // self.page_size]
