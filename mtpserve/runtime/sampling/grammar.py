"""Grammars in a step: each row's logits are masked by what may follow its own path. The grammars themselves are the text layer's.

A grammar's state is that of the committed output and lives in the request's record; a path is tried from it and taken back, so a
rejected path leaves no trace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from mtpserve.core.protocols.grammars import Grammar
from mtpserve.runtime.records import Record
from mtpserve.runtime.transfer import pinned


class GrammarRules:
    def __init__(self, records: Seq[Record], vocab: int) -> None:
        """The grammars were advanced to the end of what was read."""
        self.vocab = vocab
        self.by_seat: dict[int, Grammar] = {record.seat: record.grammar for record in records if record.grammar is not None}

    def __bool__(self) -> bool:
        return bool(self.by_seat)

    def apply(self, logits: Tensor, raw: Tensor, owners: list[int], since: list[list[int]]) -> Tensor:
        """`owners` are the rows' seats, `since` the tokens between what the grammars know and the row."""
        rows_of: dict[int, list[int]] = {}
        for row, seat in enumerate(owners):
            if seat in self.by_seat:
                rows_of.setdefault(seat, []).append(row)
        if not rows_of:
            return logits
        order = [row for rows in rows_of.values() for row in rows]
        words = np.empty((len(order), -(-self.vocab // 32)), dtype=np.int32)
        done = 0
        for seat, rows in rows_of.items():
            self.by_seat[seat].masks([since[row] for row in rows], words[done : done + len(rows)])
            done += len(rows)
        allowed = pinned(self.unpacked(words), logits.device).to(logits.device, non_blocking=True)
        masked = logits[order].masked_fill(~allowed, -torch.inf)
        # Where other rules leave nothing that the grammar allows, the grammar wins: min_tokens cannot prolong finished JSON.
        empty = (masked == -torch.inf).all(-1, keepdim=True)
        logits = logits.clone()
        logits[order] = torch.where(empty, raw[order].masked_fill(~allowed, -torch.inf), masked)
        return logits

    def unpacked(self, words: np.ndarray) -> Tensor:
        """[n, words] int32 → [n, vocabulary] bool"""
        bits = torch.from_numpy(words).unsqueeze(2) >> torch.arange(32, dtype=torch.int32) & 1
        return bits.flatten(1)[:, : self.vocab].bool()

    def forced(self, limit: int, seats: list[int], fresh: Mapping[int, list[int]]) -> list[list[int]] | None:
        """Per seat the tokens that its grammar forces after what is committed; None where none of them has a grammar."""
        if not any(seat in self.by_seat for seat in seats):
            return None
        tokens = []
        for seat in seats:
            grammar = self.by_seat.get(seat)
            tokens.append([] if grammar is None else grammar.forced(fresh.get(seat, []), limit))
        return tokens
