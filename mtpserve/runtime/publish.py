"""A step's outcome for the host: one table of integers, and the log-probabilities that its requests want."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, fields
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from mtpserve.core.batch import Batch, Hidden, Logprobs, VerifyOutput
from mtpserve.core.plan import NOT_FINITE, SpanPlan, SpanResult
from mtpserve.core.protocols.models import Trunk
from mtpserve.core.request import TokenLogprob
from mtpserve.runtime.runner_request import RunnerRequest
from mtpserve.runtime.transfer import upload
from mtpserve.spec.verify.logprobs import ranked

SCORED = 128  # rows of a prompt whose logits are there at a time


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns of the table of int64 that a step copies to the host, one row for each span: accepted,
    failed, count, tokens, proposed, sources, and for trees parents and path."""

    accepted: int
    drafts: int  # verified, at most
    trees: bool

    @property
    def widths(self) -> list[int]:
        return [
            1,
            1,
            1,
            self.accepted + 1,
            self.drafts,
            self.drafts,
            *((self.drafts, self.accepted + 1) if self.trees else (0, 0)),
        ]


def result_columns(batch: Batch, verify_output: VerifyOutput) -> Columns:
    """The columns of DeviceRequests.result_table."""
    return Columns(verify_output.tokens.shape[1] - 1, batch.sample_rows.shape[1] - 1, batch.tree is not None)


def results(
    spans: Seq[SpanPlan],
    requests: Seq[RunnerRequest],
    columns: Columns,
    table: Tensor,
    waiting: Seq[int],
    logprobs: Logprobs | None,
    scored: Mapping[int, Logprobs],
) -> list[SpanResult]:
    """All tensors on the host. `waiting`: proposals of the spans that are drafted for; `scored`: the
    prompts', by the span's number."""
    left, ends = iter(waiting), list(accumulate(columns.widths))
    tokens, proposed, sources, parents, path = (slice(start, end) for start, end in pairwise(ends[2:]))
    span_results = []
    for r, (span, request, row) in enumerate(zip(spans, requests, table.tolist(), strict=False)):
        (accepted, failed, size), alternatives = row[:3], request.sampling.logprobs
        if not span.samples:
            accepted = 0
        prompt = scored.get(r)
        span_results.append(
            SpanResult(
                row[tokens][: accepted + 1] if span.samples else [],
                accepted,
                next(left) if span.drafts_next else 0,
                row[proposed][:size],
                row[parents][:size] if columns.trees else list(range(size)),
                row[sources][:size],
                row[path][1 : accepted + 1] if columns.trees else list(range(1, accepted + 1)),
                NOT_FINITE if failed else None,
                None
                if alternatives is None or logprobs is None or not span.samples
                else listed(logprobs, r, accepted + 1, alternatives),
                None
                if prompt is None
                else listed(prompt, 0, prompt.token_logprobs.shape[1], request.sampling.prompt_logprobs or 0),
            )
        )
    return span_results


def listed(scores: Logprobs, row: int, count: int, top: int) -> list[TokenLogprob]:
    token_logprobs, ranks = scores.token_logprobs[row, :count].tolist(), scores.ranks[row, :count].tolist()
    ids, values = scores.top_ids[row, :count, :top].tolist(), scores.top[row, :count, :top].tolist()
    return [
        TokenLogprob(c, r, list(zip(i, v, strict=True)))
        for c, r, i, v in zip(token_logprobs, ranks, ids, values, strict=True)
    ]


def prompt_logprobs(
    spans: Seq[SpanPlan], requests: Seq[RunnerRequest], hidden: Hidden, model: Trunk
) -> dict[int, Logprobs]:
    """For spans inside the prompt of requests that want them: of the token after each row, the raw logits'
    log-probability, as one request.

    The rows of a prompt that was preempted and comes again are scored again; the engine passes on what is
    new. SCORED rows at a time: the float32 logits of a whole chunk, and their copies, are gigabytes.
    """
    by_span, first = {}, 0
    for r, (span, request) in enumerate(zip(spans, requests, strict=True)):
        top = request.sampling.prompt_logprobs
        rows = min(span.start + span.num_tokens, request.num_prompt_tokens - 1) - span.start
        if top is not None and rows > 0:
            after = upload([request.tokens[span.start + 1 : span.start + rows + 1]], hidden.head.device)
            slices = zip(hidden.head[first : first + rows].split(SCORED), after.split(SCORED, 1), strict=True)
            scored = [
                ranked(model.logits(part).log_softmax(-1).unsqueeze(0), tokens, top)
                for part, tokens in slices
            ]
            by_span[r] = Logprobs(
                *(torch.cat([getattr(part, field.name) for part in scored], 1) for field in fields(Logprobs))
            )
        first += span.num_rows
    return by_span
