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
from collections.abc import Iterable, Sequence as Seq
from dataclasses import replace
from random import Random, SystemRandom
from time import perf_counter

from mtpserve.cache.groups import PageGroups
from mtpserve.cache.keys import root
from mtpserve.config import SchedulerConfig
from mtpserve.config.drafters import MTP
from mtpserve.core.draft_sizes import DraftShape
from mtpserve.core.errors import ConfigError, EngineDead, InvalidRequest, LoadError, QueueFull
from mtpserve.core.protocols.observers import CacheObserver
from mtpserve.core.protocols.runner import Launched, ModelRunner
from mtpserve.core.request import ModelCard, Request, SpecChange, SpecReport, TokenEvent
from mtpserve.core.sampling import GrammarSpec, SamplingParams
from mtpserve.core.state.request_state import RequestState
from mtpserve.core.stats.engine_stats import EngineStats
from mtpserve.engine.depth.clock import StepClock
from mtpserve.engine.depth.first_times import ladder, measure
from mtpserve.engine.depth.policy import DepthPolicy, report
from mtpserve.engine.depth.step_shapes import passes_of
from mtpserve.engine.depth.watchdog import Watchdog
from mtpserve.engine.faults import is_fatal
from mtpserve.engine.grammars import PreparedGrammars
from mtpserve.engine.lengths import require_fit, require_room
from mtpserve.engine.pages.tiers import Tiers
from mtpserve.engine.parallel.ticks import Ticks
from mtpserve.engine.queue import SchedulingPolicy
from mtpserve.engine.scheduler import Scheduler
from mtpserve.engine.stats import count, count_step, event_of
from mtpserve.engine.steps import RequestOutput, ScheduledStep
from mtpserve.spec.counts import new_stats

log = logging.getLogger(__name__)


