"""The step on the device: build → forward → accept → advance → compact → draft, for all spans together. There
is no other path.

Prompt chunks, plain decoding and verification, of chains and of trees, differ in their spans' widths and in
nothing else. Nothing here reads a number on the host (unless a request's rules do), so that a step is the
same work whatever it finds, and can be replayed.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from mtpserve.cache.states import States
from mtpserve.cache.stores import Stores
from mtpserve.core.batch import Batch, Drafts, Hidden, Sampler, VerifyOutput
from mtpserve.core.protocols.attention import AttentionBackend
from mtpserve.core.protocols.models import Drafter, Trunk
from mtpserve.runtime.compaction import compact
from mtpserve.runtime.device_requests import DeviceRequests
from mtpserve.runtime.inputs import RowLayout, build_chains
from mtpserve.runtime.parallel.routed import ExpertPages
from mtpserve.spec.verify.accept import LOSSLESS, Verify, accept
from mtpserve.spec.verify.thresholds import Thresholds


def sample_hidden(head: Tensor, batch: Batch) -> Tensor:
    """head [T, hidden] → [R * (K + 1), hidden], the rows that logits are computed of."""
    # Where all spans have one committed token and K drafts, these are all rows in order.
    if batch.longest == 1 and len(head) == batch.sample_rows.numel():
        return head
    return head.index_select(0, batch.sample_rows.flatten())


def unmarked(stage: str) -> None:
    """Nobody measures."""


class Step:
    """The parts that a step is made of. `states`: of the trunk's recurrent layers, where it has any. `verify`
    is the kernel that verifies drafts where all is lossless.

    `mark` is called after each part, with its name, for measurements: runtime/graphs/parts."""

    def __init__(
        self, model: Trunk, attention: AttentionBackend, stores: Stores, drafter: Drafter,
        req_tensors: DeviceRequests, *,
        states: States | None = None, thresholds: Thresholds = LOSSLESS, processed_logprobs: bool = False,
        verify: Verify | None = None, routed: ExpertPages | None = None,
    ) -> None:  # fmt: skip
        self.states = states
        self.model, self.attention, self.stores, self.drafter = model, attention, stores, drafter
        self.req_tensors, self.routed = req_tensors, routed
        self.thresholds, self.processed_logprobs, self.verify = thresholds, processed_logprobs, verify
        self.mark: Callable[[str], None] = unmarked

    def store_deferred_kv(self, layout: RowLayout, req_indices: Tensor, sampler: Sampler) -> None:
        """The draft model absorbs the last rows of these seats, of which steps have deferred that."""
        # What has ended is not to be written to: its pages may be others'.
        req_indices = req_indices.masked_fill(self.req_tensors.done[req_indices], self.req_tensors.padding)
        start = (self.req_tensors.num_computed_tokens[req_indices] - layout.num_tokens).clamp(min=0)
        self.drafter.store_deferred_kv(build_chains(layout, self.req_tensors, req_indices, sampler, start))

    def forward(self, batch: Batch) -> tuple[Hidden, VerifyOutput, Tensor]:
        """Returns the rows' hidden states, what was accepted, and the table for the host: its copy can start
        before the drafting."""
        self.mark("host")
        if self.req_tensors.adapters is not None:
            self.req_tensors.adapters.select(batch)
        contexts = self.attention.plan(batch)
        hidden = self.model.trunk(batch.input_ids, batch.positions, contexts, self.drafter.features)
        if self.routed is not None:
            self.routed.store(batch.slot_mapping)
        logits = self.model.logits(sample_hidden(hidden.head, batch)).unflatten(0, batch.sample_rows.shape)
        self.mark("verify")
        verify_output = accept(
            logits, batch, self.drafter.sizes.depth, self.thresholds, self.processed_logprobs, self.verify
        )
        table = self.req_tensors.result_table(batch, verify_output)
        self.mark("accept")
        return hidden, verify_output, table

    def propose(
        self, batch: Batch, layout: RowLayout, hidden: Hidden, verify_output: VerifyOutput
    ) -> Drafts | None:
        """Commits what was accepted, and drafts for the next step."""
        self.mark("host")
        batch.sampler.advance(batch, verify_output)
        self.req_tensors.advance(batch, verify_output)
        if verify_output.path is not None:
            assert layout.compacted is not None
            batch, hidden = compact(
                layout.compacted, batch, hidden, verify_output, self.req_tensors, self.stores, self.states
            )
        self.mark("accept")
        drafts = self.drafter.draft(batch, hidden, verify_output)
        self.mark("draft")
        self.req_tensors.store_drafts(batch.drafted(batch.req_indices), drafts, batch.has_trees)
        return drafts
