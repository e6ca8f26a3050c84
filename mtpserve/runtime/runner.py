"""The step: build → forward → accept → advance → draft → publish, for all spans together. There is no other path.

Prompt chunks, plain decoding and verification differ in their spans' widths and in nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from mtpserve.core.batch import Batch, Drafts, Span, SpanResult, StepResult, Verdict
from mtpserve.core.protocols import AttentionBackend, CausalModel, Drafter
from mtpserve.core.sequence import Sequence
from mtpserve.runtime.inputs import build
from mtpserve.runtime.sampling import SeatSampling
from mtpserve.runtime.seats import SeatTensors
from mtpserve.spec.accept import accept


class Runner:
    """core.protocols.ModelRunner."""

    def __init__(
        self, model: CausalModel, attention: AttentionBackend, drafter: Drafter, seats: SeatTensors, sampling: SeatSampling
    ) -> None:
        self.model, self.attention, self.drafter = model, attention, drafter
        self.seats, self.sampling = seats, sampling

    @property
    def max_drafts(self) -> int:
        return self.drafter.max_drafts

    def admit(self, seq: Sequence) -> None:
        self.seats.admit(seq)
        self.sampling.admit(seq)

    @torch.inference_mode()
    def step(self, spans: Seq[Span], want: int) -> StepResult:
        for span in spans:
            self.seats.extend_pages(span.seq)
        batch = build(spans, self.seats, self.sampling.for_batch(seat_of(span) for span in spans))
        hidden = self.model.trunk(batch.ids, batch.positions, self.attention.plan(batch))
        logits = self.model.logits(hidden.head[batch.sample_rows.flatten()])
        verdict = accept(logits.unflatten(0, batch.sample_rows.shape), batch)
        self.seats.advance(batch, verdict)
        drafted = any(span.drafts_next for span in spans)
        drafts = self.drafter.draft(batch, hidden, verdict, min(want, self.max_drafts) if drafted else 0)
        if drafts is not None:
            self.seats.hold(batch, drafts)
        return publish(spans, batch, verdict, drafts)


def seat_of(span: Span) -> int:
    assert span.seq.seat is not None
    return span.seq.seat


def publish(spans: Seq[Span], batch: Batch, verdict: Verdict, drafts: Drafts | None) -> StepResult:
    """The one copy to the host."""
    proposed = batch.ids[batch.sample_rows[:, 1:]].tolist()
    rows = zip(spans, verdict.tokens.tolist(), verdict.accepted.tolist(), verdict.failed.tolist(), proposed, strict=True)
    waiting = 0 if drafts is None else drafts.tokens.shape[1]
    results = []
    for span, tokens, accepted, failed, candidates in rows:
        accepted = accepted if span.samples else 0
        results.append(
            SpanResult(
                tokens=tokens[: accepted + 1] if span.samples else [],
                accepted=accepted,
                proposed=candidates[: span.shape.size],
                drafts=waiting if span.drafts_next else 0,
                failed=failed,
            )
        )
    return StepResult(results)
