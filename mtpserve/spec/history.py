"""Features of several rows side by side, for draft models that want those of the rows before a row too (core.arch.Features.rows).

    rows      h0     h1     h2     h3           of the trunk, in steps of any number of rows
    joined    h0 · · h1 h0 · h2 h1 h0 h3 h2 h1  of three rows; what is before the first one is void

So what a draft model gets for a row, defers, or finds beside a page, is one row of numbers, however many modules it has.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mtpserve.cache.boundary import BoundaryRows
from mtpserve.core.batch import Batch


class FeatureHistory:
    """`rows`: how many are joined; `width`: of one row's features. Of each seat the last ones are kept."""

    def __init__(self, seats: int, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.rows, self.width = rows, width
        self.last = torch.zeros(seats, rows - 1, width, dtype=dtype, device=device)  # the latest first
        self.first = torch.zeros(seats, dtype=torch.int64, device=device)  # index of the span's first row, for this step

    def joined(self, batch: Batch, features: Tensor, accepted: Tensor, boundary: BoundaryRows) -> Tensor:
        """features [T, width] of rows that are chains, of which `accepted` [R] drafts count → [T, rows * width]."""
        self.resume(batch, boundary)
        self.first[batch.seat_ids] = batch.index[batch.cu_q[:-1]]
        offset, row = batch.index - self.first[batch.row_seats], torch.arange(len(features), device=features.device)
        before, parts = self.last[batch.row_seats], [features]
        for back in range(1, self.rows):
            own, older = features[(row - back).clamp(min=0)], before[row, (back - offset - 1).clamp(0, self.rows - 2)]
            parts.append(torch.where((offset >= back).unsqueeze(1), own, older))
        joined = torch.cat(parts, 1)
        self.last[batch.seat_ids] = self.split(joined[batch.last_row + accepted * batch.samples])[:, :-1]
        return joined

    def resume(self, batch: Batch, boundary: BoundaryRows) -> None:
        """Rows that another request has computed are beside its pages: those before a span, or, where its first row is computed again,
        with that row."""
        for spans, again in ((batch.resumed, 0), (batch.unstored, 1)):
            if spans is not None:
                seat_ids, first = batch.seat_ids[spans], batch.index[batch.cu_q[:-1][spans]]
                found = self.split(boundary.before(batch.seats.slots(seat_ids, first - 1 + again)))
                self.last[seat_ids] = found[:, again : again + self.rows - 1]

    def split(self, joined: Tensor) -> Tensor:
        """[n, rows * width] → [n, rows, width]"""
        return joined.view(len(joined), self.rows, self.width)
