"""Which rows the next step computes, for whom, on which pages; and what the step's result does to the
requests.

Pure Python over sequences and page counts. It is not the loop (engine.py) and holds no tensor. Two promises
shape it:

* A request's text depends on the request alone. Its drafts are verified whole or not yet, never trimmed to
  fit a budget, and one that was preempted goes on from the very token and drafts that it had.
* The first in order always makes progress: pages run out at the expense of the last, and every decoding
  request gets its turn within a bounded number of steps.

A step may be planned while others are in flight, from what is certain about them: see
core/state/request_state. `must_wait` says when that is not enough. A request whose end was not read yet gets
spans without effect: `commit` drops them unread, and since the device works in order, pages that were
released in the meantime are written by their next holder after that.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence as Seq

from mtpserve.cache.groups import PageGroups
from mtpserve.config.drafters import MTP
from mtpserve.core.batch import Source
from mtpserve.core.plan import SpanPlan, SpanResult, StepPlan, StepResult
from mtpserve.core.protocols.observers import CacheObserver
from mtpserve.core.request import Finish, Proposal
from mtpserve.core.state.request_state import RequestState
from mtpserve.engine.admission import Admission
from mtpserve.engine.pages.kv_connector import KVConnector
from mtpserve.engine.pages.prefixes import Prefixes
from mtpserve.engine.queue import UNLIMITED, SchedulingPolicy, WaitingQueue
from mtpserve.engine.spans import (
    decodes,
    deferred,
    ends,
    new_blocks,
    next_span,
    to_compute,
    useful_drafts,
)
from mtpserve.engine.steps import RequestEvent, ScheduledStep, event_of
from mtpserve.engine.stopping import until_stop


class Scheduler:
    """`running` and `waiting` are in the order of arrival, always, and of arrival within a priority where
    requests have one. A seat, once given, is lost for want of pages alone.

    running | a b c d |  waiting | e f g |
                    d ←──────── admission takes the policy's first (engine/queue) that may run now
                    └─────────→ preemption takes the last that runs, and puts it in its place in line
    """

    def __init__(
        self, pages: PageGroups, *, max_running: int, token_budget: int, max_drafts: int,
        eos_ids: Collection[int],
        service: SchedulingPolicy = UNLIMITED, observer: CacheObserver | None = None,
        kv_connector: KVConnector | None = None,
        max_deferred_tokens: int = 0, drafter: str = MTP, apart: bool = False,
    ) -> None:  # fmt: skip
        """`apart`: prompts are not computed together with requests that decode."""
        if token_budget < max_drafts + 1:
            raise ValueError(f"a budget of {token_budget} tokens never holds a token and {max_drafts} drafts")
        self.pages = pages
        self.max_running, self._token_budget, self._max_drafts = max_running, token_budget, max_drafts
        self._sources = Source.names(drafter)
        # rows of a request that wait for a draft model to absorb them
        self.max_deferred_tokens = max_deferred_tokens
        self._separate_prompts = apart
        self._eos_ids = frozenset(eos_ids)
        self._decode_order: dict[str, int] = {}  # decoding requests → their place in the next step's budget
        self.prefixes, self.kv_connector = Prefixes(pages, observer, kv_connector), kv_connector
        self.live: dict[str, RequestState] = {}
        self.running: list[RequestState] = []
        self._waiting_queue = WaitingQueue(service.longest_prefix)
        self.admission = Admission(pages, self.prefixes, self._waiting_queue, service, max_running)
        self._arrivals = 0
        self._lacking: dict[str, list[int]] | None = None  # as `must_wait` has found, until anything changes
        self.preemptions = 0

    @property
    def num_free_slots(self) -> int:
        return len(self.admission.free_req_indices)

    @property
    def moving(self) -> bool:
        """Pages are on their way between memories."""
        return self.kv_connector is not None and self.kv_connector.pending

    @property
    def waiting(self) -> list[RequestState]:
        return self._waiting_queue.reqs

    def add(self, req: RequestState) -> None:
        """The caller has checked that without other requests there are pages for `max_num_tokens` tokens and
        the lookahead."""
        assert req.id not in self.live
        self.live[req.id] = req
        req.queue.key = (req.sampling.priority, self._arrivals)
        self._arrivals += 1
        self.prefixes.add(req)
        self._waiting_queue.add(req)

    def abort(self, request_id: str) -> RequestState | None:
        """End a live request, also between plan and commit: the result of its span is then ignored. None: no
        such request."""
        req = self.live.get(request_id)
        if req is not None:
            self._end(req, Finish.ABORT)
        return req

    # ------------------------------------------------------------------------------------------------ plan

    def must_wait(self) -> bool:
        """The steps in flight must be booked before another is planned: a request requires it, or another
        would be preempted."""
        ahead = [req for req in self.running if req.num_scheduled_tokens != req.num_computed_tokens]
        if not ahead:
            return False
        if any(req.synchronous_from is not None and req.is_synchronous for req in ahead):
            return True
        self._lacking = self._missing_blocks()  # for the plan that follows
        missing = self._lacking.values()
        return bool(missing) and not self.pages.are_free(map(sum, zip(*missing, strict=True)))

    def plan(self, draft_depth: int) -> ScheduledStep:
        """The next step, which drafts `draft_depth` deep for the one after it: decoding requests, then prompt
        chunks, then new requests. Has spans while a request lives, unless what is in flight ends them all."""
        self.pages.settle()
        decoding = self._allocate_blocks()
        spans, token_budget = self._decoding(decoding)
        others = self.running if len(decoding) < len(self.running) else []
        prefilling = [req for req in others if not decodes(req) and not ends(req)]
        prompts, new_requests = self.admission.prompts(
            self.running, prefilling, token_budget, is_alone=len(self.live) == 1
        )
        if self.max_deferred_tokens:
            spans = deferred(
                spans,
                draft_depth,
                self.max_deferred_tokens,
                beside_prompts=bool(prompts) and not self._separate_prompts,
            )
        spans = self.prefixes.with_checkpoints(spans, prompts)
        busy = self.moving or any(req.in_flight for req in self.running)
        assert spans or not self.live or busy, "a plan without spans would repeat for ever"
        for req, span in spans:
            req.num_scheduled_tokens += span.num_tokens
            req.num_pending_outputs += span.samples
            req.num_draft_tokens = (
                req.draft.pending_draft_limit if span.drafts_next and draft_depth > 0 else 0
            )
        entries = [entry for req, _ in spans for entry in new_blocks(req, self.pages.dense)]
        transfers = [] if self.kv_connector is None else self.kv_connector.take_outgoing()
        return ScheduledStep(
            StepPlan([span for _, span in spans], draft_depth, new_requests, entries, transfers),
            [req for req, _ in spans],
        )

    def _decoding(self, ready: list[RequestState]) -> tuple[list[tuple[RequestState, SpanPlan]], int]:
        """Spans with one token and all its drafts, and what is left of the budget. Who finds no room is first
        in the next step.

        turns   | a b | c d e |   →   | c d | e a b |   →   | e a | b c d |      with room for two
        """
        if self._decode_order:
            ready = sorted(ready, key=lambda req: self._decode_order.get(req.id, len(self._decode_order)))
        token_budget = self._token_budget
        spans: list[tuple[RequestState, SpanPlan]] = []
        late: list[str] = []
        for req in ready:
            span = next_span(req, 1, useful_drafts(req))
            if span.num_rows > token_budget:
                late.append(req.id)
                continue
            spans.append((req, span))
            token_budget -= span.num_rows
        turns = late + [req.id for req, _ in spans] if late else []
        self._decode_order = {request_id: turn for turn, request_id in enumerate(turns)}
        return spans, token_budget

    # ----------------------------------------------------------------------------------------------- pages

    def _missing_blocks(self) -> dict[str, list[int]]:
        """Pages of each group that running requests lack for their next spans; those that lack none are not
        there. A prompt lacks none but those of windows that move on: admission took the others."""
        missing = {}
        for req in self.running:
            is_decoding = decodes(req)
            if not is_decoding and (ends(req) or not self.pages.windowed):
                continue
            tokens = len(req.tokens) + useful_drafts(req) if is_decoding else to_compute(req)
            lookahead, blocks = req.num_lookahead_tokens, req.cache.blocks
            if not self.pages.has(blocks, tokens + lookahead):
                missing[req.id] = self.pages.missing(blocks, req.num_scheduled_tokens, tokens, lookahead)
        return missing

    def _allocate_blocks(self) -> list[RequestState]:
        """Give every request the pages of its next span, in order → those that decode. Without windows prompt
        chunks need none: admission took theirs."""
        decoding = [req for req in self.running if decodes(req)]
        lacking = self._missing_blocks() if self._lacking is None else self._lacking
        self._lacking = None
        for req in list(self.running) if lacking or self.pages.windowed else ():
            if req.req_idx is not None and not ends(req):
                if self.pages.windowed:
                    # What its windows have left, and what others may find of that: pages get their keys when
                    # they are booked. The steps in flight still read them; but only later ones write to them,
                    # and the device works in their order.
                    self.pages.advance(
                        req.cache.blocks,
                        req.num_scheduled_tokens if req.cache.hash_root is None else req.num_computed_tokens,
                    )
                if req.id in lacking:
                    self._allocate(req, lacking[req.id])
        return [req for req in decoding if req.req_idx is not None]

    def _allocate(self, req: RequestState, missing: list[int]) -> None:
        while not self.pages.are_free(missing):
            # Ends: the pool holds the first request alone, and a request that turns out to be the last gives
            # way itself.
            if self._preempt_last() is req:
                return
        self.pages.extend(req.cache.blocks, missing)
        req.cache.has_new_blocks = True

    def _preempt_last(self, trusted: bool = True) -> RequestState:
        req = self.running.pop()
        assert not req.in_flight, "what it is getting would be lost"
        self._unseat(req, trusted)
        req.num_computed_tokens = req.cache.num_stored_tokens = req.num_scheduled_tokens = (
            req.cache.num_state_tokens
        ) = 0
        req.num_draft_tokens = req.draft.num_deferred_tokens = 0
        self._waiting_queue.add(req)
        self.preemptions += 1
        return req

    def _unseat(self, req: RequestState, trusted: bool = True) -> None:
        self.prefixes.leave(req, trusted)
        self.pages.release(req.cache.blocks)
        req.cache.blocks = []
        self.admission.release(req)

    def retract(self, trusted: bool = True) -> None:
        """Requests that run wait, and are computed again. No step is in flight. `trusted`: as in `leave`."""
        while self.running:
            self._preempt_last(trusted)

    def renew(self, fingerprint: bytes | None) -> None:
        """All KV is void. Requests that run are computed again."""
        self.retract(trusted=False)
        self.prefixes.renew(self.live.values(), fingerprint, self.admission.adapters.fingerprint)

    # ---------------------------------------------------------------------------------------------- commit

    def commit(self, step: ScheduledStep, result: StepResult) -> list[RequestEvent]:
        """Commits a step. Requests that got neither tokens nor an end have no event. Raises ValueError, and
        changes nothing, for a result that does not fit the plan."""
        self._lacking = None
        if self.kv_connector is not None:
            self.kv_connector.commit(result.transferred)
        spans = step.plan.spans
        if len(result.spans) != len(spans):
            raise ValueError(f"{len(spans)} spans but {len(result.spans)} results")
        # What came of a request that has ended in the meantime is dropped unread.
        entries = [
            entry for entry in zip(step.reqs, spans, result.spans, strict=True) if entry[0].finish is None
        ]
        for req, span, booked in entries:
            self._check(req, span, booked)
        events = (self._commit(*entry) for entry in entries)
        return [
            (req, event)
            for req, event in events
            if event.tokens or event.prompt_logprobs or event.routed_experts or event.finish is not None
        ]

    def fail(self, reqs: Seq[RequestState], error: str) -> list[RequestEvent]:
        """End those of `reqs` that still live with an error."""
        living = [req for req in reqs if req.finish is None]
        for req in living:
            self._end(req, Finish.ERROR, error)
        return [event_of(req, []) for req in living]

    def _check(self, req: RequestState, span: SpanPlan, result: SpanResult) -> None:
        tokens = result.num_accepted_tokens + 1 if span.samples else 0
        fits = (
            0 <= result.num_accepted_tokens <= span.num_draft_tokens
            and len(result.tokens) == tokens
            and 0 <= result.num_draft_tokens <= self._max_drafts
        )
        if not fits and result.error is None:
            raise ValueError(f"the result of request {req.id} does not fit its span: {result}")

    def _commit(self, req: RequestState, span: SpanPlan, result: SpanResult) -> RequestEvent:
        proposal = Proposal(
            result.proposed, result.parents, [self._sources[who] for who in result.sources], result.path
        )
        if result.error is not None:
            self._end(req, Finish.ERROR, result.error)
            return event_of(req, [], proposal=proposal)
        tokens, finish = until_stop(req, result.tokens, self._eos_ids)
        settled = req.num_computed_tokens + span.num_tokens
        if span.num_deferred_tokens:
            req.cache.num_stored_tokens = req.num_computed_tokens
        req.num_computed_tokens += span.num_tokens + result.num_accepted_tokens
        if not span.defers_kv:
            req.cache.num_stored_tokens = req.num_computed_tokens
        req.num_scheduled_tokens += result.num_accepted_tokens
        req.num_pending_outputs -= span.samples
        if not req.in_flight:
            req.num_draft_tokens = result.num_draft_tokens
        req.tokens += tokens
        scores = None
        if result.prompt_logprobs is not None:
            scores = result.prompt_logprobs[max(req.num_scored_prompt_tokens - span.start, 0) :]
            end = min(span.start + span.num_tokens, req.num_prompt_tokens - 1)
            req.num_scored_prompt_tokens = max(req.num_scored_prompt_tokens, end)
        self.prefixes.commit(req, settled, span)
        if finish is not None:
            self._end(req, finish)
        assert finish is not None or req.num_computed_tokens < len(req.tokens) < req.max_num_tokens
        logprobs = None if result.logprobs is None else result.logprobs[: len(tokens)]
        return event_of(
            req, tokens, min(result.num_accepted_tokens, len(tokens)), proposal, logprobs, scores or None,
            result.routed_experts,
        )  # fmt: skip

    def _end(self, req: RequestState, finish: Finish, error: str | None = None) -> None:
        req.num_draft_tokens, req.finish, req.error, self._lacking = 0, finish, error, None
        if req.req_idx is None:
            self._waiting_queue.remove(req)
        else:
            self.running = [other for other in self.running if other is not req]
        self._unseat(req, trusted=finish is not Finish.ERROR)
        del self.live[req.id]
