"""A model runner without tensors: a pool of tokens for KV, and a hash of what it reads there for a model.

The next token depends on every token in the request's pages, so a page that two requests write, a row that is skipped or a
rejected draft that is read changes the text. Everything that the scheduler promises about spans is asserted in `step`.

`noisy` imitates sampling: what is committed then depends on which drafts were verified, as with rejection sampling, so only
a schedule that verifies the same drafts at the same places gives the same text.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, field

from mtpserve.core.batch import Source, Span, SpanResult, StepResult
from mtpserve.core.draft_sizes import DraftSizes
from mtpserve.core.sequence import Sequence


def draw(*key: object, below: int) -> int:
    """A number in [0, below) from `key` alone, the same in every process."""
    return int.from_bytes(hashlib.blake2b(repr(key).encode(), digest_size=8).digest(), "little") % below


def next_token(history: list[int], vocab: int) -> int:
    """The model: what follows `history`."""
    return draw("model", history, below=vocab)


def greedy_text(prompt: list[int], count: int, vocab: int) -> list[int]:
    """The reference: `count` tokens without pages, spans or drafts."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, vocab))
    return tokens[len(prompt) :]


@dataclass(slots=True)
class Seat:
    """What the device keeps of one running request."""

    id: str
    tokens: list[int]
    computed: int = 0
    drafts: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Given:
    """A span and what the device is told with it, as it was when the step was launched."""

    span: Span
    seat: int
    pages: list[int]


@dataclass(slots=True)
class FakeStep:
    runner: FakeRunner
    made: StepResult | None = None
    error: Exception | None = None

    def result(self) -> StepResult:
        self.runner.run_until(self)
        if self.error is not None:
            raise self.error
        assert self.made is not None
        return self.made


