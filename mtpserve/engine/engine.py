"""The engine: it takes requests, turns the crank (plan, run, commit) and reports what each step yielded. One
thread drives it.

It decides nothing about rows and pages (scheduler.py), computes nothing (the runner) and sees no text.

Faults stay with the requests that they hit, and free what these held:

    non-finite logits in a request's rows    that request ends with an error
    the runner cannot seat a request         that request ends with an error, the step goes on without it
    the runner raises in a step              the request at fault is unknown: all requests of that step end
                                             with an error

Only a device that has failed (faults.py) ends the engine: whatever is open ends with EngineDead, and the
process with an exit code.

Up to `overlap` steps are in flight while the next one is planned and launched, so that the device never waits
for the host:

    launch 0 | launch 1 | book 0, launch 2 | book 1, launch 3 | …
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import replace
from random import Random, SystemRandom
from time import perf_counter

from mtpserve.cache.groups import PageGroups
from mtpserve.cache.keys import root
from mtpserve.config import SchedulerConfig
from mtpserve.config.drafters import MTP
from mtpserve.core.errors import ConfigError, QueueFull
from mtpserve.core.protocols.observers import CacheObserver
from mtpserve.core.protocols.runner import Launched, ModelRunner
from mtpserve.core.request import ModelCard, Request, TokenEvent
from mtpserve.core.sampling import GrammarSpec
from mtpserve.core.spec_sizes import SpecShape
from mtpserve.core.state.request_state import RequestState
from mtpserve.core.stats.engine_stats import EngineStats
from mtpserve.core.stats.reports import SpecChange, SpecReport
from mtpserve.engine.depth.clock import StepClock
from mtpserve.engine.depth.policy import DepthPolicy, report
from mtpserve.engine.depth.step_shapes import passes_of
from mtpserve.engine.depth.watchdog import Watchdog
from mtpserve.engine.faults import require_device
from mtpserve.engine.grammars import NoGrammars, PreparedGrammars
from mtpserve.engine.integrity import check_integrity
from mtpserve.engine.pages.kv_connector import KVConnector
from mtpserve.engine.parallel.ticks import Ticks
from mtpserve.engine.process.controls import Controls
from mtpserve.engine.process.core_share import CoreShare
from mtpserve.engine.queue import SchedulingPolicy
from mtpserve.engine.scheduler import Scheduler
from mtpserve.engine.stats import count, count_step
from mtpserve.engine.steps import RequestEvent, ScheduledStep
from mtpserve.engine.validation import validate
from mtpserve.spec.counts import new_stats

log = logging.getLogger(__name__)


class Engine:
    """`context_length` is what a request may really have: the model's, or less where the KV pool does not
    hold that much.

    `draft_depth`: drafts to propose in a step; it stays, since a seed's text may depend on it. With `overlap`
    0 events come with the call that launched the step. While more requests run than `plain_above` no drafts
    are proposed: then a seed's text may depend on the load. `fingerprint`: of all that KV depends on besides
    tokens; None: no prefix cache. `long_rows`: of a long prompt in a step. `drafter`: the
    draft model's name. `captured`: depths of captured steps; `apart`: from their prompts.
    """

    def __init__(
        self, runner: ModelRunner, config: SchedulerConfig, *, pages: PageGroups, max_running: int,
        context_length: int, vocab: int, eos_ids: tuple[int, ...], draft_depth: int, name: str = "",
        kernels: str = "", grammars: PreparedGrammars | None = None, lossy: bool = False, overlap: int = 0,
        plain_above: int | None = None, adaptive: bool = False, fingerprint: bytes | None = b"",
        kv_connector: KVConnector | None = None, observer: CacheObserver | None = None,
        long_rows: int | None = None, watch: Watchdog | None = None, drafter: str = MTP,
        captured: Seq[int] = (), apart: bool = False,
    ) -> None:  # fmt: skip
        sizes = runner.sizes
        if not 0 <= draft_depth <= sizes.depth:
            raise ConfigError(f"--speculative-num-steps must be in [0, {sizes.depth}], got {draft_depth}")
        budget, reserve = config.step_tokens, sizes.num_lookahead_tokens(overlap)
        room = pages.capacity(reserve)
        sizes.require(budget, room, reserve)
        self.context_length = min(context_length, room)
        queued = config.max_queued_requests
        capacity = None if queued is None else max_running + queued
        self.card = ModelCard(
            name, vocab, self.context_length, eos_ids, draft_depth, lossy, page_size=pages.page_size,
            capacity=capacity, kernels=kernels,
        )  # fmt: skip
        self.policy = DepthPolicy(sizes, draft_depth, captured, apart) if adaptive and draft_depth else None
        self._grammars, self.runner, self._draft_depth = grammars or NoGrammars(), runner, draft_depth
        self._max_queued, self._policy = queued, config.scheduling_policy
        self._seeded = config.random_seed is not None
        self._seeds = SystemRandom() if config.random_seed is None else Random(config.random_seed)
        self._pages, self.token_budget, self.max_running = pages, budget, max_running
        self._overlap, self._plain_above, self.fingerprint = overlap, plain_above, fingerprint
        self._kv_connector, self._observer = kv_connector, observer
        self.watchdog, self._clock = watch or Watchdog(), StepClock()
        # Each with the time at which it was planned.
        self._in_flight: deque[tuple[ScheduledStep, Launched, float]] = deque()
        self._scheduler = Scheduler(
            pages, max_running=max_running, token_budget=budget, max_drafts=sizes.nodes, eos_ids=eos_ids,
            service=SchedulingPolicy.of(config, long_rows), observer=observer, kv_connector=kv_connector,
            max_deferred_tokens=sizes.max_deferred_tokens,
            drafter=drafter, apart=apart,
        )  # fmt: skip
        # others where experts are shared, and on a CPU
        self._drafter, self.ticks, self.cores = drafter, Ticks(), CoreShare()
        self.controls, self.weight_version = Controls(), "default"
        self.adapters = self._scheduler.admission.adapters
        self._stats = new_stats(sizes.depth, pages.total, drafter)

    @property
    def has_work(self) -> bool:
        work = self._scheduler.live or self._in_flight or self._scheduler.moving
        return bool(work) and not (self._stats.paused or self._stats.sleeping)

    @property
    def changes_idle(self) -> bool:
        """Something may change while there is no work: what is kept for other nodes is free once they have
        it."""
        return self._kv_connector is not None and self._kv_connector.is_sending

    @property
    def stats(self) -> EngineStats:
        """The engine's own object, its gauges brought up to date."""
        self._stats.running = len(self._scheduler.running)
        self._stats.waiting = len(self._scheduler.waiting)
        self._stats.pages_used, self._stats.pages_cached = self._pages.num_used_pages, self._pages.cached
        if self._kv_connector is not None:
            self._kv_connector.report(self._stats, self._scheduler.waiting)
        self._stats.weight_version = self.weight_version
        self._stats.preemptions_total = self._scheduler.preemptions
        self._stats.depths = None if self.policy is None else self.policy.state
        self._stats.draft_health = self.watchdog.health
        return self._stats

    def add(self, request: Request, compiled: bool = False) -> None:
        """Queue a request. Raises InvalidRequest for its parameters, QueueFull where too many wait already.

        `compiled`: `compile` was called for the request's grammar; otherwise that happens here.
        """
        if not self.has_work:
            self._clock.idle()
        is_self_check = self.watchdog.is_self_check(request.id)  # it waits for nobody, and shares no pages
        if not is_self_check:
            validate(request, self.card, self._scheduler.live, self._policy)
        scheduler, sampling, prompt_len = self._scheduler, request.sampling, len(request.prompt)
        # A request that only waits for the next step to be seated is not queued: with `running` seats,
        # running + limit are taken.
        if (
            not (is_self_check or request.is_migrated)
            and self._max_queued is not None
            and len(scheduler.waiting) >= self._max_queued + scheduler.num_free_slots
        ):
            raise QueueFull(
                f"{len(scheduler.waiting)} requests wait already and --max-queued-requests is "
                f"{self._max_queued}"
            )
        if not compiled:
            self.compile(sampling.grammar)
        self.adapters.require(request.lora)
        if (seed := request.seed if sampling.seed is None else sampling.seed) is None:
            seed = self._seeds.getrandbits(63)
        prediction = request.prediction if request.max_depth != 0 else []
        req = RequestState(
            replace(request, seed=seed, prediction=prediction),
            request.prompt + request.prior_output_ids,
            self.context_length if sampling.max_tokens is None else prompt_len + sampling.max_tokens,
            request.num_scored_prompt_tokens,
            synchronous_from=0 if self.runner.processors else sampling.first_constrained_token,
        )
        if self.fingerprint is not None and not is_self_check:
            adapter = self.adapters.fingerprint(request.lora)
            req.cache.hash_root = root(self.fingerprint + adapter, request.salt)
        req.draft.coupled = self.policy is not None and (sampling.seed is not None or self._seeded)
        req.queue.arrival_time = perf_counter()
        self._limit_drafts(req)
        scheduler.add(req)

    def _limit_drafts(self, req: RequestState) -> None:
        sizes, plain, max_depth = self.runner.sizes, req.request.plain, req.request.max_depth
        draft_depth = self._draft_depth if max_depth is None else min(self._draft_depth, max_depth)
        req.num_write_ahead = sizes.num_write_ahead(plain)
        req.num_lookahead_tokens = sizes.num_lookahead_tokens(self._overlap, plain)
        req.draft.has_mixed_sources = not plain or sizes.always_free
        req.draft.max_pending_draft_tokens = sizes.max_draft_tokens(draft_depth, plain)

    def compile(self, spec: GrammarSpec | None) -> None:
        """Keeps the result for the runner. May take seconds, and may run in another thread beside `step`.
        Raises InvalidRequest, EngineBusy."""
        if spec is not None:
            self._grammars.prepare(spec)

    def abort(self, request_id: str) -> None:
        """End a request without an event; its pages and seat are free at once. Unknown ids are ignored."""
        self._scheduler.abort(request_id)

    def retract(self) -> None:
        """Requests that run give their pages back, and wait. No step is in flight."""
        self._scheduler.retract()

    def reset_prefix_cache(self) -> None:
        """Nothing that was computed before is found by later requests. Those that run go on."""
        self._scheduler.prefixes.forget(self._scheduler.running)
        self._publish()

    def set_spec(self, change: SpecChange) -> SpecReport:
        """How deep requests draft from now on, where that is not fixed, and what is known of it."""
        if self.policy is not None and change != SpecChange():
            self.policy.set(change)
            for req in self._scheduler.live.values() if change.reset else ():
                req.draft.acceptance_factor = 1.0
        return report(self.policy, self._draft_depth, self.stats)

    def renew(self, fingerprint: bytes | None) -> None:
        self.fingerprint = fingerprint
        self._scheduler.renew(fingerprint)
        self.set_spec(SpecChange(reset=True))
        self.watchdog.renew()
        self._publish()

    def draft_with(self, shape: SpecShape) -> None:
        """From now on all requests are drafted for in this shape. Only while nothing runs; raises ConfigError
        for more than was built."""
        assert not self.has_work
        self.runner.reshape(shape)
        self._scheduler.max_deferred_tokens = self.runner.sizes.max_deferred_tokens
        self._draft_depth, self.policy, self.watchdog = shape.steps, None, Watchdog()
        self._stats = new_stats(self.runner.sizes.depth, self._pages.total, self._drafter)
        self.reset_prefix_cache()  # plain decoding keeps nothing of a draft model

    def close(self) -> None:
        """Nothing is called any more."""
        self.runner.close()
        if self._observer is not None:
            self._observer.close()
        if self._kv_connector is not None:
            self._kv_connector.on_close()

    def step(self) -> list[TokenEvent]:
        """Launch a step for all that fits, and return what the steps that were booked meanwhile yielded.
        Idle: nothing happens."""
        events = self._step()
        self._publish()
        return events

    def settle(self) -> list[TokenEvent]:
        """Commits all steps in flight."""
        return self._commit(leave=0)

    def _publish(self) -> None:
        if self._observer is not None:
            self._observer.publish()

    def _step(self) -> list[TokenEvent]:
        if not self.has_work:
            return []
        events = self._commit(leave=0) if self._in_flight and self._scheduler.must_wait() else []
        began = perf_counter()
        self.watchdog.before_step(self)
        step = self._scheduler.plan(self.watchdog.limit_drafts(self._scheduler.running, self._next_depth()))
        for new_request in step.plan.new_requests:
            req = self._scheduler.live[new_request.id]
            req.queue.start_time = perf_counter() if req.queue.start_time is None else req.queue.start_time
        going = bool(step.reqs) or self._scheduler.moving or bool(step.plan.transfers)
        if going:
            events += self._launch(step, began)
        # Nothing was launched: nothing but what is in flight can give more to do.
        return events + self._commit(leave=self._overlap if going else max(len(self._in_flight) - 1, 0))

    def forget_trials(self) -> None:
        """Counts start anew, and routers forget what they know of a predecessor."""
        if self._observer is not None:
            self._observer.cleared()
            self._publish()
        self._stats = new_stats(self.runner.sizes.depth, self._pages.total, self._drafter)

    def check_integrity(self) -> None:
        """Raises RuntimeError unless pages, rows and queues agree."""
        check_integrity(self._scheduler)

    def check_alive(self) -> None:
        """Raises EngineDead where a process that computes a part of the model has ended."""
        self.runner.check()

    def _observed(self, events: Seq[RequestEvent], step: ScheduledStep | None = None) -> list[TokenEvent]:
        """Counts one step's events, before another step is booked, so that no request seems to end earlier.
        `step`: None if it was not computed."""
        count_step(self._stats, step, events)
        verified = any(event.proposal.tokens for _, event in events)
        events = self.watchdog.client_events(events, verified)
        for req, event in events:
            count(self._stats, req, event)
        if verified and self.policy is not None:
            self.policy.learn(events)
        return [event for _, event in events]

    def _next_depth(self) -> int:
        crowded = self.watchdog.suspended or (
            self._plain_above is not None and len(self._scheduler.running) > self._plain_above
        )
        if self.policy is not None and not crowded:
            return self.policy.choose(self._scheduler.running)
        return 0 if crowded else self._draft_depth

    def _launch(self, step: ScheduledStep, began: float) -> list[TokenEvent]:
        self._stats.steps_total += bool(step.reqs)
        try:
            self._in_flight.append((step, self.runner.launch(step.plan), began))
        except Exception as error:
            return self._fail(step.reqs, error)
        return []

    def _commit(self, leave: int) -> list[TokenEvent]:
        """The oldest steps, until no more than `leave` are in flight."""
        events: list[TokenEvent] = []
        while len(self._in_flight) > leave:
            step, launched, began = self._in_flight.popleft()
            try:
                result = launched.result()
                if (timed := self._clock.booked(step, began, launched.ended)) is not None:
                    self._record_time(*timed)
                events += self._observed(self._scheduler.commit(step, result), step)
            except Exception as error:
                events += self._fail(step.reqs, error)
        return events

    def _record_time(self, step: ScheduledStep, seconds: float) -> None:
        if self._draft_depth == 0 or not step.reqs:
            return
        passes = passes_of(step.plan)
        self._stats.steps_per_depth[passes] += passes > 0 or any(span.drafts_next for span in step.plan.spans)
        if self.policy is not None:
            self.policy.stepped(step, passes, seconds)

    def _fail(self, reqs: list[RequestState], error: Exception) -> list[TokenEvent]:
        require_device(error)
        # The traceback is for the log; a client learns the kind of error and no more.
        log.error("a step failed, requests in it: %d", len(reqs), exc_info=error)
        message = f"the engine failed in the step that computed this request: {type(error).__name__}"
        return self._observed(self._scheduler.fail(reqs, message))
