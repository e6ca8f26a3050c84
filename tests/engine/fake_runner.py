"""A model runner without tensors: a pool of tokens for KV, and a hash of what it reads there for a model.

The next token depends on every token in the request's pages, so a page that two requests write, a row that is skipped or a
rejected draft that is read changes the text. Everything that the scheduler promises about spans is asserted in `launch`, from the
plan alone: the runner sees no other part of the engine.

`noisy` imitates sampling: what is committed then depends on which drafts were verified, as with rejection sampling, so only
a schedule that verifies the same drafts at the same places gives the same text.
"""

from __future__ import annotations

import hashlib
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from mtpserve.core.batch import Source
from mtpserve.core.plan import NOT_FINITE, NewRequest, SpanPlan, SpanResult, StepPlan, StepResult, Transfer, Transferred
from mtpserve.core.spec_sizes import SpecSizes


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


@dataclass(slots=True, eq=False)
class Seat:
    """What the device keeps of one running request, and what its host has been told of it."""

    admission: NewRequest
    tokens: list[int]
    computed: int = 0
    drafts: list[int] = field(default_factory=list)
    pages: list[dict[int, int]] = field(default_factory=list)  # by group: column → page
    unread: int = 0  # its spans in steps that nobody has read
    seen: int = 0  # tokens that were read


@dataclass(frozen=True, slots=True)
class Given:
    """A span as it was when the step was launched."""

    span: SpanPlan
    seat: Seat
    pages: list[dict[int, int]]


class FakeDisk:
    """Of the tiers: engine.pages.host.Disk, and what is in the files."""

    def __init__(self) -> None:
        self.files: dict[tuple[int, bytes], list[int | None]] = {}
        self.full = False
        self.damaged: set[bytes] = set()  # files that cannot be read

    def has(self, group: int, key: bytes) -> bool:
        return (group, key) in self.files

    def remove(self, group: int, key: bytes) -> None:
        self.files.pop((group, key), None)

    def clear(self) -> None:
        self.files.clear()


@dataclass(slots=True)
class FakeStep:
    runner: FakeRunner
    given: list[Given]
    made: StepResult | None = None
    error: Exception | None = None
    ended: None = None

    def result(self) -> StepResult:
        self.runner.run_until(self)
        if self.error is not None:
            raise self.error
        assert self.made is not None
        for given, result in zip(self.given, self.made.spans, strict=True):
            given.seat.unread -= 1
            given.seat.seen += len(result.tokens)
        return StepResult(self.made.spans, self.runner.transferred(bool(self.given)))


