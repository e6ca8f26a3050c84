"""One pass of a draft model that computes a block of drafts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mtpserve.core.batch import Batch, Hidden
from mtpserve.core.protocols.attention import AttentionBackend, Context
from mtpserve.core.protocols.models import BlockModel


@dataclass(frozen=True, slots=True)
class BlockContext:
    """core.protocols.attention.Context: rows that are stored as `kv_context` plans them, and attend as
    `attended` does."""

    kv_context: Context
    attended: Context

    @property
    def slots(self) -> Tensor:
        return self.kv_context.slots

    @property
    def keys(self) -> Tensor:
        return self.kv_context.keys

    @property
    def values(self) -> Tensor:
        return self.kv_context.values

    def attend(self, q: Tensor, sinks: Tensor | None = None) -> Tensor:
        return self.attended.attend(q, sinks)


def block_inputs(ids: Tensor, index: Tensor, mask: int, steps: int) -> tuple[Tensor, Tensor]:
    """Returns the tokens and the places of a block's rows, [D, steps + 1] each: the last tokens `ids` [D],
    whose rows are at `index`, and a mask for each draft after them (DFlash, https://arxiv.org/abs/2602.06036
    §3)."""
    places = torch.arange(1, steps + 2, device=ids.device)
    return torch.where(places == 1, ids.unsqueeze(1), mask), index.unsqueeze(1) + places


def block_pass(
    model: BlockModel, attention: AttentionBackend, rows: Batch, tokens: Tensor, index: Tensor
) -> Hidden:
    """Runs one pass over `rows`, those of `block_inputs`. → as core.protocols.models.BlockModel.block."""
    attention_plan = attention.plan(rows)
    if all(model.causal):
        return model.block(tokens, index, attention_plan)
    # Each sees all of them, and of a window what the last one sees: as if all were the last one.
    last = (rows.seq_lens - 1).repeat_interleave(tokens.shape[1])
    full_plan = attention.plan(rows._replace(token_indices=last, positions=last))
    contexts = [
        attention_plan[i] if causal else BlockContext(attention_plan[i], full_plan[i])
        for i, causal in enumerate(model.causal)
    ]
    return model.block(tokens, index, contexts)
