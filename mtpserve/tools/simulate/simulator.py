"""The scheduler and its cache against a device that is not there, in simulated time: what hit rate and which
times to the first token a trace gives with a pool. The scheduler is the real one, and so are pages and keys;
tokens are known in advance and no model runs.

    conversations ─ arrivals ─→ scheduler.plan ─→ tools/simulate/simulated: what is committed ─→
    scheduler.commit ─→ the next turn arrives
                                      └─────────→ costs.StepCost: how long it takes

As in the engine, `overlap` steps are in flight while the next one is planned. Planning takes no time, and
clients none to send.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from math import ceil

from mtpserve.cache.groups import PageGroups
from mtpserve.cache.keys import Key, root
from mtpserve.config import EngineConfig
from mtpserve.config.options import check
from mtpserve.core.plan import StepPlan, StepResult
from mtpserve.core.request import Finish, Request, TokenEvent
from mtpserve.core.sampling import SamplingParams
from mtpserve.core.state.request_state import RequestState
from mtpserve.engine.depth.policy import DepthPolicy
from mtpserve.engine.depth.step_shapes import passes_of
from mtpserve.engine.pages.kv_connector import KVConnector
from mtpserve.engine.queue import SchedulingPolicy
from mtpserve.engine.scheduler import Scheduler
from mtpserve.engine.steps import ScheduledStep
from mtpserve.tools.simulate.costs import StepCost
from mtpserve.tools.simulate.simulated import SimulatedDevice
from mtpserve.tools.simulate.simulated_tiers import PageTimes, SimulatedDisk, SimulatedTransfers
from mtpserve.tools.simulate.traces import TraceConversation, TraceTurn

SAME = StepCost()  # the cost of every step
# as in runtime/memory.py, which imports torch: requests that run at once fill this part of the context
SHARE_OF_CONTEXT = 8


@dataclass(slots=True)
class Simulated:
    """What came of a trace. Times are in seconds of the simulated clock."""

    requests: int = 0
    finished: int = 0
    num_left: int = 0  # whose clients did not wait for the end
    # that no pool of this size, or no context of this length, ever holds; their conversations end there
    refused: int = 0
    prompt_tokens: int = 0  # prompt tokens of requests that got a first token
    cached_tokens: int = 0  # prompt tokens that the cache had
    findable_tokens: int = 0  # prompt tokens that an infinite pool would have had
    output_tokens: int = 0
    seats: int = 0  # requests that may run at once
    steps: int = 0
    rows: int = 0
    preemptions: int = 0
    pages_peak: int = 0  # held at once
    seconds: float = 0.0
    # seconds from each request's arrival to its first token
    first_token: list[float] = field(default_factory=list)
    # mean seconds between the tokens of each request that finished
    between_tokens: list[float] = field(default_factory=list)

    @property
    def hit_rate(self) -> float:
        return self.cached_tokens / max(self.prompt_tokens, 1)

    @property
    def ideal_hit_rate(self) -> float:
        return self.findable_tokens / max(self.prompt_tokens, 1)


def percentile(values: list[float], share: float) -> float:
    """The smallest value that at least this share of them do not exceed; 0 of none."""
    return sorted(values)[max(ceil(share * len(values)) - 1, 0)] if values else 0.0


@dataclass(slots=True)
class InSimulation:
    """A request that lives."""

    seq: RequestState
    conversation: TraceConversation
    turn: int
    leads: bool  # the conversation goes on with its answer, not with another choice's
    arrived: float
    findable: int
    began: float = 0.0  # its first token


class Simulation:
    """`scheduler` works on `pages`, with kv_connector below them if there are `transfers`. `watch` is called
    after each step was planned. `cache.num_cached_tokens`: a prefix cache is used. One run each."""

    def __init__(
        self, scheduler: Scheduler, pages: PageGroups, device: SimulatedDevice, cost: StepCost = SAME, *,
        overlap: int = 0,
        context: int = 1 << 30, cached: bool = True, transfers: SimulatedTransfers | None = None,
        policy: DepthPolicy | None = None,
        watch: Callable[[ScheduledStep], None] = lambda step: None,
    ) -> None:  # fmt: skip
        self.scheduler, self.pages, self.now, self.result = (
            scheduler,
            pages,
            0.0,
            Simulated(seats=scheduler.num_free_slots),
        )
        self._device, self._cost, self._overlap, self._cached, self._watch = (
            device,
            cost,
            overlap,
            cached,
            watch,
        )
        self._transfers, self._policy = transfers, policy
        self._longest = min(context, pages.capacity(device.sizes.num_lookahead_tokens(overlap)))
        self._events: list[tuple[float, int, Callable[[], None]]] = []  # a heap
        self._numbers = count()
        self._live: dict[str, InSimulation] = {}
        self._in_flight: deque[tuple[ScheduledStep, StepResult, float]] = deque()  # with its end
        self._free_at = 0.0  # the device
        self._seen_keys: set[Key] = set()  # keys of all pages that ever were complete
        self._sampling: dict[int, SamplingParams] = {}  # by priority

    def run(self, conversations: Iterable[TraceConversation]) -> Simulated:
        """Runs all conversations to their end; they come in the order of arrival."""
        coming = iter(conversations)
        self._next(coming)
        while self._events or self._busy:
            while self._events and (self._events[0][0] <= self.now or not self._busy):
                time, _, event = heapq.heappop(self._events)
                self.now = max(self.now, time)
                event()
            if self._busy:
                self._step()
        self.result.preemptions = self.scheduler.preemptions
        return self.result

    @property
    def _busy(self) -> bool:
        return bool(self._live or self._in_flight or self.scheduler.moving)

    def _at(self, time: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._numbers), event))

    # ------------------------------------------------------------------------------------------------ clients

    def _next(self, coming: Iterable[TraceConversation]) -> None:
        """Takes one conversation from an iterator that may make it while it is read."""
        for conversation in coming:
            self._at(conversation.at, partial(self._begin, conversation, coming))
            return

    def _begin(self, conversation: TraceConversation, coming: Iterable[TraceConversation]) -> None:
        self._next(coming)
        self._ask(conversation, 0, [])

    def _ask(self, conversation: TraceConversation, number: int, history: list[int]) -> None:
        turn = conversation.turns[number]
        prompt = [*history, *turn.new_tokens]
        for copy in range(turn.copies):
            self.result.requests += 1
            max_len = len(prompt) + len(turn.answer) + turn.more
            if max_len > self._longest or not prompt:
                self.result.refused += 1
                continue
            req = self._sequence(conversation, turn, prompt, max_len)
            self._device.answers[req.id] = turn.answer
            self.scheduler.add(req)
            self._live[req.id] = InSimulation(
                req, conversation, number, copy == 0, self.now, self._findable(req)
            )
            if turn.patience is not None:
                self._at(self.now + turn.patience, partial(self._leave, req.id))

    def _sequence(
        self, conversation: TraceConversation, turn: TraceTurn, prompt: list[int], max_len: int
    ) -> RequestState:
        sampling = self._sampling.get(conversation.priority)
        if sampling is None:
            sampling = self._sampling[conversation.priority] = SamplingParams(priority=conversation.priority)
        start = root(b"", conversation.salt) if self._cached else None
        request = Request(f"r{self.result.requests}", prompt, sampling, seed=0)
        req = RequestState(request, list(prompt), max_len)
        req.cache.hash_root = start
        self._device.prepare(req, self._overlap)
        return req

    def _findable(self, req: RequestState) -> int:
        """Tokens of a prompt that some request before it had, or just has."""
        num_hit_blocks = next(
            (column for column, key in enumerate(req.cache.block_hashes) if key not in self._seen_keys),
            len(req.cache.block_hashes),
        )
        self._seen_keys.update(req.cache.block_hashes[num_hit_blocks:])
        return min(num_hit_blocks * self.pages.page_size, req.num_prompt_tokens - 1)

    def _leave(self, request_id: str) -> None:
        if request_id in self._live:
            self.scheduler.abort(request_id)
            self.result.num_left += 1
            self._gone(request_id)

    def _gone(self, request_id: str) -> InSimulation:
        del self._device.answers[request_id]
        return self._live.pop(request_id)

    # -------------------------------------------------------------------------------------------------- steps

    def _step(self) -> None:
        """Runs one step in the order of Engine.step."""
        if self._in_flight and self.scheduler.must_wait():
            self._book(leave=0)
        step = self.scheduler.plan(
            self._device.want if self._policy is None else self._policy.choose(self.scheduler.running)
        )
        self._watch(step)
        going = bool(step.reqs) or self.scheduler.moving or bool(step.plan.transfers)
        if going:
            self._launch(step)
        self._book(leave=self._overlap if going else max(len(self._in_flight) - 1, 0))

    def _launch(self, step: ScheduledStep) -> None:
        rows, seconds = self._duration(step.plan) if step.reqs else (0, 0.0)
        began = max(self.now, self._free_at)
        if self._transfers is not None:
            # A load may start once the steps before it have ended, and so may a save.
            self._transfers.start(step.plan.transfers, began)
            if not step.reqs:
                began = max(began, self._transfers.next_end or 0.0)
        self._free_at = began + seconds
        if self._policy is not None and step.reqs:
            self._policy.stepped(step, passes_of(step.plan), seconds)
        self._in_flight.append((step, self._device.launch(step.plan), self._free_at))
        self.result.steps += bool(step.reqs)
        self.result.rows += rows
        self.result.pages_peak = max(self.result.pages_peak, self.pages.num_used_pages)

    def _duration(self, plan: StepPlan) -> tuple[int, float]:
        rows = tokens = pairs = 0
        for span in plan.spans:
            width = span.num_rows
            rows += width
            tokens += span.start + width
            pairs += width * span.start + width * width // 2
        late = sum(span.num_deferred_tokens for span in plan.spans)
        now = sum(span.num_rows for span in plan.spans if not span.defers_kv)
        return rows, self._cost.seconds(
            rows, tokens, pairs, passes_of(plan), [count for count in (late, now) if count]
        )

    def _book(self, leave: int) -> None:
        while len(self._in_flight) > leave:
            step, result, end = self._in_flight.popleft()
            self.now = max(self.now, end)
            if self._transfers is not None:
                result = StepResult(result.spans, self._transfers.ended(self.now))
            events = self.scheduler.commit(step, result)
            if self._policy is not None:
                self._policy.learn(events)
            for req, event in events:
                self._yielded(req, event)

    def _yielded(self, req: RequestState, event: TokenEvent) -> None:
        result, live = self.result, self._live[req.id]
        result.output_tokens += len(event.tokens)
        result.seconds = self.now
        if event.tokens and req.num_output_tokens == len(event.tokens):
            live.began = self.now
            result.first_token.append(self.now - live.arrived)
            result.prompt_tokens += req.num_prompt_tokens
            result.cached_tokens += req.cache.num_cached_tokens
            result.findable_tokens += live.findable
        if req.finish is None:
            return
        assert req.finish in (Finish.STOP, Finish.LENGTH), "nothing fails here"
        self._gone(req.id)
        result.finished += 1
        self._seen_keys.update(req.cache.block_hashes)
        if req.num_output_tokens > 1:
            result.between_tokens.append((self.now - live.began) / (req.num_output_tokens - 1))
        conversation, following = live.conversation, live.turn + 1
        if live.leads and following < len(conversation.turns):
            self._at(
                self.now + conversation.turns[following].pause,
                partial(self._ask, conversation, following, req.tokens),
            )


@dataclass(frozen=True, slots=True)
class TierSizes:
    """Pages below the device; None of disk: there is none."""

    host: int
    disk: int | None
    times: PageTimes


def simulation_of(
    config: EngineConfig,
    pool_tokens: int,
    context: int,
    cost: StepCost,
    *,
    overlap: int = 1,
    below: TierSizes | None = None,
) -> Simulation:
    """Returns the simulation of a server with these options and a pool of so many tokens. Raises ConfigError
    for options that no engine starts with."""
    scheduler, page_size, budget = config.scheduler, config.cache.page_size, config.scheduler.step_tokens
    device = SimulatedDevice.of(config.spec, budget, scheduler.random_seed or 0)
    rows, lookahead = device.sizes.rows_per_step, device.sizes.num_lookahead_tokens(overlap)
    check(budget >= rows, "chunked_prefill_size", budget, f"at least {rows}, the rows of one request")
    check(
        pool_tokens // page_size * page_size >= lookahead + 2,
        "pool_tokens",
        pool_tokens,
        f"at least {lookahead + 2 + page_size}",
    )
    crowd = min(scheduler.most_running(config.spec.nodes + 1), pool_tokens * SHARE_OF_CONTEXT // context)
    seats = scheduler.max_running_requests or max(1, crowd)
    pages = PageGroups([None], [pool_tokens // page_size], page_size, budget)
    service = SchedulingPolicy.of(scheduler, None)
    cached, kv_connector, transfers = not config.cache.disable_radix_cache, None, None
    if cached and below is not None and below.host > 0:
        disk = None if below.disk is None else SimulatedDisk(below.disk)
        kv_connector, transfers = (
            KVConnector(pages, [below.host], disk),
            SimulatedTransfers(below.times, disk),
        )
    policy = DepthPolicy(device.sizes, config.spec.steps) if config.spec.adaptive else None
    device_scheduler = device.limited(Scheduler)(
        pages, max_running=seats, token_budget=budget, eos_ids=(), service=service, kv_connector=kv_connector
    )
    return Simulation(
        device_scheduler,
        pages,
        device,
        cost,
        overlap=overlap,
        context=context,
        cached=cached,
        transfers=transfers,
        policy=policy,
    )
