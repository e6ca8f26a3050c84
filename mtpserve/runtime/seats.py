"""The device's memory of the running requests: one row per seat in each tensor. A step reads and changes rows, never Python lists.

    tokens[seat]   |---- committed: `length` ----|d1 … dK|   void   |
    computed[seat] |------ KV is in the pages -----|                    computed = length - 1 between two steps of a decoding request

What lies behind `length` is void or a proposal; committing is writing behind it and moving `length`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mtpserve.core.batch import Batch, Drafts, Verdict
from mtpserve.core.sequence import Sequence


class SeatTensors:
    """core.protocols.Seats. `slack` is how far behind the longest request a step may write."""

    def __init__(self, seats: int, max_len: int, max_drafts: int, vocab: int, page_size: int, device: torch.device) -> None:
        self.max_drafts, self.page_size, self.device = max_drafts, page_size, device
        self.slack = 2 * (max_drafts + 1)
        whole = max_len + self.slack

        def integers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        self.tokens = integers(seats, whole)
        self.length = integers(seats)
        self.computed = integers(seats)
        self.page_table = integers(seats, -(-whole // page_size))
        self.draft_probs = torch.zeros(seats, max_drafts, vocab if max_drafts else 1, device=device)
        self.pages_written = [0] * seats  # host's copy of how much of each page table row is true

    def admit(self, seq: Sequence) -> None:
        assert seq.seat is not None
        self.tokens[seq.seat, : len(seq.tokens)] = torch.tensor(seq.tokens, dtype=torch.int64)
        self.length[seq.seat], self.computed[seq.seat] = len(seq.tokens), seq.computed
        self.pages_written[seq.seat] = 0

    def extend_pages(self, seq: Sequence) -> None:
        """Copy the pages that the scheduler has given since the last step."""
        assert seq.seat is not None
        written = self.pages_written[seq.seat]
        if written < len(seq.pages):
            self.page_table[seq.seat, written : len(seq.pages)] = torch.tensor(seq.pages[written:], dtype=torch.int64)
            self.pages_written[seq.seat] = len(seq.pages)

    def slots(self, seat_ids: Tensor, index: Tensor) -> Tensor:
        page: Tensor = self.page_table[seat_ids, index // self.page_size]
        return page * self.page_size + index % self.page_size

    def advance(self, batch: Batch, verdict: Verdict) -> None:
        """Commit a verdict. A span that does not sample writes behind its length, where nothing counts, and moves `computed` only."""
        ids, samples = batch.seat_ids, batch.samples
        length = self.length[ids]
        place = length.unsqueeze(1) + torch.arange(verdict.tokens.shape[1], device=self.device)
        self.tokens[ids.unsqueeze(1), place] = verdict.tokens
        self.length[ids] = length + (verdict.accepted + 1) * samples
        self.computed[ids] = batch.kv_len - batch.draft_count + verdict.accepted * samples

    def hold(self, batch: Batch, drafts: Drafts) -> None:
        """Put proposals behind the committed tokens, where the next span's rows are read from."""
        ids = batch.seat_ids if batch.draft_spans is None else batch.seat_ids[batch.draft_spans]
        number = drafts.tokens.shape[1]
        place = self.length[ids].unsqueeze(1) + torch.arange(number, device=self.device)
        self.tokens[ids.unsqueeze(1), place] = drafts.tokens
        if drafts.probs is not None:
            self.draft_probs[ids, :number] = drafts.probs
