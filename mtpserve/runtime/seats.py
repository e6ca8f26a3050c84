"""The tensors that a step changes, one row (seat) per running request. A slot is something else: a place in the KV pool.

    tokens[seat]   |---- committed ----|x| d1 d2 d3 |   void   |        x is the last committed token, length points behind it
    computed[seat] |------ KV is in the pages -----|                    computed = length - 1 between two steps of a decoding request

What lies behind `length` is void or a proposal; committing is writing behind it and moving `length`.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import lru_cache

import torch
from torch import Tensor

from mtpserve.core.batch import Batch, Drafts, Tree, Verdict
from mtpserve.core.protocols import Drafter
from mtpserve.core.sequence import Sequence


@lru_cache(maxsize=64)
def chain(drafts: int, device: torch.device) -> Tree:
    """One row, for any number of requests."""
    nodes = torch.arange(drafts + 1, device=device).unsqueeze(0)
    return Tree(nodes[:, :-1], (2 << nodes) - 1, nodes)


class SeatTensors:
    """core.protocols.Seats. `slack` is how far behind the longest request a step may write.

    `trees` and `sources` are there only for drafters whose proposals branch or come from several sources; a chain needs neither.
    """

    def __init__(self, seats: int, max_len: int, drafter: Drafter, vocab: int, page_size: int, device: torch.device) -> None:
        self.page_size, self.device = page_size, device
        self.slack = 2 * (drafter.reach + 1)
        whole, drafts = max_len + self.slack, drafter.max_drafts

        def integers(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int64, device=device)

        self.tokens = integers(seats, whole)
        # One column is written at admission; each row has its name.
        self.counts = integers(3, seats)
        self.length, self.computed, self.prompt = self.counts.unbind(0)
        self.page_table = integers(seats, -(-whole // page_size))
        chained = 0 if drafter.coupled else drafter.depth
        self.draft_probs = torch.zeros(seats, chained, vocab if chained else 1, device=device)
        self.draft_tree = Tree(integers(seats, drafts), integers(seats, drafts + 1), integers(seats, drafts + 1)) if drafter.trees else None
        self.draft_sources = integers(seats, drafts)
        self.branching: set[int] = set()  # seats whose waiting drafts are not a chain; known on the host
        self.predictions: dict[int, Tensor] = {}
        self.pages_written = [0] * seats  # host's copy of how much of each page table row is true

    def admit(self, seq: Sequence) -> None:
        assert seq.seat is not None
        self.tokens[seq.seat, : len(seq.tokens)] = torch.tensor(seq.tokens, dtype=torch.int64)
        self.counts[:, seq.seat] = torch.tensor((len(seq.tokens), seq.computed, seq.prompt_len))
        self.pages_written[seq.seat] = 0
        self.predictions.pop(seq.seat, None)
        if seq.prediction:
            self.predictions[seq.seat] = torch.tensor(seq.prediction, device=self.device)

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

    def prompt_length(self, seat_ids: Tensor) -> Tensor:
        return self.prompt[seat_ids]

    def prediction(self, seat_ids: Tensor) -> tuple[Tensor, Tensor] | None:
        if not self.predictions:
            return None
        rows = [self.predictions.get(seat, self.length[:0]) for seat in seat_ids.tolist()]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), torch.tensor([len(row) for row in rows], device=self.device)

    def waiting_tree(self, seats: Collection[int], seat_ids: Tensor, drafts: int) -> Tree | None:
        """None where all of them wait with chains."""
        if self.draft_tree is None or self.branching.isdisjoint(seats):
            return None
        parents, ancestors, depths = (part[seat_ids] for part in self.draft_tree)
        return Tree(parents[:, :drafts], ancestors[:, : drafts + 1], depths[:, : drafts + 1])

    def advance(self, batch: Batch, verdict: Verdict) -> None:
        """Commit a verdict. A span that does not sample writes behind its length, where nothing counts, and moves `computed` only."""
        ids, samples = batch.seat_ids, batch.samples
        length = self.length[ids]
        place = length.unsqueeze(1) + torch.arange(verdict.tokens.shape[1], device=self.device)
        self.tokens[ids.unsqueeze(1), place] = verdict.tokens
        self.length[ids] = length + (verdict.accepted + 1) * samples
        self.computed[ids] = batch.kv_len - batch.draft_count + verdict.accepted * samples

    def hold(self, seats: Collection[int], seat_ids: Tensor, drafts: Drafts) -> None:
        """Put proposals behind the committed tokens, where the next span's rows are read from. `seats` are `seat_ids` on the host."""
        number = drafts.tokens.shape[1]
        place = self.length[seat_ids].unsqueeze(1) + torch.arange(number, device=self.device)
        self.tokens[seat_ids.unsqueeze(1), place] = drafts.tokens
        if drafts.probs is not None:
            self.draft_probs[seat_ids, : drafts.probs.shape[1]] = drafts.probs
        self.draft_sources[seat_ids, :number] = 0 if drafts.sources is None else drafts.sources
        if self.draft_tree is None:
            return
        # Chains are written too: they may be verified beside a tree.
        tree = chain(number, self.device) if drafts.tree is None else drafts.tree
        self.draft_tree.parents[seat_ids, :number] = tree.parents
        self.draft_tree.ancestors[seat_ids, : number + 1] = tree.ancestors
        self.draft_tree.depths[seat_ids, : number + 1] = tree.depths
        self.branching = (self.branching.difference if drafts.tree is None else self.branching.union)(seats)
