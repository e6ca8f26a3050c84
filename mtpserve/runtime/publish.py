"""A step's outcome for the host: one table of integers, and the log-probabilities that its requests want."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, fields
from itertools import accumulate, pairwise

import torch
from msgspec.structs import replace

from mtpserve.core.batch import Hidden, Logprobs
from mtpserve.core.plan import NOT_FINITE, SpanPlan, SpanResult
from mtpserve.core.protocols.models import Trunk
from mtpserve.core.request import TokenLogprob
from mtpserve.core.spec_sizes import SpecSizes
from mtpserve.runtime.runner_request import RunnerRequest
from mtpserve.runtime.sampling.constraints import WaitingProposals
from mtpserve.runtime.sampling.rules import LogitRules
from mtpserve.runtime.transfer import Download, upload
from mtpserve.spec.verify.logprobs import ranked

SCORED = 128  # rows of a prompt whose logits are there at a time


# Its place in the plan, the plan's span, and its request.
Span = tuple[int, SpanPlan, RunnerRequest]


@dataclass(frozen=True, slots=True)
class RunnerOutput:
    """What spans that were computed together leave for the host, on its way there.

    The table has one row of int64 for each span: accepted, failed, number of verified drafts; tokens [D+1];
    proposed [K], sources [K]; with trees parents [K] and path [D+1].
    """

    spans: Seq[Span]
    table: Download
    max_drafts: int  # K, verified at most
    has_trees: bool
    num_draft_tokens: Download | Seq[int]  # the next drafts of those of its spans that are drafted for
    logprobs: tuple[Download, ...] = ()
    prompt_logprobs: dict[int, tuple[Download, ...]] | None = None  # by the span's number
    rules: LogitRules | None = None  # where requests may have some
    waiting: WaitingProposals | None = None  # of requests whose grammars bear on it

    def read(self) -> dict[int, SpanResult]:
        """By places in the plan. Called once: the requests get their tokens."""
        counts = self.num_draft_tokens
        results = span_results(
            [(span, request) for _, span, request in self.spans],
            self.table.wait().tolist(),
            self.max_drafts,
            self.has_trees,
            counts.wait().tolist() if isinstance(counts, Download) else counts,
            logprobs_of(self.logprobs) if self.logprobs else None,
            {r: logprobs_of(parts) for r, parts in (self.prompt_logprobs or {}).items()},
            self.rules,
        )
        for (_, _, request), result in zip(self.spans, results, strict=True):
            request.tokens += result.tokens
        by_place = {index: result for (index, _, _), result in zip(self.spans, results, strict=True)}
        return by_place if self.waiting is None else by_place | self.constrained(by_place, self.waiting)

    def constrained(
        self, by_place: Mapping[int, SpanResult], waiting: WaitingProposals
    ) -> dict[int, SpanResult]:
        """The results of requests whose grammars decide which proposals stay."""
        rows = waiting.rows()
        return {
            index: replace(by_place[index], num_draft_tokens=waiting.read(request, rows[request.req_idx]))
            for index, plan, request in self.spans
            if request.req_idx in rows and by_place[index].error is None
        }


def next_limits(
    drafted: Seq[tuple[SpanPlan, RunnerRequest]], draft_depth: int, sizes: SpecSizes, captured: bool
) -> list[int]:
    """The most drafts that a step leaves for each request. Where the host decides about a request's drafts it
    knows no others until it has read the step."""
    usual = sizes.max_draft_tokens(draft_depth, plain=True)
    limits = [
        usual
        if request.is_simple and request.max_depth is plan.max_draft_tokens is None
        else sizes.max_draft_tokens(
            request.depth(draft_depth), captured or not request.has_free_proposals, plan.max_draft_tokens
        )
        for plan, request in drafted
    ]
    for (_, request), limit in zip(drafted, limits, strict=True):
        if request.grammar is not None:
            request.proposals, request.num_waiting = None, limit
    return limits


def downloads(scores: Logprobs | None, rows: slice = slice(None)) -> tuple[Download, ...]:
    if scores is None:
        return ()
    tensors = scores.token_logprobs, scores.ranks, scores.top_ids, scores.top
    return tuple(Download(tensor[rows]) for tensor in tensors)


def logprobs_of(parts: Seq[Download]) -> Logprobs:
    return Logprobs(*(download.wait() for download in parts))


def span_results(
    spans: Seq[tuple[SpanPlan, RunnerRequest]],
    table: Seq[list[int]],
    max_drafts: int,
    has_trees: bool,
    num_draft_tokens: Seq[int],
    logprobs: Logprobs | None,
    prompt_logprobs: Mapping[int, Logprobs],
    rules: LogitRules | None = None,
) -> list[SpanResult]:
    """`table` as in RunnerOutput; what pads a captured step follows. `num_draft_tokens`: of the spans that
    are drafted for."""
    counts = iter(num_draft_tokens)
    width = len(table[0]) - 3
    depth = (width - 3 * max_drafts) // 2 if has_trees else width - 2 * max_drafts  # D + 1
    ends = list(accumulate((3, depth, max_drafts, max_drafts, max_drafts, depth)))
    tokens, proposed, sources, parents, path = (slice(start, end) for start, end in pairwise(ends))
    results = []
    for r, ((span, request), row) in enumerate(zip(spans, table, strict=False)):
        (accepted, failed, size), alternatives = row[:3], request.sampling.logprobs
        if not span.samples:
            accepted = 0
        prompt = prompt_logprobs.get(r)
        error = None
        if failed:
            error = (rules and rules.nothing_allowed(request, row[tokens][: accepted + 1])) or NOT_FINITE
        results.append(
            SpanResult(
                row[tokens][: accepted + 1] if span.samples else [],
                accepted,
                next(counts) if span.drafts_next else 0,
                row[proposed][:size],
                row[parents][:size] if has_trees else list(range(size)),
                row[sources][:size],
                row[path][1 : accepted + 1] if has_trees else list(range(1, accepted + 1)),
                error,
                None
                if alternatives is None or logprobs is None or not span.samples
                else listed(logprobs, r, accepted + 1, alternatives),
                None
                if prompt is None
                else listed(prompt, 0, prompt.token_logprobs.shape[1], request.sampling.prompt_logprobs or 0),
            )
        )
    return results


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
    """Log-probabilities of the token after each row, from raw logits, as one request. They are for spans
    inside the prompts of requests that want them.

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
                ranked(model.logits(chunk).log_softmax(-1).unsqueeze(0), tokens, top)
                for chunk, tokens in slices
            ]
            by_span[r] = Logprobs(
                *(
                    torch.cat([getattr(chunk_logprobs, field.name) for chunk_logprobs in scored], 1)
                    for field in fields(Logprobs)
                )
            )
        first += span.num_rows
    return by_span
