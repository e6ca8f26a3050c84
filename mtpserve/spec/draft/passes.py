"""The passes of a draft model over a request's rows, for all drafters that have one.

A draft model's row in slot s is computed from token s (core.protocols.models.DraftModel). With lag 1 it also
gets the trunk's features of token s - 1:

    token        t0    t1    t2    t3 |  t4 …      | a page ends here
    trunk slot   0     1     2     3  |  4
    draft slot   –     h0t1  h1t2  h2t3| h3t4

So a page of the trunk or of the draft model depends only on the tokens up to the page's end. h3 is stored
with the page (cache/boundary), for a request that starts after a page which another request has computed.

Rows of rejected drafts are absorbed too: the next step's absorb overwrites them before anything reads them.

While nothing is drafted a row's output is of no use, only what later rows need of it (`store_kv`). And a pass
for one row of each request costs nearly what it costs for some: the features of decoded rows are kept for
some steps (cache/deferred), and absorbed by one pass.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from mtpserve.cache.boundary import BoundaryRows
from mtpserve.cache.deferred import DeferredRows
from mtpserve.core.batch import Batch, Hidden, VerifyOutput
from mtpserve.core.protocols.attention import AttentionBackend
from mtpserve.core.protocols.models import BlockModel, ChainedModules, DraftModel
from mtpserve.spec.draft.block import block_inputs, block_pass
from mtpserve.spec.draft.history import FeatureHistory
from mtpserve.spec.draft.modules import ModuleChain, behind
from mtpserve.spec.draft.propose import Propose, ReducedHead, propose

# From so many rows on, and so many for each request, a pass for their keys and values and another one for the
# outputs that are used are cheaper than one for all. Few rows take as long as one.
SPLIT_ROWS, SPLIT_EACH = 16, 2


# Absorbs a step's rows → so many drafts of each request that is drafted for [D, steps], and what they were
# drawn from [D, steps, vocabulary]; None if all are point masses.
DraftChain = Callable[["DraftPasses", Batch, Hidden, VerifyOutput, int], tuple[Tensor, Tensor | None]]
# mtpserve_kernels.requests.reference.draft_positions with a page size: length, block_table, req_indices,
# lookback, steps → positions, slots.
DraftPositions = Callable[[Tensor, Tensor, Tensor, int, int], tuple[Tensor, Tensor]]


@cache
def numbers(first: int, end: int, step: int, device: torch.device) -> Tensor:
    """torch.arange, made once: nobody writes to it. A step is captured after it has run, so that none of
    these is in a graph's memory."""
    return torch.arange(first, end, step, device=device)