class FakeRunner:
    """`accuracy` is the chance that a draft is right, decided by (`seed`, history): the same after a preemption.

    The device does what it was told in the order in which it was told, as late as it may: when somebody waits for the result. So
    whatever the host changes in between shows, if the engine relied on what it could not know.
    """

    def __init__(
        self, *, max_drafts: int, num_pages: Sequence[int], page_size: int, windows: Sequence[int | None] = (None,), vocab: int = 50,
        accuracy: float = 0.7, seed: int = 0, noisy: bool = False,
    ) -> None:  # fmt: skip
        self.max_drafts = max_drafts
        self.sizes = SpecSizes(steps=max_drafts, num_proposed=max_drafts, written=max_drafts)
        self.page_size = page_size
        self.vocab = vocab
        self.accuracy = accuracy
        self.seed = seed
        self.noisy = noisy
        self.windows = windows
        self.kv: list[list[int | None]] = [[None] * (count * page_size) for count in num_pages]  # by group
        self.seats: dict[int, Seat] = {}
        self.steps: list[list[tuple[str, int, int, int]]] = []  # per step (id, start, length, drafts) of each span
        self.fail_ids: set[str] = set()  # requests whose logits are not finite
        self.refuse_ids: set[str] = set()  # requests that cannot be seated
        self.raise_at: set[int] = set()  # steps that raise half-way
        self.fault: Exception = RuntimeError("the device is unwell")  # what they raise
        self.processors = False
        self.disk = FakeDisk()
        self.blocks: dict[tuple[int, int], list[int | None]] = {}  # of host memory
        self.moving: list[Transfer] = []  # loads, spills and fetches that have not ended
        self.patience = 2  # how many results a transfer takes
        self.reads = 0
        self.queue: deque[Callable[[], object]] = deque()
        self.while_running: Callable[[], None] = lambda: None  # called in the middle of each step

    def launch(self, plan: StepPlan) -> FakeStep:
        assert plan.draft_depth <= self.max_drafts
        self._transfer(plan.transfers)
        for new_request in plan.new_requests:
            assert new_request.num_tokens and any(span.req_idx == new_request.req_idx for span in plan.spans)
            # Found in the cache is what whole pages have; of these one token may be computed again, so that something is.
            assert new_request.num_shared_tokens % self.page_size == 0 and new_request.num_computed_tokens in (
                new_request.num_shared_tokens,
                new_request.num_shared_tokens - 1,
            )
            tables: list[dict[int, int]] = [{} for _ in self.windows]
            tokens = new_request.request.prompt + new_request.output_ids
            self.seats[new_request.req_idx] = Seat(new_request, tokens, new_request.num_computed_tokens, pages=tables, seen=len(tokens))
        for group, req_idx, column, page in plan.new_blocks:
            seat = self.seats[req_idx]
            table = seat.pages[group]
            assert any(span.req_idx == req_idx for span in plan.spans)
            # In the next column, or an earlier one: what others have computed takes the place of its own.
            assert column <= max(table) + 1 if table else self.windows[group] is not None or column == 0
            fresh = [page] if self._is_own(seat, table.get(column), column) else []
            table[column] = page
            self.queue.append(partial(self._forget, group, fresh))
        given = [Given(span, self.seats[span.req_idx], [dict(table) for table in self.seats[span.req_idx].pages]) for span in plan.spans]
        self._check_apart(given)
        self.steps.append([(each.seat.admission.id, each.span.start, each.span.num_tokens, each.span.num_draft_tokens) for each in given])
        for each in given:
            self._check(each)
            each.seat.unread += 1
        step = FakeStep(self, given)
        raises = len(self.steps) in self.raise_at
        self.queue.append(lambda: self._execute(step, plan.draft_depth, raises))
        return step

    def _transfer(self, transfers: Sequence[Transfer]) -> None:
        """Nothing that is under way is where it will be before somebody is told that it is, and until then it must not change where it
        was."""
        for each in transfers:
            if each.kind == "save":
                self.queue.append(partial(self._save, each))
            if each.kind == "load":
                self.queue.append(partial(self._forget, each.group, [each.page]))
            elif each.kind == "fetch":
                self.queue.append(partial(self.blocks.pop, (each.group, each.block), None))
            self.queue.append(partial(self.moving.append, each))

    def _save(self, each: Transfer) -> None:
        page = each.page * self.page_size
        self.blocks[each.group, each.block] = self.kv[each.group][page : page + self.page_size]

    def transferred(self, busy: bool) -> list[Transferred]:
        """Those that end now, in an order of their own."""
        self.reads += 1
        if busy and draw("transfers", self.reads, below=self.patience + 1):
            return []
        count = len(self.moving) if busy else max(1, len(self.moving) // 2)
        ended = sorted(self.moving, key=lambda each: draw(each.number, below=1000))[:count]
        for each in ended:
            self.moving.remove(each)
        return [Transferred(each, self._end(each), 0.001, 100) for each in ended]

    def _end(self, each: Transfer) -> bool:
        block = each.group, each.block
        if each.kind == "load":
            content = self.blocks[block]
            assert None not in content and -1 not in content, "a page that is not complete was kept"
            self.kv[each.group][each.page * self.page_size : (each.page + 1) * self.page_size] = content
        elif each.kind == "spill":
            if self.disk.full:
                return False
            self.disk.files[each.group, each.key] = list(self.blocks[block])
        elif each.kind == "fetch" and (each.key in self.disk.damaged or (each.group, each.key) not in self.disk.files):
            return False
        elif each.kind == "fetch":
            self.blocks[block] = list(self.disk.files[each.group, each.key])
        return True

    def run_until(self, step: FakeStep) -> None:
        while step.made is None and step.error is None:
            self.queue.popleft()()

    def _execute(self, step: FakeStep, draft_depth: int, raises: bool) -> None:
        made = []
        for row, each in enumerate(step.given):
            if raises and row >= len(step.given) // 2:
                step.error = self.fault
                return
            made.append(self._run(each, draft_depth))
        self.while_running()
        step.made = StepResult(made)

    def _is_own(self, req_idx: Seat, before: int | None, column: int) -> bool:
        """Whether a page that a plan names is a new one, to which nothing was written yet."""
        return before is None and column * self.page_size >= req_idx.admission.num_shared_tokens

    def _check_apart(self, given: list[Given]) -> None:
        """A page to which a span may write is in no other's table."""
        for group, window in enumerate(self.windows):
            tables = [
                {column: page for column, page in each.pages[group].items() if column >= self._low(window, each.span.start)}
                for each in given
            ]
            readers = Counter(page for table in tables for page in table.values())
            for each, table in zip(given, tables, strict=True):
                first = max(each.span.start, each.seat.admission.num_shared_tokens) // self.page_size
                assert all(readers[page] == 1 for column, page in table.items() if column >= first), "a page has two holders"
        assert len({each.span.req_idx for each in given}) == len(given)

    def _check(self, given: Given) -> None:
        span, req_idx = given.span, given.seat
        assert span.num_tokens >= 1 and span.num_draft_tokens <= self.max_drafts and (span.samples or span.num_draft_tokens == 0)
        assert req_idx.seen < req_idx.admission.max_num_tokens, "its end was read"
        assert not (self.lockstep(req_idx) and req_idx.unread), "the host had no say"
        beyond = 2 * (self.max_drafts + 1) if span.drafts_next else 0
        assert all((max(table) + 1) * self.page_size >= span.start + span.num_rows + beyond for table in given.pages)

    def lockstep(self, req_idx: Seat) -> bool:
        return self.processors or req_idx.admission.request.sampling.grammar is not None

    def _low(self, window: int | None, start: int) -> int:
        """The first column that a row at `start` sees."""
        return 0 if window is None else max(0, start - window + 1) // self.page_size

    def _forget(self, group: int, pages: list[int]) -> None:
        """What pages held before they were given again is nobody's."""
        for page in pages:
            self.kv[group][page * self.page_size : (page + 1) * self.page_size] = [None] * self.page_size

    def _slot(self, table: dict[int, int], index: int) -> int:
        return table[index // self.page_size] * self.page_size + index % self.page_size

    def _store(self, pages: list[dict[int, int]], index: int, token: int) -> None:
        for kv, table in zip(self.kv, pages, strict=True):
            kv[self._slot(table, index)] = token

    def _read(self, pages: list[dict[int, int]], end: int) -> list[int | None]:
        """The tokens before `end`, as the first group has them; the others must have the same in their windows."""
        read, *windows = (
            [kv[self._slot(table, i)] for i in range(0 if window is None else max(0, end - window), end)]
            for kv, table, window in zip(self.kv, pages, self.windows, strict=True)
        )
        assert all(seen == read[len(read) - len(seen) :] for seen in windows), "a window shows another text"
        return read

    def _run(self, given: Given, draft_depth: int) -> SpanResult:
        span, req_idx, pages = given.span, given.seat, given.pages
        new_request = req_idx.admission
        if new_request.id in self.refuse_ids:
            return SpanResult([], 0, 0, error="the engine could not start this request: ValueError")
        assert span.start <= req_idx.computed and (span.samples or span.start == req_idx.computed)
        room = new_request.max_num_tokens - len(req_idx.tokens)
        proposed = req_idx.drafts[: max(room - 1, 0)] if span.samples else []
        assert len(proposed) <= span.num_draft_tokens or room <= 0, "drafts were trimmed"
        start = req_idx.computed
        rows = req_idx.tokens[start : start + span.num_tokens] + proposed
        for i, token in enumerate(rows, start):
            if i >= new_request.num_shared_tokens:
                self._store(pages, i, token)
        committed = self._verify(new_request.request.seed, pages, start + span.num_tokens, proposed) if span.samples else []
        accepted = max(len(committed) - 1, 0)
        req_idx.computed = start + span.num_tokens + accepted
        req_idx.tokens += committed
        req_idx.drafts = self._propose(req_idx.tokens, draft_depth) if span.drafts_next else []
        for i in range(len(req_idx.drafts)):  # drafting writes too, after what is committed
            self._store(pages, req_idx.computed + i, -1)
        return SpanResult(
            committed,
            accepted,
            len(req_idx.drafts),
            proposed,
            parents=list(range(len(proposed))),
            sources=[int(Source.MODEL)] * len(proposed),
            path=list(range(1, accepted + 1)),
            error=NOT_FINITE if new_request.id in self.fail_ids and span.samples else None,
        )

    def _verify(self, seed: int, pages: list[dict[int, int]], end: int, proposed: list[int]) -> list[int]:
        """Accepted drafts and one more, from what is in the pages."""
        committed: list[int] = []
        for draft in [*proposed, None]:
            read = self._read(pages, end + len(committed))
            assert None not in read and -1 not in read, "a row reads KV that nobody wrote"
            token = self._choose([token for token in read if token is not None], seed, draft)
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

    def _propose(self, tokens: list[int], draft_depth: int) -> list[int]:
        history = list(tokens)
        for _ in range(draft_depth):
            right = draw("draft", self.seed, history, below=1000) < 1000 * self.accuracy
            history.append((next_token(history, self.vocab) + (0 if right else 1)) % self.vocab)
        return history[len(tokens) :]
