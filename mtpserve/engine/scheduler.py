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
from operator import attrgetter
from typing import NamedTuple

import msgspec

from mtpserve.cache.groups import PageGroups
from mtpserve.core.batch import Source
from mtpserve.core.plan import Admission, NewPages, SpanPlan, SpanResult, StepPlan, StepResult
from mtpserve.core.request import Finish, Proposal, TokenLogprob
from mtpserve.core.sequence import Held, Sequence
from mtpserve.engine.stopping import until_stop

RANK = attrgetter("rank")
SOURCES = tuple(source.name.lower() for source in Source)


class Planned(NamedTuple):
    """A plan, and whose its spans are: by the time of the result, their seats may be others'."""

    plan: StepPlan
    seqs: list[Sequence]


class Outcome(msgspec.Struct, frozen=True, gc=False):
    """What one step gave one request, surplus after a stop already dropped. `seq.finish` says whether it goes on."""

    seq: Sequence
    tokens: list[int]
    accepted: int = 0  # of `tokens`, from the front
    proposal: Proposal = Proposal()  # the drafts that were verified
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None


class Scheduler:
    """First come, first served: `running` and `waiting` are in the order of arrival, always, and of arrival within a priority where
    requests have one. A seat, once given, is lost for want of pages alone.

    running | a b c d |  waiting | e f g |
                    d ←──────── admission takes the first that waits, and skips none
                    └─────────→ preemption takes the last that runs, and puts it in its place in line: the first, without priorities
    """

    def __init__(self, pages: PageGroups, *, max_running: int, token_budget: int, max_drafts: int, eos_ids: Collection[int]) -> None:
        if token_budget < max_drafts + 1:
            raise ValueError(f"a budget of {token_budget} tokens never holds a token and {max_drafts} drafts")
        self._pages = pages
        self._max_running = max_running
        self._token_budget = token_budget
        self._max_drafts = max_drafts
        self._eos_ids = frozenset(eos_ids)
        self._free_seats = list(range(max_running))  # a heap
        self._turns: dict[str, int] = {}  # decoding requests → their place in the next step's budget
        self.live: dict[str, Sequence] = {}
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self._arrivals = 0
        self.preemptions = 0

    @property
    def free_seats(self) -> int:
        return len(self._free_seats)

    def add(self, seq: Sequence) -> None:
        """The caller has checked that without other requests there are pages for `max_len` tokens and the lookahead."""
        assert seq.id not in self.live
        self.live[seq.id] = seq
        seq.rank = (seq.sampling.priority, self._arrivals)
        self._arrivals += 1
        insort(self.waiting, seq, key=RANK)

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
        missing = [lacking for seq in self.running if not _ends(seq) and (lacking := self._missing(seq))]
        too_few = bool(missing) and not self._pages.are_free(map(sum, zip(*missing, strict=True)))
        return too_few or any(seq.lockstep for seq in ahead)

    def plan(self, want: int) -> Planned:
        """The next step, which drafts `want` deep for the one after it: decoding requests, then prompt chunks, then new requests. Has
        spans while a request lives, unless what is in flight ends them all."""
        decoding = self._reserve()
        planned, left = self._decoding(decoding)
        others = self.running if len(decoding) < len(self.running) else []
        prompts = deque(seq for seq in others if not _decodes(seq) and not _ends(seq))
        admissions: list[Admission] = []
        while left > 0:
            if prompts:
                seq = prompts.popleft()
            elif (admitted := self._admit()) is not None:
                seq = admitted
                admissions.append(_admission(seq))
            else:
                break
            span = _chunk(seq, left)
            planned.append((seq, span))
            left -= span.width
        assert planned or not self.live or any(seq.in_flight for seq in self.running), "a plan without spans would repeat for ever"
        for seq, span in planned:
            seq.launched += span.length
            seq.ahead += span.samples
            seq.drafts = seq.proposals if span.drafts_next and want > 0 else 0
        pages = [new for seq, _ in planned if seq.grown for new in _new_pages(seq)]
        if self._pages.windowed:
            self._leave([seq for seq, _ in planned])
        return Planned(StepPlan([span for _, span in planned], want, admissions, pages), [seq for seq, _ in planned])

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
            span = _span(seq, 1, _useful_drafts(seq))
            if span.width > left:
                late.append(seq.id)
                continue
            spans.append((seq, span))
            left -= span.width
        self._turns = {request_id: turn for turn, request_id in enumerate(late + [seq.id for seq, _ in spans])} if late else {}
        return spans, left

    def _admit(self) -> Sequence | None:
        """Seat the first that waits, with pages for all that it has to compute; None: it must wait on, and so must all after it."""
        if not self.waiting or not self._free_seats:
            return None
        seq = self.waiting[0]
        shared = self._shareable(seq)
        if shared is None:
            return None
        columns = shared[0].end if shared else 0
        start = self._start(seq, columns)
        # With the rows of a verification this is no less than a victim of preemption gave up, of which an older request has
        # taken some: it cannot come back within the same plan, nor lack pages itself for the first span that decodes again.
        held = self._pages.seat(shared, start, _to_compute(seq), seq.lookahead)
        if held is None:
            return None
        seq.held, seq.grown, seq.shared = held, True, columns * self._pages.page_size
        seq.computed = seq.launched = start
        seq.seat = heapq.heappop(self._free_seats)
        insort(self.running, self.waiting.pop(0), key=RANK)
        return seq

    # ----------------------------------------------------------------------------------------------- pages

    def _missing(self, seq: Sequence) -> list[int]:
        """Pages of each group that a running request lacks for its next span; empty: it has them. A prompt lacks none but those of
        windows that move on: admission took the others."""
        tokens = len(seq.tokens) + _useful_drafts(seq) if _decodes(seq) else _to_compute(seq)
        if self._pages.has(seq.held, tokens + seq.lookahead):
            return []
        return self._pages.missing(seq.held, seq.launched, tokens, seq.lookahead)

    def _leave(self, seqs: Seq[Sequence]) -> None:
        """Release the pages that the windows of these requests have left. Only steps after the one that was just planned write to them,
        and the device works in their order. The end of a prompt is kept for those that wait to share it, for a chunk's length of tokens.
        """
        whole = {id(seq.shares): self._start(seq, seq.prompt_len // self._pages.page_size) for seq in self.waiting if seq.shares}
        for seq in seqs:
            first = max(whole.get(id(seq), seq.launched), seq.launched - self._token_budget)
            self._pages.advance(seq.held, min(seq.launched, first))

    def _start(self, seq: Sequence, columns: int) -> int:
        """The first token that is computed where so many columns are shared. The last one always is: what follows it is unknown."""
        return min(columns * self._pages.page_size, _end(seq) - 1)

    def _shareable(self, seq: Sequence) -> list[Held] | None:
        """Pages of another request with the same prompt that this one may read; None: they will be there in a few steps.

        prompt     | page | page | page | pa        a page depends on the tokens up to its end alone
        shared     | page | page | page |
        """
        other = seq.shares
        if other is None or seq.sampling.prompt_logprobs is not None or self.live.get(other.id) is not other:
            return []
        whole = seq.prompt_len // self._pages.page_size
        if other.seat is None or whole == 0:
            return []
        if other.computed < whole * self._pages.page_size:
            return None
        # Nothing is shared where the other's windows have left the prompt: then all of it is computed again.
        return self._pages.shareable(other.held, self._start(seq, whole), whole) or []

    def _reserve(self) -> list[Sequence]:
        """Give every request the pages of its next span, in order → those that decode. Without windows prompt chunks need none:
        admission took theirs."""
        decoding = [seq for seq in self.running if _decodes(seq)]
        for seq in [seq for seq in self.running if not _ends(seq)] if self._pages.windowed else decoding:
            if seq.seat is not None:
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
        seq.computed = seq.launched = 0
        seq.drafts = 0
        insort(self.waiting, seq, key=RANK)
        self.preemptions += 1
        return seq

    def _unseat(self, seq: Sequence) -> None:
        self._pages.release(seq.held)
        seq.held = []
        if seq.seat is not None:
            heapq.heappush(self._free_seats, seq.seat)
            seq.seat = None

    # ---------------------------------------------------------------------------------------------- commit

    def commit(self, planned: Planned, result: StepResult) -> list[Outcome]:
        """Book a step. Requests that got neither tokens nor an end have no outcome. Raises ValueError, and changes nothing, for
        a result that does not fit the plan."""
        spans = planned.plan.spans
        if len(result.spans) != len(spans):
            raise ValueError(f"{len(spans)} spans but {len(result.spans)} results")
        # What came of a request that has ended in the meantime is dropped unread.
        given = [each for each in zip(planned.seqs, spans, result.spans, strict=True) if each[0].finish is None]
        for seq, span, booked in given:
            self._check(seq, span, booked)
        outcomes = (self._book(*each) for each in given)
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

    def _book(self, seq: Sequence, span: SpanPlan, result: SpanResult) -> Outcome:
        proposal = Proposal(result.proposed, result.parents, [SOURCES[who] for who in result.sources], result.path)
        if result.error is not None:
            self._end(seq, Finish.ERROR, result.error)
            return Outcome(seq, [], proposal=proposal)
        kept, finish = until_stop(seq, result.tokens, self._eos_ids)
        seq.computed += span.length + result.accepted
        seq.launched += result.accepted
        seq.ahead -= span.samples
        if not seq.in_flight:
            seq.drafts = result.drafts
        seq.tokens += kept
        scores = None if result.prompt_logprobs is None else result.prompt_logprobs[max(seq.prompt_scored - span.start, 0) :]
        seq.prompt_scored = max(seq.prompt_scored, min(span.start + span.length, seq.prompt_len - 1))
        if finish is not None:
            self._end(seq, finish)
        assert finish is not None or seq.computed < len(seq.tokens) < seq.max_len
        logprobs = None if result.logprobs is None else result.logprobs[: len(kept)]
        return Outcome(seq, kept, min(result.accepted, len(kept)), proposal, logprobs, scores or None)

    def _end(self, seq: Sequence, finish: Finish, error: str | None = None) -> None:
        if seq.seat is None:
            self.waiting = [other for other in self.waiting if other is not seq]
        else:
            self.running = [other for other in self.running if other is not seq]
        self._unseat(seq)
        del self.live[seq.id]
        seq.drafts, seq.finish, seq.error = 0, finish, error

    # ------------------------------------------------------------------------------------------- integrity

    def check_integrity(self) -> None:
        """Raise unless pages, seats and queues agree; with no live request this means that every page and seat is free."""
        self._pages.check_integrity([seq.held for seq in self.live.values()])
        seats = [seq.seat for seq in self.running if seq.seat is not None]
        if sorted(seats + self._free_seats) != list(range(self._max_running)) or len(seats) != len(self.running):
            raise RuntimeError(f"{len(self.running)} requests run in seats {sorted(seats)} while {sorted(self._free_seats)} are free")
        if sorted(seq.id for seq in (*self.running, *self.waiting)) != sorted(self.live):
            raise RuntimeError("running and waiting requests are not the live ones")
        if any(queue != sorted(queue, key=RANK) for queue in (self.running, self.waiting)):
            raise RuntimeError("running or waiting requests are out of order")
        for seq in self.running:
            columns = min(held.end for held in seq.held)
            if not seq.computed < len(seq.tokens) < seq.max_len or seq.launched > columns * self._pages.page_size:
                raise RuntimeError(f"request {seq.id}: {seq.computed} of {len(seq.tokens)} tokens computed, pages of {columns} columns")
            if seq.in_flight != (seq.launched > seq.computed) or seq.ahead < 0 or (seq.ahead and not seq.in_flight):
                raise RuntimeError(f"request {seq.id}: {seq.launched} rows launched, {seq.computed} booked, {seq.ahead} tokens ahead")
        for seq in self.waiting:
            if seq.held or seq.seat is not None or seq.computed or seq.drafts:
                raise RuntimeError(f"request {seq.id} waits but holds {seq.held} and seat {seq.seat}")


def _decodes(seq: Sequence) -> bool:
    """All but the last token is computed, and it can have more."""
    expected = seq.expected
    return seq.launched == expected - 1 and expected < seq.max_len


def _ends(seq: Sequence) -> bool:
    """What is in flight fills its last place."""
    return seq.expected >= seq.max_len


def _useful_drafts(seq: Sequence) -> int:
    # With room for r tokens: r - 1 drafts and the target's own token fill it.
    return min(seq.drafts, seq.max_len - seq.expected - 1)


def _to_compute(seq: Sequence) -> int:
    """Tokens that a request without a seat, or with a part of its prompt computed, comes to by its first verification."""
    return min(len(seq.tokens) + seq.reach + 1, seq.max_len)


def _span(seq: Sequence, length: int, drafts: int = 0) -> SpanPlan:
    """The request's next rows."""
    assert seq.seat is not None
    end, expected = seq.launched + length, seq.expected
    samples = end == expected
    return SpanPlan(seq.seat, seq.launched, length, drafts, samples, samples or (expected > seq.prompt_len and end == expected - 1))


def _chunk(seq: Sequence, budget: int) -> SpanPlan:
    """The next committed tokens to compute.

    fresh prompt   |=======|=======|====|      the last chunk reaches the end and samples
    recomputed     |=======|=======|===|x      stops before x, which it once sampled: x is verified with drafts, as it was
    """
    return _span(seq, min(_end(seq) - seq.launched, budget))


def _end(seq: Sequence) -> int:
    """Up to where it is computed before it decodes."""
    return len(seq.tokens) - (1 if seq.output_len > 0 else 0)


def _admission(seq: Sequence) -> Admission:
    assert seq.seat is not None
    return Admission(
        seq.seat, seq.id, list(seq.tokens), seq.prompt_len, seq.computed, seq.max_len, seq.seed, seq.sampling, seq.bad_words,
        seq.prediction, seq.depth, seq.shared,
    )  # fmt: skip


def _new_pages(seq: Sequence) -> list[NewPages]:
    """Those that no plan has named."""
    assert seq.seat is not None
    new, seq.grown = list[NewPages](), False
    for group, held in enumerate(seq.held):
        first, held.planned = max(held.planned, held.first), held.end
        if first < held.end:
            new.append(NewPages(seq.seat, first, held.pages[first - held.first :], group))
    return new