class FakeRunner:
    """`accuracy` is the chance that a draft is right, decided by (`seed`, history): the same after a preemption.

    The device does what it was told in the order in which it was told, as late as it may: when somebody waits for the result. So
    whatever the host changes in between shows, if the engine relied on what it could not know.
    """

    def __init__(
        self, *, max_drafts: int, num_pages: int, page_size: int, vocab: int = 50, accuracy: float = 0.7, seed: int = 0, noisy: bool = False
    ) -> None:
        self.max_drafts = max_drafts
        self.sizes = DraftSizes(steps=max_drafts, proposed=max_drafts, written=max_drafts)
        self.page_size = page_size
        self.vocab = vocab
        self.accuracy = accuracy
        self.seed = seed
        self.noisy = noisy
        self.kv: list[int | None] = [None] * (num_pages * page_size)
        self.seats: dict[int, Seat] = {}
        self.seated: set[int] = set()  # as the host says: from `admit` to `release`
        self.steps: list[list[tuple[str, int, int, int]]] = []  # per step (id, start, length, drafts) of each span
        self.fail_ids: set[str] = set()  # requests whose logits are not finite
        self.refuse_ids: set[str] = set()  # requests that `admit` refuses
        self.raise_at: set[int] = set()  # steps that raise half-way
        self.fault: Exception = RuntimeError("the device is unwell")  # what they raise
        self.lockstep_ids: set[str] = set()
        self.queue: deque[Callable[[], object]] = deque()
        self.while_running: Callable[[], None] = lambda: None  # called in the middle of each step

    def lockstep(self, seq: Sequence) -> bool:
        return seq.id in self.lockstep_ids

    def admit(self, seq: Sequence) -> None:
        assert seq.seat is not None and seq.computed == 0
        assert seq.seat not in self.seated, f"seat {seq.seat} is given while somebody has it"
        self.seated.add(seq.seat)
        if seq.id in self.refuse_ids:
            raise ValueError(seq.id)
        seat, fresh = seq.seat, Seat(seq.id, list(seq.tokens))
        self.queue.append(lambda: self.seats.update({seat: fresh}))

    def release(self, seats: Seq[int]) -> None:
        for seat in seats:
            assert seat in self.seated, f"seat {seat} was left, but nobody had it"
            self.seated.remove(seat)

    def launch(self, spans: Seq[Span], want: int) -> FakeStep:
        assert spans and want <= self.max_drafts
        self._check_apart(spans)
        self.steps.append([(span.seq.id, span.start, span.length, span.drafts) for span in spans])
        for span in spans:
            self._check(span)
        step = FakeStep(self)
        given = [Given(span, span.seq.seat or 0, list(span.seq.pages)) for span in spans]
        raises = len(self.steps) in self.raise_at
        self.queue.append(lambda: self._execute(step, given, want, raises))
        return step

    def run_until(self, step: FakeStep) -> None:
        while step.made is None and step.error is None:
            self.queue.popleft()()

    def _execute(self, step: FakeStep, given: list[Given], want: int, raises: bool) -> None:
        made = []
        for row, each in enumerate(given):
            if raises and row >= len(given) // 2:
                step.error = self.fault
                return
            made.append(self._run(each, want))
        self.while_running()
        step.made = StepResult(made)

    def _check_apart(self, spans: Seq[Span]) -> None:
        pages = [page for span in spans for page in span.seq.pages]
        assert len(pages) == len(set(pages)), "a page has two holders"
        assert len({span.seq.seat for span in spans}) == len(spans)

    def _check(self, span: Span) -> None:
        seq = span.seq
        assert seq.seat is not None and seq.finish is None
        assert span.length >= 1 and span.drafts <= self.max_drafts and (span.samples or span.drafts == 0)
        assert not (seq.id in self.lockstep_ids and span.start != seq.computed), "the host had no say"
        beyond = 2 * (self.max_drafts + 1) if span.drafts_next else 0
        assert len(seq.pages) * self.page_size >= span.start + span.width + beyond

    def _slot(self, pages: list[int], index: int) -> int:
        return pages[index // self.page_size] * self.page_size + index % self.page_size

    def _run(self, given: Given, want: int) -> SpanResult:
        span, seq, seat, pages = given.span, given.span.seq, self.seats[given.seat], given.pages
        assert seat.id == seq.id and span.start <= seat.computed and (span.samples or span.start == seat.computed)
        room = seq.max_len - len(seat.tokens)
        proposed = seat.drafts[: max(room - 1, 0)] if span.samples else []
        assert len(proposed) <= span.drafts or room <= 0, "drafts were trimmed"
        start = seat.computed
        rows = seat.tokens[start : start + span.length] + proposed
        for i, token in enumerate(rows, start):
            self.kv[self._slot(pages, i)] = token
        committed = self._verify(span, pages, start + span.length, proposed) if span.samples else []
        accepted = max(len(committed) - 1, 0)
        seat.computed = start + span.length + accepted
        seat.tokens += committed
        seat.drafts = self._propose(seat.tokens, want) if span.drafts_next else []
        for i in range(len(seat.drafts)):  # drafting writes too, behind what is committed
            self.kv[self._slot(pages, seat.computed + i)] = -1
        return SpanResult(
            committed,
            accepted,
            len(seat.drafts),
            proposed,
            parents=list(range(len(proposed))),
            sources=[Source.MTP] * len(proposed),
            path=list(range(1, accepted + 1)),
            failed=seq.id in self.fail_ids and span.samples,
        )

    def _verify(self, span: Span, pages: list[int], end: int, proposed: list[int]) -> list[int]:
        """Accepted drafts and one more, from what stands in the pages."""
        committed: list[int] = []
        for draft in [*proposed, None]:
            read = [self.kv[self._slot(pages, i)] for i in range(end + len(committed))]
            assert None not in read and -1 not in read, "a row reads KV that nobody wrote"
            token = self._choose([token for token in read if token is not None], span.seq.seed, draft)
            committed.append(token)
            if token != draft:
                break
        return committed

    def _choose(self, history: list[int], seed: int, draft: int | None) -> int:
        if not self.noisy:
            return next_token(history, self.vocab)
        if draft is not None and draw("accept", seed, len(history), below=1000) < 1000 * self.accuracy:
            return draft
        return draw("sample", seed, history, draft, below=self.vocab)

    def _propose(self, tokens: list[int], want: int) -> list[int]:
        history = list(tokens)
        for _ in range(want):
            right = draw("draft", self.seed, history, below=1000) < 1000 * self.accuracy
            history.append((next_token(history, self.vocab) + (0 if right else 1)) % self.vocab)
        return history[len(tokens) :]
