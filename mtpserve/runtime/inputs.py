"""Spans to batch. The host knows widths; where a request stands is read from the seats on the device.

span 0: 3 prompt tokens      span 1: 1 token and 2 drafts
rows       0 1 2             3 4 5            cu_q 0 3 6
offset     0 1 2             0 1 2            index = computed[seat] + offset
last_row       2             3
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from mtpserve.core.batch import Batch, Span
from mtpserve.core.protocols import Sampler
from mtpserve.core.shape import SpanShape
from mtpserve.runtime.seats import SeatTensors

Layout = tuple[tuple[int, int, bool], ...]  # per span: committed tokens, drafts, whether it samples


@dataclass(frozen=True, slots=True)
class RowLayout:
    """What follows from the widths alone; steady decoding repeats it step after step, so it is kept."""

    row_span: Tensor  # [T]
    offset: Tensor  # [T]
    cu_q: Tensor  # [R+1]
    width: Tensor  # [R]
    draft_count: Tensor  # [R]
    last_row: Tensor  # [R]
    sample_rows: Tensor  # [R, K+1]
    samples: Tensor  # [R]
    widest: int


@lru_cache(maxsize=256)
def row_layout(layout: Layout, device: torch.device) -> RowLayout:
    row_span: list[int] = []
    offset: list[int] = []
    ends, last_row, sample_rows = [0], [], []
    widest = max(drafts for _, drafts, _ in layout)
    for r, (length, drafts, _) in enumerate(layout):
        width = length + drafts
        last = ends[-1] + length - 1
        row_span += [r] * width
        offset += range(width)
        last_row.append(last)
        sample_rows.append([last + min(i, drafts) for i in range(widest + 1)])
        ends.append(ends[-1] + width)

    def tensor(values: object) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    widths = [length + drafts for length, drafts, _ in layout]
    counts, samples = [drafts for _, drafts, _ in layout], [int(samples) for _, _, samples in layout]
    return RowLayout(
        tensor(row_span), tensor(offset), tensor(ends), tensor(widths), tensor(counts), tensor(last_row), tensor(sample_rows),
        tensor(samples), widest,
    )  # fmt: skip


def build(spans: Seq[Span], seats: SeatTensors, sampler: Sampler) -> Batch:
    rows = row_layout(tuple((s.length, s.shape.size, s.samples) for s in spans), seats.device)
    seat_ids = torch.tensor([s.seq.seat for s in spans], dtype=torch.int64, device=seats.device)
    start = seats.computed[seat_ids]
    row_seats = seat_ids[rows.row_span]
    index = start[rows.row_span] + rows.offset
    drafting = [r for r, s in enumerate(spans) if s.drafts_next]
    return Batch(
        ids=seats.tokens[row_seats, index],
        positions=index,
        index=index,
        slots=seats.slots(row_seats, index),
        row_seats=row_seats,
        seat_ids=seat_ids,
        cu_q=rows.cu_q,
        kv_len=start + rows.width,
        shape=SpanShape.chain(rows.widest),
        draft_count=rows.draft_count,
        last_row=rows.last_row,
        sample_rows=rows.sample_rows,
        samples=rows.samples,
        draft_spans=None if len(drafting) == len(spans) else torch.tensor(drafting, dtype=torch.int64, device=seats.device),
        seats=seats,
        sampler=sampler,
    )