class Engine:
    """`context_length` is what a request may really have: the model's, or less where the KV pool does not
    hold that much.

    `draft_depth` is the number of drafts to propose in each step; it stays what it is, since a seed's text
    may depend on it. What comes of a step does not depend on `overlap`; with 0 its events come with the call
    that launched it. While more requests run than `plain_above` no drafts are proposed: then a seed's text
    may depend on the load, though its law does not. `fingerprint`: of all that KV depends on besides tokens;
    None: no prefix cache. `long_rows`: of a long prompt in one step, beside other requests. `drafter`: the
    draft model's name in traces and metrics. `captured`: depths of captured steps; `apart`: beside which
    prompts have passes of their own.
    """

    def __init__(
        self,
        runner: ModelRunner,
        config: SchedulerConfig,
        *,
        pages: PageGroups,
        max_running: int,
        context_length: int,
        vocab: int,
        eos_ids: tuple[int, ...],
        draft_depth: int,
        name: str = "",
        kernels: str = "",
        grammars: PreparedGrammars | None = None,
        lossy: bool = False,
        overlap: int = 0,
        plain_above: int | None = None,
        adaptive: bool = False,
        fingerprint: bytes | None = b"",
        tiers: Tiers | None = None,
        observer: CacheObserver | None = None,
        long_rows: int | None = None,
        watch: Watchdog | None = None,
        drafter: str = MTP,
        captured: Seq[int] = (),
        apart: bool = False,
    ) -> None:
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
            name,
            vocab,
            self.context_length,
            eos_ids,
            draft_depth,
            lossy,
            page_size=pages.page_size,
            capacity=capacity,
            kernels=kernels,
        )
        self._grammars, self._runner, self._draft_depth = grammars, runner, draft_depth
        self.policy = (
            DepthPolicy(sizes, draft_depth, captured, apart) if adaptive and draft_depth > 0 else None
        )
        self._seeded = config.random_seed is not None
        self._clock = StepClock()
        self._max_queued = config.max_queued_requests
        self._policy = config.scheduling_policy
        self._seeds = SystemRandom() if config.random_seed is None else Random(config.random_seed)
        self._pages, self._budget, self._max_running = pages, budget, max_running
        self._overlap, self._plain_above, self._fingerprint, self._tiers = (
            overlap,
            plain_above,
            fingerprint,
            tiers,
        )
        self._observer, self._watchdog = observer, watch or Watchdog()
        # with the time at which it was planned
        self._in_flight: deque[tuple[ScheduledStep, Launched, float]] = deque()
        self._scheduler = Scheduler(
            pages, max_running=max_running, token_budget=budget, max_drafts=sizes.nodes, eos_ids=eos_ids,
            service=SchedulingPolicy.of(config, long_rows), observer=observer, tiers=tiers,
            max_deferred_tokens=sizes.max_deferred_tokens,
            drafter=drafter, apart=apart,
        )  # fmt: skip
        # others are set where it shares experts with other engines
        self._drafter, self.ticks = drafter, Ticks()
        self._stats = new_stats(sizes.depth, pages.total, drafter)

    @property
    def runner(self) -> ModelRunner:
        return self._runner

    @property
    def has_work(self) -> bool:
        return bool(self._scheduler.live or self._in_flight or self._scheduler.moving)

    @property
    def changes_idle(self) -> bool:
        """Something may change while there is no work: what is kept for other nodes is free once they have
        it."""
        return self._tiers is not None and self._tiers.sender is not None and self._tiers.sender.open

    @property
    def stats(self) -> EngineStats:
        """The engine's own object, its gauges brought up to date."""
        self._stats.running = len(self._scheduler.running)
        self._stats.waiting = len(self._scheduler.waiting)
        self._stats.pages_used, self._stats.pages_cached = self._pages.used, self._pages.cached
        if self._tiers is not None:
            self._tiers.report(self._stats, self._scheduler.waiting)
        self._stats.preemptions_total = self._scheduler.preemptions
        self._stats.depths = None if self.policy is None else self.policy.state
        self._stats.draft_health = self._watchdog.health
        return self._stats

    def add(self, request: Request, compiled: bool = False) -> None:
        """Queue a request. Raises InvalidRequest for its parameters, QueueFull where too many wait already.

        `compiled`: `compile` was called for the request's grammar; otherwise that happens here.
        """
        if not self.has_work:
            self._clock.idle()
        is_self_check = self._watchdog.is_self_check(request.id)  # it waits for nobody, and shares no pages
        if not is_self_check:
            self._validate(request)
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
        if (seed := request.seed if sampling.seed is None else sampling.seed) is None:
            seed = self._seeds.getrandbits(63)
        prediction = request.prediction if request.max_depth != 0 else []
        req = RequestState(
            replace(request, seed=seed, prediction=prediction),
            request.prompt + request.prior_output_ids,
            self.context_length if sampling.max_tokens is None else prompt_len + sampling.max_tokens,
            request.num_scored_prompt_tokens,
            is_synchronous=self._runner.processors or sampling.grammar is not None,
        )
        if self._fingerprint is not None and not is_self_check:
            req.cache.hash_root = root(self._fingerprint, request.salt)
        req.draft.coupled = self.policy is not None and (sampling.seed is not None or self._seeded)
        req.queue.arrival_time = perf_counter()
        self._limit_drafts(req)
        scheduler.add(req)

    def _limit_drafts(self, req: RequestState) -> None:
        sizes, plain, max_depth = self._runner.sizes, req.request.plain, req.request.max_depth
        draft_depth = self._draft_depth if max_depth is None else min(self._draft_depth, max_depth)
        req.num_write_ahead = sizes.num_write_ahead(plain)
        req.num_lookahead_tokens = sizes.num_lookahead_tokens(self._overlap, plain)
        req.draft.has_mixed_sources = not plain or sizes.always_free
        req.draft.max_pending_draft_tokens = sizes.max_draft_tokens(draft_depth, plain)

    def compile(self, spec: GrammarSpec | None) -> None:
        """Keeps the result for the runner. May take seconds, and may run in another thread beside `step`.
        Raises InvalidRequest, EngineBusy."""
        if spec is None:
            return
        if self._grammars is None:
            raise InvalidRequest(
                f"{spec.kind} needs the model's tokenizer, which this engine was started without", spec.kind
            )
        self._grammars.prepare(spec)

    def abort(self, request_id: str) -> None:
        """End a request, at any time and without an event; its pages and seat are free at once. Unknown ids
        are ignored."""
        self._scheduler.abort(request_id)

    def reset_prefix_cache(self) -> None:
        """Nothing that was computed before is found by later requests. Those that run go on."""
        self._scheduler.forget()
        self._publish()

    def set_spec(self, change: SpecChange) -> SpecReport:
        """How deep requests draft from now on, where that is not fixed, and what is known of it."""
        if self.policy is not None and change != SpecChange():
            self.policy.set(change)
            for req in self._scheduler.live.values() if change.reset else ():
                req.draft.acceptance_factor = 1.0
        return report(self.policy, self._draft_depth, self.stats)

    def draft_with(self, shape: DraftShape) -> None:
        """From now on all requests are drafted for in this shape. Only while nothing runs; raises ConfigError
        for more than was built."""
        assert not self.has_work
        self._runner.reshape(shape)
        self._scheduler.max_deferred_tokens = self._runner.sizes.max_deferred_tokens
        # it is not limited any more
        self._draft_depth, self.policy, self._watchdog = shape.steps, None, Watchdog()
        self._stats = new_stats(self._runner.sizes.depth, self._pages.total, self._drafter)
        self.reset_prefix_cache()  # plain decoding keeps nothing of a draft model

    def close(self) -> None:
        """Nothing is called any more."""
        self._runner.close()
        if self._observer is not None:
            self._observer.close()
        if self._tiers is not None:
            self._tiers.on_close()

    def step(self) -> list[TokenEvent]:
        """Launch a step for all that fits, and return what the steps that were booked meanwhile yielded.
        Idle: nothing happens."""
        events = self._step()
        self._publish()
        return events

    def _publish(self) -> None:
        if self._observer is not None:
            self._observer.publish()

    def _step(self) -> list[TokenEvent]:
        if not self.has_work:
            return []
        events = self._commit(leave=0) if self._in_flight and self._scheduler.must_wait() else []
        began = perf_counter()
        self._watchdog.before_step(self)
        planned = self._scheduler.plan(
            self._watchdog.limit_drafts(self._scheduler.running, self._next_depth())
        )
        for new_request in planned.plan.new_requests:
            req = self._scheduler.live[new_request.id]
            req.queue.start_time = perf_counter() if req.queue.start_time is None else req.queue.start_time
        going = bool(planned.reqs) or self._scheduler.moving or bool(planned.plan.transfers)
        if going:
            events += self._launch(planned, began)
        # Nothing was launched: nothing but what is in flight can give more to do.
        return events + self._commit(leave=self._overlap if going else max(len(self._in_flight) - 1, 0))

    def try_out(self, compiles: bool = False) -> None:
        """Compute a few tokens, of which nothing remains. Raises LoadError where that fails: weights that are
        finite, each by itself, may be damaged all the same, and kernels may not run here.

        `compiles`: kernels are compiled when they first meet a size. Then prompt chunks of all sizes and
        batches of all sizes are computed, in powers of two, so that the first real ones wait for no
        compiler."""
        # No page of a trial is kept, in no tier, and none is found: each prompt is computed whole.
        fingerprint, self._fingerprint = self._fingerprint, None
        self._try([1])
        if compiles:
            began = perf_counter()
            longest = min(self._budget, self.context_length - 1)
            for length in ladder(longest):
                self._try([length], launched=True)
            for requests in ladder(self._max_running):
                self._try([1] * requests, launched=True)
            log.info(
                "warmed up in %.1f s: prompts of up to %d tokens, %d requests",
                perf_counter() - began,
                longest,
                self._max_running,
            )
        if self.policy is not None:
            measure(self, self.policy, self._max_running)
        self._watchdog.start(self)
        self._fingerprint = fingerprint
        if self._observer is not None:
            self._observer.cleared()  # whatever routers know of a predecessor
            self._publish()
        self._stats = new_stats(self._runner.sizes.depth, self._pages.total, self._drafter)

    def _try(self, lengths: Seq[int], launched: bool = False) -> None:
        """Prompts of these lengths, at once. `launched`: also where decoding is captured, which a rule for
        the output prevents."""
        for number, length in enumerate(lengths):
            tokens = min(4, self.context_length - length)
            # A seed of its own: none is drawn, so that --random-seed gives the first request what it gives
            # without a trial.
            sampling = SamplingParams(
                max_tokens=tokens,
                min_tokens=tokens * launched,
                temperature=0,
                ignore_eos=not launched,
                seed=0,
            )
            self.add(Request(f"try out {number}", [0] * length, sampling))
        while self.has_work:
            for event in self.step():
                if event.error is not None:
                    raise LoadError(
                        f"the model fails to produce a token, its weights may be damaged: {event.error}"
                    )

    def check_integrity(self) -> None:
        """Raise unless pages, seats and queues agree; while idle, unless all pages and seats are free."""
        self._scheduler.check_integrity()

    def check_alive(self) -> None:
        """Raises EngineDead where a process that computes a part of the model has ended."""
        self._runner.check()

    def _report(self, outcomes: Seq[RequestOutput], planned: ScheduledStep | None = None) -> list[TokenEvent]:
        """Of one step, before another is booked: what has ended must not seem to have ended earlier.
        `planned`: it, if it was computed."""
        count_step(self._stats, planned, outcomes)
        verified = any(outcome.proposal.tokens for outcome in outcomes)
        outcomes = self._watchdog.client_outputs(outcomes, verified)
        for outcome in outcomes:
            count(self._stats, outcome)
        if verified and self.policy is not None:
            self.policy.learn(outcomes)
        return [event_of(outcome, perf_counter()) for outcome in outcomes]

    def _next_depth(self) -> int:
        crowded = self._watchdog.suspended or (
            self._plain_above is not None and len(self._scheduler.running) > self._plain_above
        )
        if self.policy is not None and not crowded:
            return self.policy.choose(self._scheduler.running)
        return 0 if crowded else self._draft_depth

    def _launch(self, planned: ScheduledStep, began: float) -> list[TokenEvent]:
        self._stats.steps_total += bool(planned.reqs)
        try:
            self._in_flight.append((planned, self._runner.launch(planned.plan), began))
        except Exception as error:
            return self._failed(planned.reqs, error)
        return []

    def _commit(self, leave: int) -> list[TokenEvent]:
        """The oldest steps, until no more than `leave` are in flight."""
        events: list[TokenEvent] = []
        while len(self._in_flight) > leave:
            planned, launched, began = self._in_flight.popleft()
            try:
                result = launched.result()
                if (timed := self._clock.booked(planned, began, launched.ended)) is not None:
                    self._timed(*timed)
                events += self._report(self._scheduler.commit(planned, result), planned)
            except Exception as error:
                events += self._failed(planned.reqs, error)
        return events

    def _timed(self, planned: ScheduledStep, seconds: float) -> None:
        if self._draft_depth == 0 or not planned.reqs:
            return
        passes = passes_of(planned.plan)
        self._stats.steps_per_depth[passes] += passes > 0 or any(
            span.drafts_next for span in planned.plan.spans
        )
        if self.policy is not None:
            self.policy.stepped(planned, passes, seconds)

    def _failed(self, reqs: list[RequestState], error: Exception) -> list[TokenEvent]:
        _require_device(error)
        # The traceback is for the log; a client learns the kind of error and no more.
        log.error("a step with %d requests failed", len(reqs), exc_info=error)
        message = f"the engine failed in the step that computed this request: {type(error).__name__}"
        return self._report(self._scheduler.fail(reqs, message))

    def _validate(self, request: Request) -> None:
        prompt, context = len(request.prompt), self.context_length
        if request.id in self._scheduler.live:
            raise InvalidRequest(f"request id {request.id!r} is in use", "id")
        if not request.prompt:
            raise InvalidRequest("prompt must not be empty", "prompt")
        self._require_known(request.prompt, "prompt")
        self._require_known(request.prior_output_ids, "said")
        sampling = request.sampling
        self._require_known(sampling.stop_token_ids, "stop_token_ids")
        self._require_known(sampling.allowed_token_ids, "allowed_token_ids")
        self._require_known(sampling.logit_bias, "logit_bias")
        for word in request.bad_words:
            self._require_known(word, "bad_words")
        self._require_known(request.prediction, "prediction")
        if prompt >= context:
            raise InvalidRequest(
                f"prompt has {prompt} tokens, but prompt and output together are at most {context}", "prompt"
            )
        require_fit(prompt, request.sampling, context)
        require_room(request, context)
        sampling.check_policy(self._policy)

    def _require_known(self, ids: Iterable[int], param: str) -> None:
        for token in ids:
            if not 0 <= token < self.card.vocab:
                raise InvalidRequest(
                    f"{param} must be token ids in [0, {self.card.vocab - 1}], got {token}", param
                )


def _require_device(error: Exception) -> None:
    """Raises EngineDead where no other step can come to anything."""
    if isinstance(error, EngineDead):
        raise error
    if is_fatal(error):
        reason = str(error).partition("\n")[0]  # what follows is advice for CUDA's developers
        log.debug("the device has failed", exc_info=error)  # the receiver of EngineDead logs its message
        raise EngineDead(f"the device has failed: {reason}") from error
