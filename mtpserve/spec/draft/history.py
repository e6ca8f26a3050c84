"""Features of several rows side by side, for draft models that want those of the rows before a row too
(core.arch.model.Features.rows).

    rows      h0     h1     h2     h3           of the trunk, in steps of any number of rows
    joined    h0 · · h1 h0 · h2 h1 h0 h3 h2 h1  of three rows; what is before the first one is void

Where modules are chained (Features.chained), a row hands on what its modules have made of it instead: with a1
of h0 and t1, and b2 of a1 and t2, the third row is h2 a2 b2.

So what a draft model gets for a row, defers, or finds beside a page, is one row of numbers, however many
modules it has.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mtpserve.cache.boundary import BoundaryRows
from mtpserve.core.batch import Batch

HandOn = Callable[[int, Tensor], Tensor]


def as_it_is(number: int, chunk: Tensor) -> Tensor:
    return chunk


class FeatureHistory:
    """`rows`: how many are joined; `width`: of one row's features. It keeps for each seat what its last row
    hands on to the next one."""

    def __init__(self, seats: int, rows: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.rows, self.width = rows, width
        self.last = torch.zeros(seats, rows - 1, width, dtype=dtype, device=device)
        # index of the span's first row, for this step
        self.first = torch.zeros(seats, dtype=torch.int64, device=device)

    def joined(self, batch: Batch, features: Tensor, accepted: Tensor, hand_on: HandOn = as_it_is) -> Tensor:
        """features [T, width] of rows that are chains, of which `accepted` [R] drafts count → [T, rows *
        width]. `hand_on`: from chunk `number` of each row [T, width] to what is chunk `number` + 1 of the row
        after it."""
        self.first[batch.req_indices] = batch.token_indices[batch.query_start_loc[:-1]]
        # the row before is in the same span
        inside = (batch.token_indices > self.first[batch.token_req_indices]).unsqueeze(1)
        above = (torch.arange(len(features), device=features.device) - 1).clamp(min=0)
        before = self.last[batch.token_req_indices]
        ends = batch.last_token_rows + accepted * batch.samples
        parts = [features]
        last_rows = list[Tensor]()
        for number in range(self.rows - 1):
            handed = hand_on(number, parts[-1])
            last_rows.append(handed[ends])
            parts.append(torch.where(inside, handed[above], before[:, number]))
        self.last[batch.req_indices] = torch.stack(last_rows, 1)
        return torch.cat(parts, 1)

    def resume(self, batch: Batch, boundary: BoundaryRows) -> None:
        """Rows that another request has computed are beside its pages: those before a span, or, where its
        first row is computed again, that row itself. Earlier ones of chained modules hand on only what they
        make of the span's first token."""
        for spans, again in ((batch.resumed, 0), (batch.unstored, 1)):
            if spans is not None:
                req_indices, first = (
                    batch.req_indices[spans],
                    batch.token_indices[batch.query_start_loc[:-1][spans]],
                )
                rows = self.split(
                    boundary.before(batch.req_tensors.slot_mapping(req_indices, first - 1 + again))
                )
                self.last[req_indices] = rows[:, again : again + self.rows - 1]

    def split(self, joined: Tensor) -> Tensor:
        """[n, rows * width] → [n, rows, width]"""
        return joined.view(len(joined), self.rows, self.width)
