"""Grammars in a step: each row's logits are masked by what may follow its own path. The grammars themselves
are the text layer's.

A grammar's state is that of the committed output and lives in the request's record; a path is tried from it
and taken back, so a rejected path leaves no trace.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq

import numpy as np
import torch
from torch import Tensor

from mtpserve.core.protocols.grammars import Grammar
from mtpserve.runtime.runner_request import RunnerRequest
from mtpserve.runtime.transfer import pinned


class GrammarRules:
    def __init__(self, requests: Seq[RunnerRequest], vocab: int) -> None:
        """The grammars were advanced to the end of what was read."""
        self.vocab = vocab
        self.by_seat: dict[int, Grammar] = {
            request.req_idx: request.grammar
            for request in requests
            if request.grammar is not None and request.is_constrained
        }

    def __bool__(self) -> bool:
        return bool(self.by_seat)

    def apply(self, logits: Tensor, raw: Tensor, owners: list[int], since: list[list[int]]) -> Tensor:
        """`owners` are the rows' seats, `since` the tokens between what the grammars know and the row."""
        rows_of: dict[int, list[int]] = {}
        for row, req_idx in enumerate(owners):
            if req_idx in self.by_seat:
                rows_of.setdefault(req_idx, []).append(row)
        if not rows_of:
            return logits
        order = [row for rows in rows_of.values() for row in rows]
        words = np.empty((len(order), -(-self.vocab // 32)), dtype=np.int32)
        done = 0
        for req_idx, rows in rows_of.items():
            self.by_seat[req_idx].masks([since[row] for row in rows], words[done : done + len(rows)])
            done += len(rows)
        allowed = pinned(self.unpacked(words), logits.device).to(logits.device, non_blocking=True)
        masked = logits[order].masked_fill(~allowed, -torch.inf)
        # Where other rules leave nothing that the grammar allows, the grammar wins: min_tokens cannot prolong
        # finished JSON.
        empty = (masked == -torch.inf).all(-1, keepdim=True)
        logits = logits.clone()
        logits[order] = torch.where(empty, raw[order].masked_fill(~allowed, -torch.inf), masked)
        return logits

    def unpacked(self, words: np.ndarray) -> Tensor:
        """[n, words] int32 → [n, vocabulary] bool"""
        bits = torch.from_numpy(words).unsqueeze(2) >> torch.arange(32, dtype=torch.int32) & 1
        return bits.flatten(1)[:, : self.vocab].bool()

    def forced(self, limit: int, seats: list[int], fresh: Mapping[int, list[int]]) -> list[list[int]] | None:
        """Per seat the tokens that its grammar forces after what is committed; None where none of them has a
        grammar."""
        if not any(req_idx in self.by_seat for req_idx in seats):
            return None
        tokens = []
        for req_idx in seats:
            grammar = self.by_seat.get(req_idx)
            tokens.append([] if grammar is None else grammar.forced(fresh.get(req_idx, []), limit))
        return tokens
