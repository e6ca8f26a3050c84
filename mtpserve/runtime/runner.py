"""The step: build → forward → accept → advance → compact → draft → publish, for all spans together. There is no other path.

Prompt chunks, plain decoding and verification, of chains and of trees, differ in their spans' widths and in nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from mtpserve.cache.pool import KVPool
from mtpserve.core.batch import Span, StepResult
from mtpserve.core.protocols import AttentionBackend, CausalModel, Drafter
from mtpserve.core.sequence import Sequence
from mtpserve.runtime.inputs import build, compact, seat_of
from mtpserve.runtime.publish import prompt_logprobs, publish
from mtpserve.runtime.sampling import SeatSampling
from mtpserve.runtime.seats import SeatTensors
from mtpserve.spec.accept import LOSSLESS, Decide, accept
from mtpserve.spec.thresholds import Thresholds


class Runner:
    """core.protocols.ModelRunner."""

    def __init__(
        self,
        model: CausalModel,
        attention: AttentionBackend,
        pool: KVPool,
        drafter: Drafter,
        seats: SeatTensors,
        sampling: SeatSampling,
        thresholds: Thresholds = LOSSLESS,
        processed_logprobs: bool = False,
        accept_kernel: Decide | None = None,
    ) -> None:
        self.model, self.attention, self.pool, self.drafter = model, attention, pool, drafter
        self.seats, self.sampling = seats, sampling
        self.thresholds, self.processed_logprobs, self.accept_kernel = thresholds, processed_logprobs, accept_kernel

    @property
    def max_drafts(self) -> int:
        return self.drafter.max_drafts

    @property
    def depth(self) -> int:
        return self.drafter.depth

    def reach(self, seq: Sequence | None) -> int:
        if seq is None or seq.grammar is not None or seq.prediction:
            return self.drafter.reach
        return self.drafter.plain_reach

    def admit(self, seq: Sequence) -> None:
        self.seats.admit(seq)
        self.sampling.admit(seq)

    @torch.inference_mode()
    def step(self, spans: Seq[Span], want: int) -> StepResult:
        seqs = [span.seq for span in spans]
        for seq in seqs:
            self.seats.extend_pages(seq)
        sampler = self.sampling.for_batch(seqs, self.drafter.coupled)
        batch = build(spans, self.seats, sampler)
        hidden = self.model.trunk(batch.ids, batch.positions, self.attention.plan(batch))
        logits = self.model.logits(hidden.head[batch.sample_rows.flatten()])
        verdict = accept(
            logits.unflatten(0, batch.sample_rows.shape), batch, self.drafter.depth, self.thresholds, self.processed_logprobs,
            self.accept_kernel,
        )  # fmt: skip
        scored = prompt_logprobs(spans, batch, hidden, self.model)
        sources = self.seats.draft_sources[batch.seat_ids, : batch.sample_rows.shape[1] - 1]
        sampler.advance(batch, verdict)
        self.seats.advance(batch, verdict)
        rows = batch
        if verdict.path is not None:
            rows, hidden = compact(spans, batch, hidden, verdict, self.seats, self.pool)
        drafting = [span for span in spans if span.drafts_next]
        wanted = [want if span.seq.depth is None else min(want, span.seq.depth) for span in drafting]
        drafts = self.drafter.draft(rows, hidden, verdict, wanted)
        if drafts is not None:
            seat_ids = batch.seat_ids if batch.draft_spans is None else batch.seat_ids[batch.draft_spans]
            self.seats.hold([seat_of(span) for span in drafting], seat_ids, drafts)
        return publish(spans, batch, verdict, drafts, sources, scored)
