"""A step's outcome for the host: the one place that copies from the device, and the log-probabilities that somebody asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq

import torch
from torch import Tensor

from mtpserve.core.batch import Batch, Drafts, Hidden, Logprobs, Span, SpanResult, StepResult, Verdict
from mtpserve.core.protocols import CausalModel
from mtpserve.core.request import TokenLogprob
from mtpserve.spec.logprobs import ranked


def publish(
    spans: Seq[Span],
    batch: Batch,
    verdict: Verdict,
    drafts: Drafts | None,
    sources: Tensor,
    scored: Mapping[int, list[TokenLogprob]],
) -> StepResult:
    """`scored`: prompt log-probabilities by the span's number."""
    proposed, who = batch.drafts.tolist(), sources.tolist()
    parents = None if batch.tree is None else batch.tree.parents.tolist()
    paths = None if verdict.path is None else verdict.path.tolist()
    waiting = iter([] if drafts is None else drafts.count.tolist())
    rows = zip(spans, verdict.tokens.tolist(), verdict.accepted.tolist(), verdict.failed.tolist(), strict=True)
    results = []
    for r, (span, tokens, accepted, failed) in enumerate(rows):
        accepted = accepted if span.samples else 0
        size = span.drafts
        asked = span.seq.sampling.logprobs
        results.append(
            SpanResult(
                tokens=tokens[: accepted + 1] if span.samples else [],
                accepted=accepted,
                drafts=next(waiting, 0) if span.drafts_next else 0,
                proposed=proposed[r][:size],
                parents=list(range(size)) if parents is None else parents[r][:size],
                sources=who[r][:size],
                path=list(range(1, accepted + 1)) if paths is None else paths[r][1 : accepted + 1],
                failed=failed,
                logprobs=None
                if asked is None or verdict.logprobs is None
                else listed(verdict.logprobs, r, len(tokens[: accepted + 1]), asked),
                prompt_logprobs=scored.get(r),
            )
        )
    return StepResult(results)


def listed(found: Logprobs, row: int, count: int, top: int) -> list[TokenLogprob]:
    chosen, ranks = found.chosen[row, :count].tolist(), found.ranks[row, :count].tolist()
    ids, values = found.top_ids[row, :count, :top].tolist(), found.top[row, :count, :top].tolist()
    return [TokenLogprob(c, r, list(zip(i, v, strict=True))) for c, r, i, v in zip(chosen, ranks, ids, values, strict=True)]


def prompt_logprobs(spans: Seq[Span], batch: Batch, hidden: Hidden, model: CausalModel) -> dict[int, list[TokenLogprob]]:
    """For spans inside the prompt of requests that ask: of the token behind each row, the raw logits' log-probability.

    The rows of a prompt that was preempted and comes again are scored again; the engine passes on what is new.
    """
    found = {}
    first = batch.cu_q.tolist() if any(span.seq.sampling.prompt_logprobs is not None for span in spans) else []
    for r, span in enumerate(spans):
        top = span.seq.sampling.prompt_logprobs
        rows = min(span.start + span.length, span.seq.prompt_len - 1) - span.start
        if top is None or rows <= 0:
            continue
        logp = model.logits(hidden.head[first[r] : first[r] + rows]).log_softmax(-1).unsqueeze(0)
        behind = torch.tensor([span.seq.tokens[span.start + 1 : span.start + rows + 1]], device=logp.device)
        found[r] = listed(ranked(logp, behind, top), 0, rows, top)
    return found
