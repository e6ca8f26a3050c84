"""The host's side of a step: requests are seated, rows computed together, launched without waiting, and read
when the engine needs the results.

The steps themselves are step.py; what is replayed instead of launched, graphs.py.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from mtpserve.core.batch import Batch
from mtpserve.core.plan import SpanPlan, SpanResult, StepPlan, StepResult
from mtpserve.core.protocols.grammars import GrammarCompiler
from mtpserve.core.protocols.models import Drafter
from mtpserve.core.spec_sizes import SpecShape, SpecSizes
from mtpserve.runtime.admissions import admitted, seat, start_states
from mtpserve.runtime.graphs.graph_key import checkpoint_numbers
from mtpserve.runtime.graphs.graphs import StepGraphs, verified
from mtpserve.runtime.graphs.prompt_rows import Prompts
from mtpserve.runtime.inputs import RowLayout, after_others, build, is_first, row_layout, without_stores
from mtpserve.runtime.paging import Transfers
from mtpserve.runtime.parallel.routed import RoutedRows
from mtpserve.runtime.publish import RunnerOutput, Span, downloads, next_limits, prompt_logprobs
from mtpserve.runtime.runner_request import RunnerRequest
from mtpserve.runtime.sampling.constraints import Constraints, WaitingProposals, constrained, follow
from mtpserve.runtime.sampling.rules import BatchRules
from mtpserve.runtime.sampling.sampling import BatchSampler, SamplingFeatures, SamplingState
from mtpserve.runtime.step import Step
from mtpserve.runtime.transfer import Download, Moment, cached_upload, moment, staged
from mtpserve.spec.build import DraftersByShape

log = logging.getLogger(__name__)

# Requests whose deferred rows, up to 64 of each, are absorbed at once: memory is planned for a step's rows.
# On a CPU the first 1,549 rows took 0.1 s, for fresh memory, and later ones 8 ms. A GPU's parts are larger,
# as each is launched kernel by kernel.
CAUGHT_UP = {"cpu": 8, "cuda": 32}


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """core.protocols.Launched."""

    outputs: Seq[RunnerOutput]
    refused: Seq[Span]
    transfers: Transfers | None = None
    ended: Moment | None = None
    routed: RoutedRows | None = None

    def result(self) -> StepResult:
        by_place = {index: SpanResult([], 0, 0, error=request.error) for index, _, request in self.refused}
        for output in self.outputs:
            by_place |= output.read()
        if self.routed is not None:
            by_place = self.routed.added(by_place)
        ended = [] if self.transfers is None else self.transfers.ended(idle=not by_place)
        return StepResult([by_place[index] for index in range(len(by_place))], ended)


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
        self.transfers, self.drafters, self.grammars = transfers, drafters, grammars
        self.step, self.sampling, self.graphs, self.overlapped = step, sampling, graphs, overlapped
        self.drafter, self.req_tensors = step.drafter, step.req_tensors
        self.constraints = Constraints(self.req_tensors, sampling.rules)
        self.requests: dict[int, RunnerRequest] = {}  # by req_idx
        self.last: tuple[Seq[RunnerRequest], SamplingFeatures] = (), SamplingFeatures()
        self.captured: dict[Drafter, StepGraphs] = {}  # with `reshape`: of each drafter that was used

    def reshape(self, shape: SpecShape) -> None:
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
    def sizes(self) -> SpecSizes:
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
        spans = [(index, span, self.requests[span.req_idx]) for index, span in enumerate(plan.spans)]
        for _, span, request in spans:
            if request.grammar is not None:
                follow(request)
                if self.graphs is not None and span.samples:
                    self.constraints.prepare(request)
        refused = [span for span in spans if span[2].error is not None]
        if refused:
            spans = [span for span in spans if span[2].error is None]
        late = [span for _, span, _ in spans if span.num_deferred_tokens]
        chunk_size = CAUGHT_UP[self.req_tensors.device.type]
        for first in range(0, len(late), chunk_size):
            self.store_deferred_kv(late[first : first + chunk_size])
        outputs = self.compute(spans, plan.draft_depth) if spans else []
        routed = None if self.step.routed is None else self.step.routed.rows(spans)
        return LaunchedStep(outputs, refused, self.transfers, moment(self.req_tensors.device), routed)

    def compute(self, spans: Seq[Span], draft_depth: int) -> list[RunnerOutput]:
        """Replayed where it can be, in one pass where the graphs have prompts and decoding together."""
        if (graphs := self.graphs) is None:
            return [self.run(spans, draft_depth)]
        decoding = [span for span in spans if self.replayable(span)][: graphs.max_batch_size]
        places = {index for index, _, _ in decoding}
        others = [span for span in spans if span[0] not in places]
        prompts = others if all(map(self.ends_prompt, others)) else []
        chains = self.req_tensors.branching.isdisjoint(plan.req_idx for _, plan, _ in spans)
        if prompts and decoding and graphs.has_mixed_steps and chains:
            return self.replay(decoding, draft_depth, graphs, prompts)
        if decoding and len({plan.defers_kv for _, plan, _ in decoding}) > 1:
            # a graph of requests that decode keeps all their rows for later, or none
            return [self.run(spans, draft_depth)]
        outputs = self.replay(decoding, draft_depth, graphs) if decoding else []
        if prompts:
            return outputs + self.replay([], draft_depth, graphs, prompts)
        return [*outputs, self.run(others, draft_depth)] if others else outputs

    def store_deferred_kv(self, plans: Seq[SpanPlan]) -> None:
        layout = row_layout(
            tuple((plan.num_deferred_tokens, 0, False) for plan in plans), self.req_tensors.device
        )
        (req_indices,) = cached_upload((tuple(plan.req_idx for plan in plans),), self.req_tensors.device)
        self.step.store_deferred_kv(layout, req_indices, BatchSampler(self.sampling, SamplingFeatures()))

    def admit(self, plan: StepPlan) -> None:
        if not plan.new_requests and not plan.new_blocks:
            return
        requests = admitted(plan.new_requests, self.grammars, self.req_tensors.adapters)
        self.requests |= {request.req_idx: request for request in requests}
        seated = [request for request in requests if request.error is None]
        seat(seated, plan.new_blocks, self.req_tensors, self.sampling)
        if self.step.states is not None and seated:
            start_states([request.new_request for request in seated], self.step.states)

    def replayable(self, span: Span) -> bool:
        """Among others that decode."""
        _, plan, request = span
        first = is_first(plan, request, self.drafter.lag)
        return plan.num_tokens == 1 and not first and self.is_plain(plan, request)

    def ends_prompt(self, span: Span) -> bool:
        """It can be replayed among prompts. One that does not end yet has no pages where drafts would be
        stored."""
        _, plan, request = span
        scored = request.sampling.prompt_logprobs is not None
        is_stored = plan.start >= request.new_request.num_shared_tokens
        new_rows = plan.num_draft_tokens == 0 and not plan.defers_kv and is_stored
        return new_rows and not scored and self.is_plain(plan, request)

    def is_plain(self, plan: SpanPlan, request: RunnerRequest) -> bool:
        if not request.is_simple and request.is_constrained and request.proposals is None:
            return False
        return plan.samples and not self.sampling.rules.needs_host(request)

    def run(self, spans: Seq[Span], draft_depth: int) -> RunnerOutput:
        _, plans, requests = zip(*spans, strict=True)
        layout, batch = self.batch(plans, requests, draft_depth)
        hidden, verify_output, table = self.step.forward(batch)
        copy = Download(table)
        logprobs = downloads(verify_output.logprobs)
        scored = prompt_logprobs(plans, requests, hidden, self.step.model)
        drafts = self.step.propose(batch, layout, hidden, verify_output)
        count, trees = (None, False) if drafts is None else (drafts.num_draft_tokens, drafts.tree is not None)
        drafted = [(plan, request) for plan, request in zip(plans, requests, strict=True) if plan.drafts_next]
        counts, waiting = self.next_drafts(drafted, draft_depth, count, trees)
        return RunnerOutput(
            spans,
            copy,
            layout.widest,
            batch.tree is not None,
            counts,
            logprobs,
            {r: downloads(scores) for r, scores in scored.items()},
            self.sampling.rules,
            waiting,
        )

    def batch(
        self, plans: Seq[SpanPlan], requests: Seq[RunnerRequest], draft_depth: int
    ) -> tuple[RowLayout, Batch]:
        device = self.req_tensors.device
        drafting = [r for r, plan in enumerate(plans) if plan.drafts_next]
        num_steps = [requests[r].depth(draft_depth) for r in drafting]
        limits = self.max_draft_tokens([plans[r] for r in drafting], draft_depth) if draft_depth else []
        req_indices = [plan.req_idx for plan in plans]
        groups = self.sampling.rules.groups(requests)
        resumed, unstored = after_others(plans, requests, self.drafter.lag)
        lists = (req_indices, drafting, num_steps, limits, resumed, unstored)
        if groups is not None and groups.lists:
            tensors = staged([*lists, *groups.lists], device)
        else:
            tensors = cached_upload(tuple(map(tuple, lists)), device)
        rules = None if groups is None else BatchRules(self.sampling.rules, requests, groups, tensors[6:])
        layout = row_layout(
            tuple((plan.num_tokens, plan.num_draft_tokens, plan.samples) for plan in plans),
            device,
            self.sizes.depth if self.sizes.branching else None,
        )
        sampler = BatchSampler(self.sampling, self.features(requests), rules)
        has_trees = not self.req_tensors.branching.isdisjoint(req_indices)
        batch = build(layout, self.req_tensors, tensors[0], sampler, has_trees)._replace(
            resumed=tensors[4] if resumed else None,
            predictions=self.req_tensors.predicted(req_indices),
            draft_spans=None if len(drafting) == len(plans) else tensors[1],
            draft_depth=max(num_steps, default=0),
            num_draft_steps=tensors[2],
            max_draft_tokens=tensors[3] if limits else None,
            defers_kv=any(plan.defers_kv for plan in plans),
            extends_kv=not all(plan.defers_kv for plan in plans),
            has_adapters=sampler.features.adapters,
            has_trees=has_trees,
        )
        if any(plan.checkpoint for plan in plans):
            tokens, states = staged(checkpoint_numbers(plans), device)
            batch = batch._replace(checkpoint_tokens=tokens, checkpoint_states=states)
        return layout, without_stores(batch, tensors[5] if unstored else None)

    def features(self, requests: Seq[RunnerRequest]) -> SamplingFeatures:
        """The same object as in the last step where the requests are the same, as in steady decoding."""
        if requests != self.last[0] or (not self.last[1].masks and constrained(requests)):
            self.last = requests, SamplingFeatures.of(requests, self.drafter.coupled)
        return self.last[1]

    def replay(
        self, decoding: Seq[Span], draft_depth: int, graphs: StepGraphs, prompts: Seq[Span] = ()
    ) -> list[RunnerOutput]:
        """All `decoding` spans are `replayable`, all `prompts` `ends_prompt`."""
        spans = [*decoding, *prompts]
        _, plans, requests = zip(*spans, strict=True)
        req_indices = [plan.req_idx for plan in plans]
        lengths = None
        if prompts:
            first = len(decoding)
            resumed, _ = after_others(plans[first:], requests[first:], self.drafter.lag)
            lengths = Prompts([plan.num_tokens for plan in plans[first:]], resumed)
        # Without requests that decode: what steady decoding asks for is kept.
        features = (
            self.features(requests) if decoding else SamplingFeatures.of(requests, self.drafter.coupled)
        )
        masks = self.constraints.upload(requests, self.sizes.trees) if features.masks else ()
        graph = graphs.replay(
            req_indices,
            [
                draft_depth if request.max_depth is None else request.depth(draft_depth)
                for request in requests
            ],
            self.max_draft_tokens(plans, draft_depth),
            max(map(verified, plans, requests)),
            draft_depth,
            features,
            not self.req_tensors.branching.isdisjoint(req_indices),
            any(plan.defers_kv for plan in plans),
            () if self.step.states is None else checkpoint_numbers(plans),
            lengths,
            masks,
        )
        if graph is None:
            return [self.run(spans, draft_depth)]
        outputs, output = [], graph.output
        for group, first in ((decoding, 0), (prompts, graph.key.requests)):
            if group:
                rows = slice(first, first + len(group))
                count = None if output.num_proposals is None else output.num_proposals[first:]
                drafted = [(plan, request) for _, plan, request in group]
                counts, waiting = self.next_drafts(drafted, draft_depth, count, output.proposes_trees, True)
                copies = graph.max_proposals, graph.has_trees, counts, downloads(output.logprobs, rows)
                table = Download(output.table[rows])
                outputs.append(RunnerOutput(group, table, *copies, waiting=waiting))
        return outputs

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

    def next_drafts(
        self, drafted: Seq[tuple[SpanPlan, RunnerRequest]], draft_depth: int, count: Tensor | None,
        trees: bool,
        captured: bool = False,
    ) -> tuple[Download | Seq[int], WaitingProposals | None]:  # fmt: skip
        """Notes which requests' next drafts are trees, and returns how many drafts each has, or a bound, and
        those of requests with grammars. `count` [requests, and padding]; None: nothing was drafted."""
        limits = next_limits(drafted, draft_depth if count is not None else 0, self.sizes, captured)
        if count is None:
            return limits, None
        requests = [request for _, request in drafted]
        self.req_tensors.branch([request.req_idx for request in requests], trees)
        waiting = None if self.graphs is None else self.constraints.download(requests, self.sizes)
        return limits if self.overlapped else Download(count), waiting
