"""Rows of prompts in a captured step: as many as the graph has, whatever the prompts' lengths, alone or after
those that decode.

    3 requests that decode, two rows each     2 prompts of 3 and 2 rows, padded to 3 spans and 8 rows
    rows     x x | x x | x x                  a a a | b b | - - -
    spans     0     1     2                     3      4      5

Spans that pad belong to no request.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from mtpserve.runtime.inputs import RowLayout

# Rows of prompts in one graph, and spans, of which at least one pads it: it has the rows that are left over.
# With more rows a GPU takes longer than the launches.
PROMPTS = ((64, 8), (128, 16), (192, 16), (256, 32), (384, 32), (512, 32), (768, 64), (1024, 64))
# The same where requests decode in the same pass: fewer, since there is one of each for each number of these
# requests.
MIXED_PROMPTS = ((64, 8), (192, 8), (384, 16), (1024, 32))


@dataclass(frozen=True, slots=True)
class Prompts:
    """A step's prompts: the rows of each, and which ones start right after pages of another request."""

    lengths: Seq[int]
    resumed: Seq[int]

    def bucket(self, sizes: Seq[tuple[int, int]]) -> tuple[int, int] | None:
        """Rows and spans of the smallest of `sizes` that holds them. None: there are too many rows, or
        prompts."""
        number, total = len(self.lengths), sum(self.lengths)
        return next(
            ((rows, spans) for rows, spans in sizes if number < spans and total + spans - number <= rows),
            None,
        )


def padded_prompts(prompts: Prompts, rows: int, spans: int, decoding: int) -> list[list[int]]:
    """Three lists of `spans` numbers for a graph's prompts: rows, 1 for a real one, and the `resumed` spans.
    The resumed spans repeat to fill the list; `decoding` spans come before all. Spans that pad have a row
    each, the last one all rows that are left over."""
    lengths, padding = list(prompts.lengths), spans - len(prompts.lengths)
    padded = [*lengths, *[1] * (padding - 1), rows - sum(lengths) - padding + 1]
    resumed = [decoding + span for span in prompts.resumed or [spans - 1]]
    return [padded, [1] * len(lengths) + [0] * padding, (resumed * spans)[:spans]]


def prompt_layout(lengths: Tensor, real: Tensor, rows: int) -> RowLayout:
    """lengths [P], `rows` in all, of prompts that end with this step; real [P]: 0 for a span that pads. Its
    rows are all its first one, so that nothing is longer than its seat."""
    ends, row = lengths.cumsum(0), torch.arange(rows, device=lengths.device)
    query_start_loc = pad(ends, (1, 0))
    span = torch.searchsorted(ends, row, right=True)
    none, last = torch.zeros_like(lengths), ends - 1
    offset = (row - query_start_loc[span]) * real[span]
    return RowLayout(
        span,
        offset,
        torch.zeros_like(row),
        query_start_loc,
        lengths,
        none,
        last,
        last.unsqueeze(1),
        real,
        0,
        rows,
        None,
    )


def mixed_layout(decoding: RowLayout, prompts: RowLayout) -> RowLayout:
    """One after the other. Drafts are chains. Logits of a prompt's last row are computed as often as those of
    a request that decodes."""
    spans, rows = decoding.num_tokens.shape[0], decoding.row_span.shape[0]
    return RowLayout(
        row_span=torch.cat([decoding.row_span, prompts.row_span + spans]),
        offset=torch.cat([decoding.offset, prompts.offset]),
        node=torch.cat([decoding.node, prompts.node]),
        query_start_loc=torch.cat([decoding.query_start_loc, prompts.query_start_loc[1:] + rows]),
        num_tokens=torch.cat([decoding.num_tokens, prompts.num_tokens]),
        num_draft_tokens=torch.cat([decoding.num_draft_tokens, prompts.num_draft_tokens]),
        last_token_rows=torch.cat([decoding.last_token_rows, prompts.last_token_rows + rows]),
        sample_rows=torch.cat(
            [decoding.sample_rows, (prompts.sample_rows + rows).expand(-1, decoding.widest + 1)]
        ),
        samples=torch.cat([decoding.samples, prompts.samples]),
        widest=decoding.widest,
        longest=prompts.longest,
        compacted=None,
    )
