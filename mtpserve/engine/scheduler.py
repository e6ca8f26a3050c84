"""Which rows the next step computes, for whom, on which pages; and what the step's result does to the requests.

Pure Python over sequences and page counts. It is not the loop (engine.py) and holds no tensor. Two promises shape it:

* A request's text depends on the request alone. Its drafts are verified whole or not yet, never trimmed to fit a budget, and
  one that was preempted goes on from the very token and drafts that it had.
* The first in order always makes progress: pages run out at the expense of the last, and every decoding request gets
  its turn within a bounded number of steps.

A step may be planned while others are in flight, from what is certain about them: see core/sequence. `must_wait` says when that is
not enough. A request whose end was not read yet gets spans without effect: `commit` drops them unread, and since the device
works in order, pages that were released in the meantime are written by their next holder after that.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import deque
from collections.abc import Collection, Sequence as Seq
from itertools import islice

from mtpserve.cache.groups import PageGroups
from mtpserve.config.drafters import MTP
from mtpserve.core.batch import Source
from mtpserve.core.plan import Admission, KeptState, SpanPlan, SpanResult, StepPlan, StepResult
from mtpserve.core.protocols.observers import CacheObserver
from mtpserve.core.request import Finish, Proposal
from mtpserve.core.sequence import Sequence
from mtpserve.engine.pages.prefixes import Prefixes
from mtpserve.engine.pages.tiers import Tiers
from mtpserve.engine.queue import LOOKS, RANK, UNLIMITED, Line, ServiceOrder
from mtpserve.engine.spans import admission, chunk, decodes, deferred, ends, new_pages, next_span, to_compute, useful_drafts
from mtpserve.engine.steps import Outcome, Planned
from mtpserve.engine.stopping import until_stop

MOST_EXPECTED = 4096  # tokens that a request is expected to produce at most, whatever its limit is


class Scheduler:
    """`running` and `waiting` are in the order of arrival, always, and of arrival within a priority where requests have one. A seat, once
    given, is lost for want of pages alone.

    running | a b c d |  waiting | e f g |
                    d ←──────── admission takes the first in the policy's order (engine/queue) that may run now
                    └─────────→ preemption takes the last that runs, and puts it in its place in line

    A request that waits for its turn is passed over in two cases: another one is just computing pages that it can use, or as many long
    prompts as may be computed together run already. It is not passed over for want of pages.
    """

    def __init__(
        self, pages: PageGroups, *, max_running: int, token_budget: int, max_drafts: int, eos_ids: Collection[int],
        service: ServiceOrder = UNLIMITED, observer: CacheObserver | None = None, tiers: Tiers | None = None, most_deferred: int = 0,
        drafter: str = MTP, apart: bool = False,
    ) -> None:  # fmt: skip
        """`apart`: prompts are not computed together with requests that decode."""
        if token_budget < max_drafts + 1:
            raise ValueError(f"a budget of {token_budget} tokens never holds a token and {max_drafts} drafts")
        self._pages = pages
        self._max_running, self._token_budget, self._max_drafts = max_running, token_budget, max_drafts
        self._sources = Source.names(drafter)
        self.most_deferred = most_deferred  # rows of a request that wait for a draft model to absorb them
        self._apart = apart
        self._eos_ids = frozenset(eos_ids)
        self._service = service
        self._free_seats = list(range(max_running))  # a heap
        self._turns: dict[str, int] = {}  # decoding requests → their place in the next step's budget
        self._prefixes, self._tiers = Prefixes(pages, observer, tiers), tiers
        self._gave_way = False  # long prompts had no rows in the last step, for short ones
        self.live: dict[str, Sequence] = {}
        self.running: list[Sequence] = []
        self._line = Line(service.longest_prefix)
        self._arrivals = 0
        self.preemptions = 0

    @property
    def free_seats(self) -> int:
        return len(self._free_seats)

    @property
    def moving(self) -> bool:
        """Pages are on their way between tiers."""
        return self._tiers is not None and self._tiers.pending

    @property
    def waiting(self) -> list[Sequence]:
        return self._line.seqs

    def add(self, seq: Sequence) -> None:
        """The caller has checked that without other requests there are pages for `max_len` tokens and the lookahead."""
        assert seq.id not in self.live
        self.live[seq.id] = seq
        seq.rank = (seq.sampling.priority, self._arrivals)
        self._arrivals += 1
        self._prefixes.add(seq)
        self._line.add(seq)

    def abort(self, request_id: str) -> Sequence | None:
        """End a live request, also between plan and commit: the result of its span is then ignored. None: no such request."""
        seq = self.live.get(request_id)
        if seq is not None:
            self._end(seq, Finish.ABORT)
        return seq

    # ------------------------------------------------------------------------------------------------ plan

    def must_wait(self) -> bool:
        """The steps in flight must be booked before another is planned: a request requires it, or another would be preempted."""
        ahead = [seq for seq in self.running if seq.in_flight]
        if not ahead:
            return False
        missing = [lacking for seq in self.running if not ends(seq) and (lacking := self._missing(seq))]
        too_few = bool(missing) and not self._pages.are_free(map(sum, zip(*missing, strict=True)))
        return too_few or any(seq.lockstep for seq in ahead)

    def plan(self, want: int) -> Planned:
        """The next step, which drafts `want` deep for the one after it: decoding requests, then prompt chunks, then new requests. Has
        spans while a request lives, unless what is in flight ends them all."""
        self._pages.settle()
        decoding = self._reserve()
        planned, left = self._decoding(decoding)
        others = self.running if len(decoding) < len(self.running) else []
        prompts, admissions = self._prompts([seq for seq in others if not decodes(seq) and not ends(seq)], left)
        if self.most_deferred:
            planned = deferred(planned, want, self.most_deferred, beside=bool(prompts) and not self._apart)
        keeps = self._prefixes.keep(planned, prompts)
        planned += prompts
        busy = self.moving or any(seq.in_flight for seq in self.running)
        assert planned or not self.live or busy, "a plan without spans would repeat for ever"
        for seq, span in planned:
            seq.launched += span.length
            seq.ahead += span.samples
            seq.drafts = seq.most_proposals if span.drafts_next and want > 0 else 0
        pages = [new for seq, _ in planned if seq.grown for new in new_pages(seq, self._pages.dense)]
        transfers = [] if self._tiers is None else self._tiers.take_outgoing()
        return Planned(StepPlan([span for _, span in planned], want, admissions, pages, transfers, keeps), [seq for seq, _ in planned])

    def _decoding(self, ready: list[Sequence]) -> tuple[list[tuple[Sequence, SpanPlan]], int]:
        """Spans with one token and all its drafts, and what is left of the budget. Who finds no room is first in the next step.

        turns   | a b | c d e |   →   | c d | e a b |   →   | e a | b c d |      with room for two
        """
        if self._turns:
            ready = sorted(ready, key=lambda seq: self._turns.get(seq.id, len(self._turns)))
        left = self._token_budget
        spans: list[tuple[Sequence, SpanPlan]] = []
        late: list[str] = []
        for seq in ready:
            span = next_span(seq, 1, useful_drafts(seq))
            if span.width > left:
                late.append(seq.id)
                continue
            spans.append((seq, span))
            left -= span.width
        self._turns = {request_id: turn for turn, request_id in enumerate(late + [seq.id for seq, _ in spans])} if late else {}
        return spans, left

    def _prompts(self, running: Seq[Sequence], left: int) -> tuple[list[tuple[Sequence, SpanPlan]], list[Admission]]:
        """Chunks of prompts, `left` rows in all: of those that run, then of those that are admitted, each in its order.

        Short prompts come first, and in every other step long ones get no rows beside them. Then come a few long ones, each with a bounded
        number of rows as long as others live. So steps stay short, and short prompts do not wait for the ends of long ones.
        """
        service, alone = self._service, len(self.live) == 1
        long = [seq for seq in running if self._is_long(seq, seq.shared)]
        short = [seq for seq in running if not self._is_long(seq, seq.shared)] if long else running
        chosen, admitted = self._share(short, left - (left // 4 if long else 0), long=False)
        if service.long_prompt is None or (chosen and not self._gave_way):
            self._gave_way = True
        else:
            self._gave_way = False
            left -= sum(rows for _, rows in chosen)
            more, others = self._share(long, left, long=True, limit=left if alone else service.long_rows)
            chosen, admitted = chosen + more, admitted + others
        return [(seq, chunk(seq, self._prefixes.rows(seq, rows))) for seq, rows in chosen], [admission(seq) for seq in admitted]

    def _share(
        self, running: Seq[Sequence], left: int, long: bool, limit: int | None = None
    ) -> tuple[list[tuple[Sequence, int]], list[Sequence]]:
        """Prompts with their rows, `left` in all and `limit` of each, and those of them that were admitted just now."""
        queue, chosen, admitted = deque(running), list[tuple[Sequence, int]](), list[Sequence]()
        while left > 0 and not (long and len(chosen) == self._service.max_long):
            seq = queue.popleft() if queue else self._admit(long)
            if seq is None:
                break
            if len(chosen) >= len(running):
                admitted.append(seq)
            rows = min(seq.prefill_end - seq.launched, left, left if limit is None else limit)
            chosen.append((seq, rows))
            left -= rows
        return chosen, admitted

    def _is_long(self, seq: Sequence, start: int) -> bool:
        """A prompt that is computed from token `start` on. It stays long to its end."""
        return self._service.long_prompt is not None and seq.prefill_end - start > self._service.long_prompt

    def _admit(self, long: bool) -> Sequence | None:
        """Seat the next that waits, with pages for all that it has to compute. `long`: a long prompt may be next. None: nobody can be
        seated."""
        if not self._line.seqs or not self._free_seats:
            return None
        for seq in islice(self._line.order(self._prefixes.expected), LOOKS):
            columns = self._prefixes.columns(seq)
            if columns is None:
                continue
            # The last token always is computed: what follows it is unknown.
            start = min(columns * self._pages.page_size, seq.prefill_end - 1)
            if not long and self._is_long(seq, columns * self._pages.page_size):
                continue
            # With the rows of a verification this is no less than a victim of preemption gave up, of which an older request has
            # taken some: it cannot come back within the same plan, nor lack pages itself for the first span that decodes again.
            held = self._pages.seat(seq.keys[:columns], start, to_compute(seq), seq.lookahead, self._reserved())
            if held is None:
                return None
            seq.held, seq.grown, seq.shared = held, True, columns * self._pages.page_size
            seq.state = self._pages.state_of(held)
            seq.computed = seq.absorbed = seq.launched = seq.settled = start
            if not seq.ran:
                seq.cached, seq.ran = start, True
            self._prefixes.seat(seq, columns)
            seq.seat = heapq.heappop(self._free_seats)
            self._line.seat(seq)
            insort(self.running, seq, key=RANK)
            return seq
        return None

    def _reserved(self) -> int:
        """Pages that admission leaves for those that run."""
        if self._service.reserved == 0 or not self.running:
            return 0
        tokens = sum(min(seq.room, MOST_EXPECTED) for seq in self.running)
        return self._pages.columns(int(self._service.reserved * tokens))

    # ----------------------------------------------------------------------------------------------- pages

    def _missing(self, seq: Sequence) -> list[int]:
        """Pages of each group that a running request lacks for its next span; empty: it has them. A prompt lacks none but those of
        windows that move on: admission took the others."""
        tokens = len(seq.tokens) + useful_drafts(seq) if decodes(seq) else to_compute(seq)
        if self._pages.has(seq.held, tokens + seq.lookahead):
            return []
        return self._pages.missing(seq.held, seq.launched, tokens, seq.lookahead)

    def _reserve(self) -> list[Sequence]:
        """Give every request the pages of its next span, in order → those that decode. Without windows prompt chunks need none:
        admission took theirs."""
        decoding = [seq for seq in self.running if decodes(seq)]
        for seq in [seq for seq in self.running if not ends(seq)] if self._pages.windowed else decoding:
            if seq.seat is not None:
                if self._pages.windowed:
                    # What its windows have left, and what others may find of that: pages get their keys when they are booked. The steps in
                    # flight still read them; but only later ones write to them, and the device works in their order.
                    self._pages.advance(seq.held, seq.launched if seq.root is None else seq.computed)
                self._extend(seq)
        return [seq for seq in decoding if seq.seat is not None]

    def _extend(self, seq: Sequence) -> None:
        missing = self._missing(seq)
        if not missing:
            return
        while not self._pages.are_free(missing):
            # Ends: the pool holds the first request alone, and a request that turns out to be the last gives way itself.
            if self._preempt_last() is seq:
                return
        self._pages.extend(seq.held, missing)
        seq.grown = True

    def _preempt_last(self) -> Sequence:
        seq = self.running.pop()
        assert not seq.in_flight, "what it is getting would be lost"
        self._unseat(seq)
        seq.computed = seq.absorbed = seq.launched = seq.settled = 0
        seq.drafts = seq.deferred = 0
        self._line.add(seq)
        self.preemptions += 1
        return seq

    def _unseat(self, seq: Sequence, trusted: bool = True) -> None:
        self._prefixes.leave(seq, trusted)
        self._pages.release(seq.held)
        seq.held = []
        if seq.seat is not None:
            heapq.heappush(self._free_seats, seq.seat)
            seq.seat = None

    def forget(self) -> None:
        """Empty the prefix cache."""
        self._prefixes.forget(self.running)

    # ---------------------------------------------------------------------------------------------- commit

    def commit(self, planned: Planned, result: StepResult) -> list[Outcome]:
        """Book a step. Requests that got neither tokens nor an end have no outcome. Raises ValueError, and changes nothing, for
        a result that does not fit the plan."""
        if self._tiers is not None:
            self._tiers.book(result.transferred)
        spans = planned.plan.spans
        if len(result.spans) != len(spans):
            raise ValueError(f"{len(spans)} spans but {len(result.spans)} results")
        # What came of a request that has ended in the meantime is dropped unread.
        given = [each for each in zip(planned.seqs, spans, result.spans, strict=True) if each[0].finish is None]
        for seq, span, booked in given:
            self._check(seq, span, booked)
        kept = {each.seat: each for each in planned.plan.keeps}
        outcomes = (self._book(*each, kept.get(each[1].seat)) for each in given)
        return [outcome for outcome in outcomes if outcome.tokens or outcome.prompt_logprobs or outcome.seq.finish is not None]

    def fail(self, seqs: Seq[Sequence], error: str) -> list[Outcome]:
        """End those of `seqs` that still live with an error."""
        living = [seq for seq in seqs if seq.finish is None]
        for seq in living:
            self._end(seq, Finish.ERROR, error)
        return [Outcome(seq, []) for seq in living]

    def _check(self, seq: Sequence, span: SpanPlan, result: SpanResult) -> None:
        tokens = result.accepted + 1 if span.samples else 0
        fits = 0 <= result.accepted <= span.drafts and len(result.tokens) == tokens and 0 <= result.drafts <= self._max_drafts
        if not fits and result.error is None:
            raise ValueError(f"the result of request {seq.id} does not fit its span: {result}")

    def _book(self, seq: Sequence, span: SpanPlan, result: SpanResult, kept_state: KeptState | None) -> Outcome:
        proposal = Proposal(result.proposed, result.parents, [self._sources[who] for who in result.sources], result.path)
        if result.error is not None:
            self._end(seq, Finish.ERROR, result.error)
            return Outcome(seq, [], proposal=proposal)
        kept, finish = until_stop(seq, result.tokens, self._eos_ids)
        settled = seq.computed + span.length
        if span.late:
            seq.absorbed = seq.computed
        seq.computed += span.length + result.accepted
        if not span.deferred:
            seq.absorbed = seq.computed
        seq.launched += result.accepted
        seq.ahead -= span.samples
        if not seq.in_flight:
            seq.drafts = result.drafts
        seq.tokens += kept
        scores = None if result.prompt_logprobs is None else result.prompt_logprobs[max(seq.prompt_scored - span.start, 0) :]
        seq.prompt_scored = max(seq.prompt_scored, min(span.start + span.length, seq.prompt_len - 1))
        self._prefixes.book(seq, settled, kept_state)
        if finish is not None:
            self._end(seq, finish)
        assert finish is not None or seq.computed < len(seq.tokens) < seq.max_len
        logprobs = None if result.logprobs is None else result.logprobs[: len(kept)]
        return Outcome(seq, kept, min(result.accepted, len(kept)), proposal, logprobs, scores or None)

    def _end(self, seq: Sequence, finish: Finish, error: str | None = None) -> None:
        seq.drafts, seq.finish, seq.error = 0, finish, error
        if seq.seat is None:
            self._line.remove(seq)
        else:
            self.running = [other for other in self.running if other is not seq]
        self._unseat(seq, trusted=finish is not Finish.ERROR)
        del self.live[seq.id]

    # ------------------------------------------------------------------------------------------- integrity

    def check_integrity(self) -> None:
        """Raise unless pages, seats and queues agree; with no live request this means that every page and seat is free."""
        loading = [] if self._tiers is None else self._tiers.holders
        self._pages.check_integrity([*(seq.held for seq in self.live.values()), *loading], self._prefixes.states)
        seats = [seq.seat for seq in self.running if seq.seat is not None]
        if sorted(seats + self._free_seats) != list(range(self._max_running)) or len(seats) != len(self.running):
            raise RuntimeError(f"{len(self.running)} requests run in seats {sorted(seats)} while {sorted(self._free_seats)} are free")
        if sorted(seq.id for seq in (*self.running, *self.waiting)) != sorted(self.live):
            raise RuntimeError("running and waiting requests are not the live ones")
        if any(queue != sorted(queue, key=RANK) for queue in (self.running, self.waiting)):
            raise RuntimeError("running or waiting requests are out of order")
        for seq in self.running:
            columns = min(held.end for held in seq.held[: self._pages.dense])
            if not seq.computed < len(seq.tokens) < seq.max_len or seq.launched > columns * self._pages.page_size:
                raise RuntimeError(f"request {seq.id}: {seq.computed} of {len(seq.tokens)} tokens computed, pages of {columns} columns")
            if not seq.absorbed <= seq.computed <= seq.absorbed + self.most_deferred or seq.deferred > self.most_deferred:
                raise RuntimeError(f"request {seq.id}: {seq.absorbed} of {seq.computed} rows absorbed, {seq.deferred} deferred")
            if seq.in_flight != (seq.launched > seq.computed) or seq.ahead < 0 or (seq.ahead and not seq.in_flight):
                raise RuntimeError(f"request {seq.id}: {seq.launched} rows launched, {seq.computed} booked, {seq.ahead} tokens ahead")
        for seq in self.waiting:
            if seq.held or seq.seat is not None or seq.computed or seq.drafts:
                raise RuntimeError(f"request {seq.id} waits but holds {seq.held} and seat {seq.seat}")
