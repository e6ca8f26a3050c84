"""Modules of which each depth has its own: what each of them sees, and the passes of those that are chained.

Chained modules are computed one after the other, each over all rows of a pass: module i + 1 gets for a row
what module i gave for the row before it. So each row of committed tokens costs a pass of every module, where
modules that get the trunk's features alone need keys and values of all but the first. What the last row of a
request hands on to its next one is kept by spec/draft/history.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from mtpserve.cache.boundary import BoundaryRows
from mtpserve.core.batch import Batch, Hidden
from mtpserve.core.protocols.attention import AttentionBackend
from mtpserve.core.protocols.models import ChainedModules
from mtpserve.spec.draft.history import FeatureHistory


def behind(rows: Batch, number: int) -> Batch:
    """What module `number` sees: rows that stand as many positions earlier, in the same slots. Rotation needs
    no such difference.

    A row that would stand before the module's first one is void: it may see anything, and only void rows get
    what it gives."""
    bits, start = rows.tree_bits, rows.tree_start
    if bits is not None and start is not None:
        # Nodes that would stand before the module's first row are none of its rows: the first ones of each
        # path.
        missing = (number - start).clamp(min=0)
        bits = bits.view(len(start), -1)
        for i in range(number):
            bits = torch.where(missing.unsqueeze(1) > i, bits & (bits - 1), bits)
        bits, start = (bits >> missing.unsqueeze(1)).flatten(), start - number + missing
    return rows._replace(
        positions=rows.positions - number,
        token_indices=rows.token_indices - number,
        seq_lens=(rows.seq_lens - number).clamp(min=1),
        tree_bits=bits,
        tree_start=start,
        shift=rows.shift + number,
    )


class ModuleChain:
    """The passes of chained modules."""

    def __init__(
        self,
        model: ChainedModules,
        attention: AttentionBackend,
        history: FeatureHistory,
        boundary: BoundaryRows,
    ) -> None:
        self.model, self.attention, self.history, self.boundary = model, attention, history, boundary

    def extend(self, batch: Batch, rows: Batch, features: Tensor, accepted: Tensor) -> Hidden:
        """`rows`: of the tokens after the batch's; features [T, width] of the trunk's rows, of which
        `accepted` [R] drafts count → the first module's output, and what each row hands on."""
        outputs: list[Output] = []

        def hand_on(number: int, chunk: Tensor) -> Tensor:
            outputs.append(self.module(number, rows, chunk))
            return outputs[-1].features

        joined = self.history.joined(batch, features, accepted, hand_on)
        last = self.history.split(joined)[:, -1]
        self.model.store_last_kv(
            rows.input_ids, rows.positions, last, self.attention.plan(behind(rows, len(outputs)))
        )
        self.boundary.store(batch.slot_mapping, joined)
        return Hidden(outputs[0].head, torch.cat([output.features for output in outputs], 1))

    def resume(self, rows: Batch, joined: Tensor) -> None:
        """The first row of each of some requests, `joined` [n, Features.width] beside the page before it:
        what it hands on is kept."""
        handed = self.step(rows, joined, 0).features
        assert handed is not None
        self.history.last[rows.req_indices] = handed.view(len(handed), -1, self.history.width)

    def step(self, rows: Batch, state: Tensor, depth: int) -> Hidden:
        """`state` [n, modules left * width]: what the rows before handed on to the modules from `depth`
        on."""
        outputs, parts = list[Output](), state.split(self.history.width, 1)
        for number, chunk in enumerate(parts[:-1], depth):
            outputs.append(self.module(number, rows, chunk))
        last = depth + len(outputs)
        if outputs:
            self.model.store_last_kv(
                rows.input_ids, rows.positions, parts[-1], self.attention.plan(behind(rows, last))
            )
            return Hidden(outputs[0].head, torch.cat([output.features for output in outputs], 1))
        return Hidden(self.module(last, rows, parts[-1]).head, None)

    def module(self, number: int, rows: Batch, chunk: Tensor) -> Output:
        attended_rows = behind(rows, number)
        head, features = self.model.module(
            number, rows.input_ids, rows.positions, chunk, self.attention.plan(attended_rows)
        )
        assert features is not None
        # What void rows give becomes keys and values, too. Nobody counts them, but zero times what they hold
        # must be zero.
        return Output(head, features.masked_fill((attended_rows.positions < 0).unsqueeze(1), 0))


class Output(NamedTuple):
    """The output of one module."""

    head: Tensor
    features: Tensor
