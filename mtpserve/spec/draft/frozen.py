"""The passes of a draft model that stores nothing: its layers read what the trunk's have stored.

All drafts of a step are computed at one place, that of the last token whose keys and values are there. None
is added for them, so that there is nothing to absorb and nothing to keep for later steps:

    token               t0  t1  t2 | t3        t3 was committed in this step, and is not stored yet
    row of draft 1      (h2, t3)               each stands at position 2, and sees t0 … t2
    row of draft 2      (own output, d1)
    row of draft 3      (own output, d2)

SGLang and vLLM let the rows stand there; transformers, which drafts for one request, lets them stand at the
position of t3.
"""

from __future__ import annotations

from torch import Tensor

from mtpserve.core.arch.model import KVReader
from mtpserve.core.batch import Batch, Hidden, VerifyOutput
from mtpserve.core.protocols.models import DraftModel
from mtpserve.spec.draft.passes import DraftPasses


def passes_of(model: DraftModel) -> type[DraftPasses]:
    """Returns what computes the passes of this draft model."""
    frozen = bool(model.layers) and all(isinstance(kind, KVReader) for kind in model.layers)
    return FrozenPasses if frozen else DraftPasses


class FrozenPasses(DraftPasses):
    def extend(self, batch: Batch, hidden: Hidden, verify_output: VerifyOutput) -> tuple[Hidden, Tensor]:
        """Computes the row of the token after the last one that counts, of each request that may be drafted
        for. → its output, and their seats."""
        last, req_indices = self.last(batch, verify_output), batch.drafted(batch.req_indices)
        index = batch.token_indices[last]
        ids, _, _ = batch.req_tensors.next_tokens(req_indices, index)
        rows = self.rows(batch, req_indices, ids, index, index)
        return self.step(rows, None if hidden.features is None else hidden.features[last], 0), req_indices

    def step(self, rows: Batch, state: Tensor | None, depth: int) -> Hidden:
        frozen = at_last_stored(rows)
        return self.model.step(rows.input_ids, frozen.positions, state, self.attention.plan(frozen))

    def skip(self, batch: Batch, hidden: Hidden, verify_output: VerifyOutput) -> None:
        """Nothing is to be absorbed."""

    def store_kv(self, batch: Batch, features: Tensor | None) -> None:
        """Nothing is stored."""


def at_last_stored(rows: Batch) -> Batch:
    """Returns the rows where the last token stands whose keys and values the trunk has stored: the one before
    the last committed token."""
    num_tokens = rows.req_tensors.num_tokens
    index = (num_tokens[rows.token_req_indices] - 2).clamp(min=0)
    return rows._replace(
        positions=index,
        token_indices=index,
        seq_lens=(num_tokens[rows.req_indices] - 1).clamp(min=1),
        tree_bits=None,
        tree_start=None,
        shift=0,
    )
