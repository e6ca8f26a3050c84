"""The host's side of a step: requests are seated, rows computed together, launched without waiting, and read
when the engine needs the results.

The steps themselves are step.py; what is replayed instead of launched, graphs.py.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from mtpserve.core.batch import DraftTargets, Logprobs, StateCheckpoints
from mtpserve.core.draft_sizes import DraftShape, DraftSizes
from mtpserve.core.errors import InvalidRequest
from mtpserve.core.plan import SpanPlan, SpanResult, StateCheckpoint, StepPlan, StepResult
from mtpserve.core.protocols.grammars import GrammarCompiler
from mtpserve.core.protocols.models import Drafter
from mtpserve.runtime.admissions import seat, start_states
from mtpserve.runtime.graphs.graphs import StepGraphs
from mtpserve.runtime.graphs.prompt_rows import Prompts
from mtpserve.runtime.inputs import BatchInputs, after_others, is_first, row_layout
from mtpserve.runtime.paging import Transfers
from mtpserve.runtime.publish import Columns, prompt_logprobs, results
from mtpserve.runtime.runner_request import RunnerRequest
from mtpserve.runtime.sampling.rules import BatchRules
from mtpserve.runtime.sampling.sampling import BatchSampler, SamplingFeatures, SamplingState
from mtpserve.runtime.step import Step
from mtpserve.runtime.transfer import Download, Moment, moment, staged
from mtpserve.spec.build import DraftersByShape

log = logging.getLogger(__name__)

NOWHERE = StateCheckpoint(0, 0, 0)
# Requests whose deferred rows, up to 64 of each, are absorbed at once: memory is planned for a step's rows.
# On a CPU the first 1,549 rows took 0.1 s, for fresh memory, and later ones 8 ms. A GPU's parts are larger,
# as each is launched kernel by kernel.
CAUGHT_UP = {"cpu": 8, "cuda": 32}

Span = tuple[int, SpanPlan, RunnerRequest]  # its place in the plan


@dataclass(frozen=True, slots=True)
class Part:
    """Spans that were computed together, and their copies for the host on the way."""

    spans: Seq[Span]
    columns: Columns
    table: Download
    waiting: Download | Seq[int]  # drafts of those of its spans that are drafted for
    logprobs: tuple[Download, ...] = ()
    scored: dict[int, tuple[Download, ...]] | None = None

    def read(self) -> list[SpanResult]:
        """Called once: the requests get their tokens."""
        _, plans, requests = zip(*self.spans, strict=True)
        logprobs = Logprobs(*(part.wait() for part in self.logprobs)) if self.logprobs else None
        scored = {r: Logprobs(*(part.wait() for part in parts)) for r, parts in (self.scored or {}).items()}
        table = self.table.wait()
        waiting = self.waiting.wait().tolist() if isinstance(self.waiting, Download) else self.waiting
        span_results = results(plans, requests, self.columns, table, waiting, logprobs, scored)
        for request, result in zip(requests, span_results, strict=True):
            request.tokens += result.tokens
        return span_results


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """core.protocols.Launched."""

    parts: Seq[Part]
    refused: Seq[Span]
    transfers: Transfers | None = None
    ended: Moment | None = None

    def result(self) -> StepResult:
        by_place = {place: SpanResult([], 0, 0, error=request.error) for place, _, request in self.refused}
        for part in self.parts:
            by_place |= {place: result for (place, _, _), result in zip(part.spans, part.read(), strict=True)}
        ended = [] if self.transfers is None else self.transfers.ended(idle=not by_place)
        return StepResult([by_place[place] for place in range(len(by_place))], ended)


class Runner:
    """core.protocols.ModelRunner. With `graphs`, decoding requests are replayed and the others run beside
    them.

    `overlapped`: the engine plans with bounds anyway, so that it does not wait for the number of drafts.
    """

    def __init__(
        self, step: Step, sampling: SamplingState, graphs: StepGraphs | None = None, overlapped: bool = False,
        grammars: GrammarCompiler | None = None, transfers: Transfers | None = None,
        drafters: DraftersByShape | None = None,
    ) -> None:  # fmt: skip
        self.transfers, self.drafters = transfers, drafters
        self.step, self.sampling, self.graphs, self.overlapped, self.grammars = (
            step,
            sampling,
            graphs,
            overlapped,
            grammars,
        )
        self.drafter, self.req_tensors = step.drafter, step.req_tensors
        self.records: dict[int, RunnerRequest] = {}  # by seat
        self.last: tuple[Seq[RunnerRequest], SamplingFeatures] = (), SamplingFeatures()
        self.planned_checkpoints: dict[int, StateCheckpoint] = {}  # of the step that is launched, by seat
        self.captured: dict[Drafter, StepGraphs] = {}  # with `reshape`: of each drafter that was used

    def reshape(self, shape: DraftShape) -> None:
        """Steps that were captured are kept, for the next time that this shape is wanted."""
        assert self.drafters is not None
        drafter = self.drafters.of(shape)
        self.drafter = self.step.drafter = drafter
        if not drafter.coupled and drafter.sizes.steps:
            self.req_tensors.keep_probs(self.drafters.largest.depth, self.step.model.arch.vocab)
        self.last = (), SamplingFeatures()
        if self.graphs is not None:
            if drafter not in self.captured:
                self.captured[drafter] = self.graphs.recapture()
            self.graphs = self.captured[drafter]

    def check(self) -> None:
        """No other process is needed."""

    def close(self) -> None:
        """Nothing is held but memory."""

    @property
    def sizes(self) -> DraftSizes:
        return self.drafter.sizes

    @property
    def processors(self) -> bool:
        return bool(self.sampling.rules.processors)

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        if plan.transfers:
            assert self.transfers is not None
            self.transfers.start(plan.transfers)
        self.admit(plan)
        self.planned_checkpoints = {checkpoint.req_idx: checkpoint for checkpoint in plan.checkpoints}
        spans = [(place, span, self.records[span.req_idx]) for place, span in enumerate(plan.spans)]
        for _, _, request in spans:
            if request.grammar is not None:
                self.follow(request)
        refused = [span for span in spans if span[2].error is not None]
        if refused:
            spans = [span for span in spans if span[2].error is None]
        parts: list[Part] = []
        late = [span for _, span, _ in spans if span.num_deferred_tokens]
        chunk_size = CAUGHT_UP[self.req_tensors.device.type]
        for first in range(0, len(late), chunk_size):
            self.store_deferred_kv(late[first : first + chunk_size])
        if spans:
            parts += self.compute(spans, plan.draft_depth)
        return LaunchedStep(parts, refused, self.transfers, moment(self.req_tensors.device))

    def compute(self, spans: Seq[Span], draft_depth: int) -> list[Part]:
        """Replayed where it can be, in one pass where the graphs have prompts and decoding together."""
        if (graphs := self.graphs) is None:
            return [self.run(spans, draft_depth)]
        decoding = [span for span in spans if self.replayable(span)][: graphs.max_batch_size]
        places = {place for place, _, _ in decoding}
        others = [span for span in spans if span[0] not in places]
        prompts = others if all(map(self.ends_prompt, others)) else []
        chains = self.req_tensors.branching.isdisjoint(plan.req_idx for _, plan, _ in spans)
        if prompts and decoding and graphs.has_mixed_steps and chains:
            return self.replay(decoding, draft_depth, graphs, prompts)
        if decoding and len({plan.defers_kv for _, plan, _ in decoding}) > 1:
            # a graph of requests that decode keeps all their rows for later, or none
            return [self.run(spans, draft_depth)]
        parts = self.replay(decoding, draft_depth, graphs) if decoding else []
        if prompts:
            return parts + self.replay([], draft_depth, graphs, prompts)
        return [*parts, self.run(others, draft_depth)] if others else parts

    def store_deferred_kv(self, plans: Seq[SpanPlan]) -> None:
        layout = row_layout(
            tuple((plan.num_deferred_tokens, 0, False) for plan in plans), self.req_tensors.device
        )
        (req_indices,) = kept((tuple(plan.req_idx for plan in plans),), self.req_tensors.device)
        self.step.store_deferred_kv(layout, req_indices, BatchSampler(self.sampling, SamplingFeatures()))

    def admit(self, plan: StepPlan) -> None:
        if not plan.new_requests and not plan.new_pages:
            return
        requests = [RunnerRequest(new_request) for new_request in plan.new_requests]
        for request in requests:
            self.records[request.req_idx] = request
            if (spec := request.sampling.grammar) is None:
                continue
            try:
                if self.grammars is None:
                    raise InvalidRequest(
                        f"{spec.kind} needs the model's tokenizer, which this runner has not", spec.kind
                    )
                request.grammar = self.grammars.compile(spec)
            except Exception as error:
                log.exception("request %s could not be seated", request.id)
                request.refuse(error)
        seated = [request for request in requests if request.error is None]
        seat(seated, plan.new_pages, self.req_tensors, self.sampling)
        if self.step.states is not None and seated:
            start_states([request.new_request for request in seated], self.step.states)

    def follow(self, request: RunnerRequest) -> None:
        try:
            request.advance_grammar()
        except ValueError as error:
            log.exception("the grammar of request %s does not allow its text", request.id)
            request.refuse(error)

    def replayable(self, span: Span) -> bool:
        """Among others that decode."""
        _, plan, request = span
        return (
            plan.num_tokens == 1
            and self.is_plain(plan, request)
            and not is_first(plan, request, self.drafter.lag)
        )

    def ends_prompt(self, span: Span) -> bool:
        """It can be replayed among prompts. One that does not end yet has no pages where drafts would be
        stored."""
        _, plan, request = span
        scored = request.sampling.prompt_logprobs is not None
        stored = plan.start >= request.new_request.num_shared_tokens
        return (
            plan.num_draft_tokens == 0
            and not plan.defers_kv
            and stored
            and not scored
            and self.is_plain(plan, request)
        )

    def is_plain(self, plan: SpanPlan, request: RunnerRequest) -> bool:
        plain = (
            request.plain
            and request.sampling.logprobs is None
            and not request.has_rules
            and not self.processors
        )
        return plan.samples and plain

    def run(self, spans: Seq[Span], draft_depth: int) -> Part:
        _, plans, requests = zip(*spans, strict=True)
        rows = self.rows(plans, requests, draft_depth)
        computed = self.step.forward(rows)
        table = Download(computed.table)
        logprobs = downloads(computed.verdict.logprobs)
        scored = {
            r: downloads(scores)
            for r, scores in prompt_logprobs(plans, requests, computed.hidden, self.step.model).items()
        }
        drafts = self.step.propose(rows, computed)
        count, trees = (None, False) if drafts is None else (drafts.num_draft_tokens, drafts.tree is not None)
        drafted = [(plan, request) for plan, request in zip(plans, requests, strict=True) if plan.drafts_next]
        waiting = self.note(drafted, draft_depth, count, trees)
        return Part(spans, computed.columns, table, waiting, logprobs, scored)

    def rows(self, plans: Seq[SpanPlan], requests: Seq[RunnerRequest], draft_depth: int) -> BatchInputs:
        drafting = [r for r, plan in enumerate(plans) if plan.drafts_next]
        wanted = [requests[r].depth(draft_depth) for r in drafting]
        max_draft_tokens = (
            self.max_draft_tokens([plans[r] for r in drafting], draft_depth) if draft_depth else []
        )
        hosts = [plan.req_idx for plan in plans]
        groups = self.sampling.rules.groups(requests)
        more = [] if groups is None else groups.lists
        resumed, unstored = after_others(plans, requests, self.drafter.lag)
        host_lists = (
            tuple(hosts),
            tuple(drafting),
            tuple(wanted),
            tuple(max_draft_tokens),
            tuple(resumed),
            tuple(unstored),
        )
        inputs = (
            staged([*host_lists, *more], self.req_tensors.device)
            if more
            else kept(host_lists, self.req_tensors.device)
        )
        req_indices, draft_spans, num_steps, most_each, resumed_spans, unstored_spans, *lists = inputs
        rules = None if groups is None else BatchRules(self.sampling.rules, requests, groups, lists)
        layout = tuple((plan.num_tokens, plan.num_draft_tokens, plan.samples) for plan in plans)
        return BatchInputs(
            row_layout(layout, self.req_tensors.device, self.sizes.depth if self.sizes.branching else None),
            req_indices,
            None if len(drafting) == len(plans) else draft_spans,
            DraftTargets(
                num_steps, max(wanted, default=0), most_each if max_draft_tokens else None, *deferral(plans)
            ),
            not self.req_tensors.branching.isdisjoint(hosts),
            BatchSampler(self.sampling, self.features(requests), rules),
            resumed_spans if resumed else None,
            unstored_spans if unstored else None,
            self.req_tensors.predicted(hosts),
            self.checkpoints(plans),
        )

    def checkpoints(self, plans: Seq[SpanPlan]) -> StateCheckpoints | None:
        if self.planned_checkpoints.keys().isdisjoint(plan.req_idx for plan in plans):
            return None
        return StateCheckpoints(*staged(self.checkpoint_numbers(plans), self.req_tensors.device))

    def checkpoint_numbers(self, plans: Seq[SpanPlan]) -> list[list[int]]:
        """Of each span: after how many tokens a state is kept, and which one."""
        checkpoints = [self.planned_checkpoints.get(plan.req_idx, NOWHERE) for plan in plans]
        return [
            [checkpoint.num_tokens for checkpoint in checkpoints],
            [checkpoint.state for checkpoint in checkpoints],
        ]

    def features(self, requests: Seq[RunnerRequest]) -> SamplingFeatures:
        """The same object as in the last step where the requests are the same, as in steady decoding."""
        if requests != self.last[0]:
            self.last = requests, SamplingFeatures.of(requests, self.drafter.coupled)
        return self.last[1]

    def replay(
        self, decoding: Seq[Span], draft_depth: int, graphs: StepGraphs, prompts: Seq[Span] = ()
    ) -> list[Part]:
        """All `decoding` spans are `replayable`, all `prompts` `ends_prompt`."""
        spans = [*decoding, *prompts]
        _, plans, requests = zip(*spans, strict=True)
        hosts, wanted = [plan.req_idx for plan in plans], [request.depth(draft_depth) for request in requests]
        trees = not self.req_tensors.branching.isdisjoint(hosts)
        deferred, drafts = any(plan.defers_kv for plan in plans), max(plan.num_draft_tokens for plan in plans)
        checkpoints, lengths = () if self.step.states is None else self.checkpoint_numbers(plans), None
        if prompts:
            first = len(decoding)
            resumed, _ = after_others(plans[first:], requests[first:], self.drafter.lag)
            lengths = Prompts([plan.num_tokens for plan in plans[first:]], resumed)
        # Without requests that decode: what steady decoding asks for is kept.
        features = (
            self.features(requests) if decoding else SamplingFeatures.of(requests, self.drafter.coupled)
        )
        outcome = graphs.replay(
            hosts,
            wanted,
            self.max_draft_tokens(plans, draft_depth),
            drafts,
            draft_depth,
            features,
            trees,
            deferred,
            checkpoints,
            lengths,
        )
        if outcome is None:
            # It is launched by itself: beside requests with grammars its drafts would become trees.
            return [self.run(spans, draft_depth)]
        parts = []
        for some, first in ((decoding, 0), (prompts, outcome.decoding)):
            if some:
                count = None if outcome.count is None else outcome.count[first:]
                waiting = self.note(
                    [(plan, request) for _, plan, request in some], draft_depth, count, outcome.trees
                )
                parts.append(
                    Part(some, outcome.columns, Download(outcome.table[first : first + len(some)]), waiting)
                )
        return parts

    def max_draft_tokens(self, plans: Seq[SpanPlan], draft_depth: int) -> list[int]:
        """Drafts that the algorithm may give each request after these spans, `draft_depth` deep; empty: as
        many as it has."""
        enough = self.sizes.num_proposed if self.sizes.trees else draft_depth
        if all(plan.max_draft_tokens is None or plan.max_draft_tokens >= enough for plan in plans):
            return []
        return [
            self.sizes.num_proposed
            if plan.max_draft_tokens is None
            else min(plan.max_draft_tokens, self.sizes.num_proposed)
            for plan in plans
        ]

    def note(
        self,
        drafted: Seq[tuple[SpanPlan, RunnerRequest]],
        draft_depth: int,
        count: Tensor | None,
        trees: bool,
    ) -> Download | Seq[int]:
        """What is known on the host about the drafts that now wait. `count` [requests, and padding], None
        where nothing was drafted."""
        if count is None:
            return [0] * len(drafted)
        self.req_tensors.branch([request.req_idx for _, request in drafted], trees)
        if self.overlapped:
            return [
                self.sizes.max_draft_tokens(request.depth(draft_depth), request.plain, plan.max_draft_tokens)
                for plan, request in drafted
            ]
        return Download(count)


def deferral(plans: Seq[SpanPlan]) -> tuple[bool, bool]:
    """DraftTargets.defers_kv and DraftTargets.extends_kv."""
    return any(plan.defers_kv for plan in plans), not all(plan.defers_kv for plan in plans)


@lru_cache(maxsize=64)
def kept(lists: tuple[tuple[int, ...], ...], device: torch.device) -> list[Tensor]:
    """`staged`, for lists that steady decoding repeats step after step. Nobody writes to these tensors."""
    return staged(lists, device)


def downloads(scores: Logprobs | None) -> tuple[Download, ...]:
    parts: tuple[Tensor, ...] = (
        () if scores is None else (scores.token_logprobs, scores.ranks, scores.top_ids, scores.top)
    )
    return tuple(Download(part) for part in parts)
