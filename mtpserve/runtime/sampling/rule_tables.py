"""Rules that the device reads from tables with a row for each seat: bias, penalties, min_tokens; and masks
that the host has uploaded for one step.

Nothing of them is read on the host, and requests without a rule have rows that change nothing, to the last
bit. So a captured step applies all of them to all of its requests.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from mtpserve.core.batch import Batch, RequestTensors, VerifyOutput


class RuleTables(Protocol):
    """The tables. Those with a vocabulary are made when they are first asked for."""

    @property
    def req_tensors(self) -> RequestTensors: ...

    @property
    def penalties(self) -> Tensor:
        """[seats, 3] float32: repetition, frequency, presence."""
        ...

    @property
    def least(self) -> Tensor:
        """[seats] int64, min_tokens."""
        ...

    def bias_table(self) -> Tensor:
        """[seats, vocabulary] float32, what is added."""
        ...

    def count_tables(self) -> tuple[Tensor, Tensor]:
        """[seats, vocabulary]: whether a token is in the prompt, bool; how often it is in the output, int64.
        Rows of seats without penalties are void."""
        ...


class MaskTable(NamedTuple):
    """Masks that the host uploads for one step, and constants to read them by."""

    words: Tensor  # [masks, words] int32: bit j of word i is set where token 32 i + j is forbidden
    nodes: Tensor  # [nodes of one request, at most] int64: 0, 1, … The first so many masks forbid nothing.
    shifts: Tensor  # [8] uint8: 0 to 7


class RowMasks(NamedTuple):
    """What grammars forbid in the rows of a verification."""

    table: MaskTable
    firsts: Tensor  # [R] int64, the mask of each request's text, before those of its nodes; 0: it has none

    def apply(self, logits: Tensor, raw: Tensor) -> Tensor:
        """logits [R * nodes, vocabulary] after other rules, raw before them. Where other rules leave nothing
        that the grammar allows, the grammar wins: min_tokens cannot prolong finished JSON."""
        nodes = self.table.nodes[: logits.shape[0] // self.firsts.shape[0]]
        rows = (self.firsts.unsqueeze(1) + nodes).flatten()
        octets = self.table.words.index_select(0, rows).view(torch.uint8)  # the lowest one first
        bits = octets.unsqueeze(2) >> self.table.shifts & 1
        forbidden = bits.view(torch.bool).flatten(1)[:, : logits.shape[1]]
        masked = logits.masked_fill(forbidden, -torch.inf)
        if raw is logits:
            return masked
        constrained = (rows >= self.table.nodes.shape[0]).unsqueeze(1)
        empty = (masked == -torch.inf).all(-1, keepdim=True) & constrained
        return torch.where(empty, raw.masked_fill(forbidden, -torch.inf), masked)


class TableRules:
    """core.protocols.Sampler's `processed`, `advance` and `forced` for rules in tables."""

    def __init__(
        self,
        tables: RuleTables,
        *,
        any_bias: bool = True,
        any_penalty: bool = True,
        any_min_tokens: bool = True,
        masks: RowMasks | None = None,
    ) -> None:
        """`masks`: for verification alone, nothing proposed is masked."""
        self.tables, self.req_tensors, self.masks = tables, tables.req_tensors, masks
        self.any_bias, self.any_penalty, self.any_min_tokens = any_bias, any_penalty, any_min_tokens

    def __bool__(self) -> bool:
        """There is a rule to apply."""
        return self.any_bias or self.any_penalty or self.any_min_tokens or self.masks is not None

    def apply(self, logits: Tensor, req_indices: Tensor, path: Tensor, count: Tensor) -> Tensor:
        raw = logits
        if self.any_bias:
            logits = logits + self.tables.bias_table()[req_indices]
        if self.any_min_tokens:
            logits = self.without_end(logits, req_indices, count)
        if self.any_penalty:
            logits = self.penalised(logits, req_indices, path, count)
        return logits if self.masks is None else self.masks.apply(logits, raw)

    def advance(self, batch: Batch, verify_output: VerifyOutput) -> None:
        """Called before the seats move on."""
        self.masks = None  # they are not of proposals
        if not self.any_penalty:
            return
        _, counts = self.tables.count_tables()
        tokens = verify_output.tokens
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        committed = positions <= verify_output.num_accepted_tokens.unsqueeze(1)
        mask = committed & batch.samples.bool().unsqueeze(1)
        # What is not committed is void, and may be no token at all.
        place = batch.req_indices.unsqueeze(1) * counts.shape[1] + tokens.masked_fill(~mask, 0)
        counts.view(-1).scatter_add_(0, place.flatten(), mask.long().flatten())

    def forced(self, limit: int, req_indices: Tensor) -> tuple[Tensor, Tensor] | None:
        """No rule leaves one token alone."""
        return None

    def without_end(self, logits: Tensor, req_indices: Tensor, count: Tensor) -> Tensor:
        """Below min_tokens the stop tokens are forbidden. logits [rows, vocabulary], count [rows]: tokens
        between the committed ones and the row's."""
        req_tensors = self.req_tensors
        num_output_tokens = (
            req_tensors.num_tokens[req_indices] + count - req_tensors.num_prompt_tokens(req_indices)
        )
        early = num_output_tokens < self.tables.least[req_indices]
        stops = req_tensors.stops[req_indices]  # [rows, STOPS], -1: none
        # What is none repeats the row's first one, or else stands for token 0, which keeps its number.
        ends = torch.where(stops < 0, stops[:, :1], stops)
        forbidden = early.unsqueeze(1) & (ends >= 0)
        ends = ends.clamp(min=0)
        return logits.scatter(1, ends, logits.gather(1, ends).masked_fill(forbidden, -torch.inf))

    def penalised(self, logits: Tensor, req_indices: Tensor, path: Tensor, count: Tensor) -> Tensor:
        """Repetition as in CTRL (Keskar et al. 2019, https://arxiv.org/abs/1909.05858), frequency and
        presence as OpenAI documents."""
        in_prompt, table = self.tables.count_tables()
        repetition, frequency, presence = self.tables.penalties[req_indices].unsqueeze(2).unbind(1)
        counts = table[req_indices]
        on_path = torch.arange(path.shape[1], device=path.device) < count.unsqueeze(1)
        counts = counts.scatter_add(1, path.masked_fill(~on_path, 0), on_path.long())
        present = counts > 0
        repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(present | in_prompt[req_indices], repeated, logits)
        return logits - frequency * counts - presence * present