class DraftPasses:
    """`attention` plans for the draft model's own layers; `draft_positions` knows their page size. `boundary`
    is None if the draft model gets no features of the trunk, and so is `deferred`, or if no row is ever
    deferred; `history`, if it gets those of one row. `steps`: drafts of a block. `draft_chain`: None is
    spec.draft.chain.one_by_one."""

    def __init__(
        self, model: DraftModel, attention: AttentionBackend, draft_positions: DraftPositions,
        boundary: BoundaryRows | None = None,
        reduced: ReducedHead | None = None, propose: Propose = propose, deferred: DeferredRows | None = None,
        history: FeatureHistory | None = None, steps: int = 0, draft_chain: DraftChain | None = None,
    ) -> None:  # fmt: skip
        self.history, self.steps = history, steps
        self.model, self.attention, self.boundary = model, attention, boundary
        self.reduced, self.propose = reduced, propose
        self.deferred, self.draft_chain, self.draft_positions = deferred, draft_chain, draft_positions
        self.described: Any = None  # kept by a kernel that needs it
        self.chain: ModuleChain | None = None
        if model.features.chained and history is not None and boundary is not None:
            self.chain = ModuleChain(cast(ChainedModules, model), attention, history, boundary)

    def joined(self, batch: Batch, hidden: Hidden, verify_output: VerifyOutput) -> Hidden:
        """The trunk's output with the features that the draft model wants: in every step, before anything
        else. Chained modules make them of it as they absorb it."""
        if self.history is None or self.boundary is None or hidden.features is None:
            return hidden
        self.history.resume(batch, self.boundary)
        if self.chain is not None:
            return hidden
        return hidden._replace(
            features=self.history.joined(batch, hidden.features, verify_output.num_accepted_tokens)
        )

    def extend(self, batch: Batch, hidden: Hidden, verify_output: VerifyOutput) -> tuple[Hidden, Tensor]:
        """Computes the draft model's row for the token after each row of the batch. → its output at the last
        token of each request that may be drafted for, and their seats. Called after the verdict has advanced
        the seats; every span's rows are a chain."""
        features, req_indices = hidden.features, batch.drafted(batch.req_indices)
        last, rows = self.last(batch, verify_output), self.after(batch, features)
        if self.chain is not None and features is not None:
            return self.chain.extend(batch, rows, features, verify_output.num_accepted_tokens).at(
                last
            ), req_indices
        if self.model.mask is not None:
            self.model.store_kv(rows.input_ids, rows.positions, features, self.attention.plan(rows))
            tokens, index = block_inputs(
                rows.input_ids[last], rows.token_indices[last], self.model.mask, self.steps
            )
            masked = self.rows(batch, req_indices, tokens.flatten(), index.flatten(), index.flatten())
            model = cast(BlockModel, self.model)
            return block_pass(model, self.attention, masked, tokens, index), req_indices
        if not self.splits(rows, last):
            return self.model.extend(rows.input_ids, rows.positions, features, self.attention.plan(rows)).at(
                last
            ), req_indices
        # Most rows are needed only for later rows.
        self.model.store_kv(rows.input_ids, rows.positions, features, self.attention.plan(rows))
        ends = self.rows(
            batch, req_indices, rows.input_ids[last], rows.token_indices[last], rows.positions[last]
        )
        last_features = None if features is None else features[last]
        return self.model.extend(
            ends.input_ids, ends.positions, last_features, self.attention.plan(ends)
        ), req_indices

    def last(self, batch: Batch, verify_output: VerifyOutput) -> Tensor:
        """[D], the last row that counts of each request that may be drafted for."""
        return batch.drafted(
            torch.addcmul(batch.last_token_rows, verify_output.num_accepted_tokens, batch.samples)
        )

    def splits(self, rows: Batch, last: Tensor) -> bool:
        """True if the pass first computes keys and values of all rows, then the outputs of the `last` ones
        [D] alone."""
        return rows.input_ids.shape[0] >= max(SPLIT_ROWS, SPLIT_EACH * last.shape[0])

    def skip(self, batch: Batch, hidden: Hidden, verify_output: VerifyOutput) -> None:
        """Replaces `extend` in a step that drafts nothing."""
        if self.chain is not None:
            self.extend(batch, hidden, verify_output)  # every row needs nearly all of it
            return
        if batch.defers_kv and self.deferred is not None and hidden.features is not None:
            index, rows = batch.token_indices, hidden.features
            if index.shape[0] > batch.req_indices.shape[0]:
                index, rows = index[batch.last_token_rows], rows[batch.last_token_rows]
            self.deferred.keep(batch.req_indices, index, rows)
        if batch.extends_kv:
            self.store_kv(batch, hidden.features)

    def store_deferred_kv(self, batch: Batch) -> None:
        """Absorbs rows that were deferred."""
        self.store_kv(
            batch,
            None if self.deferred is None else self.deferred.of(batch.token_req_indices, batch.token_indices),
        )

    def store_kv(self, batch: Batch, features: Tensor | None) -> None:
        rows = self.after(batch, features)
        self.model.store_kv(rows.input_ids, rows.positions, features, self.attention.plan(rows))

    def after(self, batch: Batch, features: Tensor | None) -> Batch:
        """The draft model's rows for the tokens after the batch's; what must be stored or computed before
        them is."""
        req_tensors, lag = batch.req_tensors, self.model.lag
        if self.boundary is not None and features is not None and self.chain is None:
            self.boundary.store(batch.slot_mapping, features)
        if batch.resumed is not None:
            self.resume(batch, batch.resumed)
        # Prompt tokens, accepted drafts and the target's own tokens are all in seats.tokens by now.
        ids, after, slots = req_tensors.next_tokens(batch.token_req_indices, batch.token_indices)
        ahead = 1 - lag
        return batch._replace(
            input_ids=ids,
            positions=batch.positions + ahead if ahead else batch.positions,
            token_indices=after if ahead else batch.token_indices,
            slot_mapping=slots,
            seq_lens=batch.seq_lens + ahead if ahead else batch.seq_lens,
            shift=lag,
            unstored=None,
        )

    def resume(self, batch: Batch, spans: Tensor) -> None:
        """Computes the row of the first token of each of the `spans`. `extend` cannot, because the row before
        it is not in the batch: another request has computed it, or there is none."""
        req_tensors, req_indices = batch.req_tensors, batch.req_indices[spans]
        first = batch.token_indices[batch.query_start_loc[:-1][spans]]
        features = (
            None
            if self.boundary is None
            else self.boundary.before(req_tensors.slot_mapping(req_indices, first - 1))
        )
        above = (first - self.model.lag).clamp(min=0)  # 0 of what pads a captured step
        rows = self.rows(batch, req_indices, req_tensors.tokens[req_indices, first], above, above)
        if self.chain is not None and features is not None:
            self.chain.resume(rows, features)
        else:
            self.model.extend(rows.input_ids, rows.positions, features, self.attention.plan(rows))

    def rows(
        self, batch: Batch, req_indices: Tensor, ids: Tensor, index: Tensor, positions: Tensor,
        slots: Tensor | None = None,
        seq_lens: Tensor | None = None,
    ) -> Batch:  # fmt: skip
        """A batch with one row for each of the tokens `ids` [rows], at `index` + lag of its request; each
        request's rows are contiguous. `slots`: of the tokens, and `seq_lens`: index + 1 of each request's
        last row, where these are known."""
        requests, device = req_indices.shape[0], index.device
        rows_per_req = ids.shape[0] // max(requests, 1)
        owners, ends = (
            (req_indices, index)
            if rows_per_req == 1
            else (req_indices.repeat_interleave(rows_per_req), index.view(requests, rows_per_req)[:, -1])
        )
        if slots is None:
            slots = batch.req_tensors.slot_mapping(
                owners, index + self.model.lag if self.model.lag else index
            )
        return batch._replace(
            input_ids=ids,
            positions=positions,
            token_indices=index,
            slot_mapping=slots,
            token_req_indices=owners,
            req_indices=req_indices,
            query_start_loc=numbers(0, requests * rows_per_req + 1, max(rows_per_req, 1), device),
            seq_lens=ends + 1 if seq_lens is None else seq_lens,
            tree=None,
            tree_bits=None,
            tree_start=None,
            shift=self.model.lag,
            unstored=None,
        )

    def step(self, rows: Batch, state: Tensor | None, depth: int) -> Hidden:
        """`depth`: of the drafts whose rows these are."""
        if self.chain is not None and state is not None:
            return self.chain.step(rows, state, depth)
        if self.model.at_once:
            return self.model.step(rows.input_ids, rows.positions, state, ())
        attended_rows = rows if self.history is None else behind(rows, depth)
        return self.model.step(rows.input_ids, rows.positions, state, self.attention.plan(attended_rows))

    def logits(
        self, head: Tensor, depth: int, batch: Batch, req_indices: Tensor, path: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        """head [rows, hidden] of drafts after `depth` others, path: these [rows, D] and how many they are
        [rows], None where no request has rules → the logits after the request's rules, and the token of each
        column (None: the whole vocabulary). Rules and sampling need the whole vocabulary; the argmax alone
        does not. The logits may be anything, NaN too: see propose."""
        sampler, columns, reduced = batch.sampler, None, self.reduced
        logits = self.model.logits(head, depth) if reduced is None else reduced.multiply(head, depth)
        if reduced is not None and sampler.all_greedy and not sampler.has_rules:
            columns = reduced.tokens
        elif reduced is not None:
            logits = reduced.spread(logits)
        return logits if path is None else sampler.processed(logits, req_indices, *path), columns
