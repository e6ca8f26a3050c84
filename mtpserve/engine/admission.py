"""Which prompts a step computes: chunks of those that run, and of those that it admits.

Short prompts come first, and in every other step long ones get no rows beside them. Then come a few long
ones, each with a bounded number of rows as long as others live. So steps stay short, and short prompts do not
wait for the ends of long ones.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import deque
from itertools import islice

from mtpserve.cache.groups import PageGroups
from mtpserve.core.plan import NewRequest, SpanPlan
from mtpserve.core.state.cache_state import BlockList
from mtpserve.core.state.request_state import RequestState
from mtpserve.engine.lora.adapter_slots import AdapterSlots
from mtpserve.engine.pages.prefixes import Prefixes
from mtpserve.engine.queue import MAX_PREFIX_LOOKUPS, QUEUE_KEY, SchedulingPolicy, WaitingQueue
from mtpserve.engine.spans import admission, chunk, to_compute

MAX_EXPECTED_TOKENS = 4096  # a request's output, whatever its limit is


class Admission:
    """`running` is the scheduler's list, in order; admitted requests are put into it.

    A request that waits for its turn is passed over in three cases: another one is just computing pages that
    it can use, as many long prompts as may be computed together run already, or its adapter gets no slot. It
    is not passed over for want of pages.
    """

    def __init__(
        self,
        pages: PageGroups,
        prefixes: Prefixes,
        queue: WaitingQueue,
        policy: SchedulingPolicy,
        max_running: int,
    ) -> None:
        self._pages, self._prefixes, self._queue, self._policy = pages, prefixes, queue, policy
        self.free_req_indices = list(range(max_running))  # a heap
        self.adapters = AdapterSlots()
        self._long_prompts_waited = False  # long prompts had no rows in the last step, for short ones

    def release(self, req: RequestState) -> None:
        """It runs no more, or it has ended while it waited."""
        if req.finish is not None:
            self.adapters.leave(req.request.lora)
        if req.req_idx is not None:
            heapq.heappush(self.free_req_indices, req.req_idx)
            self.adapters.release(req.request.lora)
            req.req_idx, req.queue.adapter_slot = None, -1

    def prompts(
        self, running: list[RequestState], prefilling: list[RequestState], budget: int, is_alone: bool
    ) -> tuple[list[tuple[RequestState, SpanPlan]], list[NewRequest]]:
        """Chunks with `budget` rows in all: of those that run, then of those that are admitted, each in its
        order. `is_alone`: no other request lives."""
        policy = self._policy
        long = [req for req in prefilling if self.is_long(req, req.cache.num_shared_tokens)]
        short = prefilling
        if long:
            short = [req for req in prefilling if not self.is_long(req, req.cache.num_shared_tokens)]
        prompts, admitted = self._share(running, short, budget - (budget // 4 if long else 0), long=False)
        if policy.long_prompt_tokens is None or (prompts and not self._long_prompts_waited):
            self._long_prompts_waited = True
        else:
            self._long_prompts_waited = False
            budget -= sum(rows for _, rows in prompts)
            limit = budget if is_alone else policy.long_chunk_tokens
            more, others = self._share(running, long, budget, long=True, limit=limit)
            prompts, admitted = prompts + more, admitted + others
        chunks = [(req, chunk(req, self._prefixes.rows(req, rows))) for req, rows in prompts]
        return chunks, [admission(req) for req in admitted]

    def _share(
        self,
        running: list[RequestState],
        prefilling: list[RequestState],
        budget: int,
        long: bool,
        limit: int | None = None,
    ) -> tuple[list[tuple[RequestState, int]], list[RequestState]]:
        """Prompts with their rows, `budget` in all and `limit` of each, and those of them that were admitted
        just now."""
        queue, prompts, admitted = deque(prefilling), list[tuple[RequestState, int]](), list[RequestState]()
        while budget > 0 and not (long and len(prompts) == self._policy.max_long_prompts):
            req = queue.popleft() if queue else self._admit_next(running, long)
            if req is None:
                break
            if len(prompts) >= len(prefilling):
                admitted.append(req)
            rows = min(req.prefill_end - req.num_scheduled_tokens, budget, budget if limit is None else limit)
            prompts.append((req, rows))
            budget -= rows
        return prompts, admitted

    def is_long(self, req: RequestState, start: int) -> bool:
        """A prompt that is computed from token `start` on. It stays long to its end."""
        length = self._policy.long_prompt_tokens
        return length is not None and req.prefill_end - start > length

    def _admit_next(self, running: list[RequestState], long: bool) -> RequestState | None:
        """Gives the next that waits a row, and pages for all that it has to compute. `long`: a long prompt
        may be next. None: nobody can run."""
        if not self._queue.reqs or not self.free_req_indices:
            return None
        lacks_slot = False
        for req in islice(self._queue.order(self._prefixes.expected), MAX_PREFIX_LOOKUPS):
            if (lora := req.request.lora) is not None:
                # Others that need a slot do not overtake a request that waits for one: it might never run.
                lacks_slot = lacks_slot or not self.adapters.has_room(lora)
                if lacks_slot:
                    continue
            columns = self._prefixes.columns(req)
            if columns is None:
                continue
            num_shared_tokens = columns * self._pages.page_size
            # The last token always is computed: what follows it is unknown.
            start = min(num_shared_tokens, req.prefill_end - 1)
            if not long and self.is_long(req, num_shared_tokens):
                continue
            # With the rows of a verification this is no less than a victim of preemption gave up, of which an
            # older request has taken some: it cannot come back within the same plan, nor lack pages itself
            # for the first span that decodes again.
            blocks = self._pages.seat(
                req.cache.block_hashes[:columns],
                start,
                to_compute(req),
                req.num_lookahead_tokens,
                self._reserved(running),
            )
            if blocks is None:
                return None
            self._start(req, blocks, start, num_shared_tokens)
            self._prefixes.seat(req, columns)
            req.req_idx = heapq.heappop(self.free_req_indices)
            req.queue.adapter_slot = self.adapters.seat(lora)
            self._queue.admit(req)
            insort(running, req, key=QUEUE_KEY)
            return req
        return None

    def _start(self, req: RequestState, blocks: list[BlockList], start: int, num_shared_tokens: int) -> None:
        cache = req.cache
        cache.blocks, cache.has_new_blocks, cache.num_shared_tokens = blocks, True, num_shared_tokens
        cache.start_state = self._pages.state_of(blocks)
        cache.num_stored_tokens = cache.num_state_tokens = start
        req.num_computed_tokens = req.num_scheduled_tokens = start
        if not req.queue.has_run:
            cache.num_cached_tokens, req.queue.has_run = start, True

    def _reserved(self, running: list[RequestState]) -> int:
        """Pages that admission leaves for those that run."""
        if self._policy.reserved_fraction == 0 or not running:
            return 0
        tokens = sum(min(req.num_free_tokens, MAX_EXPECTED_TOKENS) for req in running)
        return self._pages.columns(int(self._policy.reserved_fraction * tokens))
