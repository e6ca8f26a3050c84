"""The host's side of a step: requests are seated, rows computed together, launched without waiting, and read when the engine needs
the results.

The steps themselves are step.py; what is replayed instead of launched, graphs.py.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from mtpserve.core.batch import Keep, Logprobs, Want
from mtpserve.core.draft_sizes import DraftShape, DraftSizes
from mtpserve.core.errors import InvalidRequest
from mtpserve.core.plan import KeptState, SpanPlan, SpanResult, StepPlan, StepResult
from mtpserve.core.protocols.grammars import GrammarCompiler
from mtpserve.core.protocols.models import Drafter
from mtpserve.runtime.admissions import seat, start_states
from mtpserve.runtime.graphs.graphs import StepGraphs
from mtpserve.runtime.graphs.prompt_rows import Prompts
from mtpserve.runtime.inputs import Rows, after_others, is_first, row_layout
from mtpserve.runtime.paging import Transfers
from mtpserve.runtime.publish import Columns, prompt_logprobs, results
from mtpserve.runtime.records import Record
from mtpserve.runtime.sampling.rules import BatchRules
from mtpserve.runtime.sampling.sampling import Asked, BatchSampler, SeatSampling
from mtpserve.runtime.step import Step
from mtpserve.runtime.transfer import Download, Moment, moment, staged
from mtpserve.spec.build import DraftersByShape

log = logging.getLogger(__name__)

NOWHERE = KeptState(0, 0, 0)
# Requests whose deferred rows, up to 64 of each, are absorbed at once: memory is planned for a step's rows. On a CPU the first 1,549 rows
# took 0.1 s, for fresh memory, and later ones 8 ms. A GPU's parts are larger, as each is launched kernel by kernel.
CAUGHT_UP = {"cpu": 8, "cuda": 32}

Span = tuple[int, SpanPlan, Record]  # its place in the plan


@dataclass(frozen=True, slots=True)
class Part:
    """Spans that were computed together, and their copies for the host on the way."""

    spans: Seq[Span]
    columns: Columns
    table: Download
    waiting: Download | Seq[int]  # drafts of those of its spans that are drafted for
    logprobs: tuple[Download, ...] = ()
    scored: dict[int, tuple[Download, ...]] | None = None

    def read(self) -> list[SpanResult]:
        """Called once: the records get their tokens."""
        _, plans, records = zip(*self.spans, strict=True)
        logprobs = Logprobs(*(part.wait() for part in self.logprobs)) if self.logprobs else None
        scored = {r: Logprobs(*(part.wait() for part in parts)) for r, parts in (self.scored or {}).items()}
        table = self.table.wait()
        waiting = self.waiting.wait().tolist() if isinstance(self.waiting, Download) else self.waiting
        made = results(plans, records, self.columns, table, waiting, logprobs, scored)
        for record, result in zip(records, made, strict=True):
            record.tokens += result.tokens
        return made


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """core.protocols.Launched."""

    parts: Seq[Part]
    refused: Seq[Span]
    transfers: Transfers | None = None
    ended: Moment | None = None

    def result(self) -> StepResult:
        by_place = {place: SpanResult([], 0, 0, error=record.error) for place, _, record in self.refused}
        for part in self.parts:
            by_place |= {place: result for (place, _, _), result in zip(part.spans, part.read(), strict=True)}
        ended = [] if self.transfers is None else self.transfers.ended(idle=not by_place)
        return StepResult([by_place[place] for place in range(len(by_place))], ended)


class Runner:
    """core.protocols.ModelRunner. With `graphs`, decoding requests are replayed and the others run beside them.

    `overlapped`: the engine plans with bounds anyway, so that it does not wait for the number of drafts.
    """

    def __init__(
        self, step: Step, sampling: SeatSampling, graphs: StepGraphs | None = None, overlapped: bool = False,
        grammars: GrammarCompiler | None = None, transfers: Transfers | None = None,
        drafters: DraftersByShape | None = None,
    ) -> None:  # fmt: skip
        self.transfers, self.drafters = transfers, drafters
        self.step, self.sampling, self.graphs, self.overlapped, self.grammars = step, sampling, graphs, overlapped, grammars
        self.drafter, self.seats = step.drafter, step.seats
        self.records: dict[int, Record] = {}  # by seat
        self.last: tuple[Seq[Record], Asked] = (), Asked()
        self.keeping: dict[int, KeptState] = {}  # of the step that is launched, by seat
        self.captured: dict[Drafter, StepGraphs] = {}  # with `reshape`: of each drafter that was used

    def reshape(self, shape: DraftShape) -> None:
        """Steps that were captured are kept, for the next time that this shape is wanted."""
        assert self.drafters is not None
        drafter = self.drafters.of(shape)
        self.drafter = self.step.drafter = drafter
        if not drafter.coupled and drafter.sizes.steps:
            self.seats.keep_probs(self.drafters.largest.depth, self.step.model.arch.vocab)
        self.last = (), Asked()
        if self.graphs is not None:
            if drafter not in self.captured:
                self.captured[drafter] = self.graphs.again()
            self.graphs = self.captured[drafter]

    def check(self) -> None:
        """No other process is needed."""

    def close(self) -> None:
        """Nothing is held but memory."""

    @property
    def sizes(self) -> DraftSizes:
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
        self.keeping = {kept.seat: kept for kept in plan.keeps}
        spans = [(place, span, self.records[span.seat]) for place, span in enumerate(plan.spans)]
        for _, _, record in spans:
            if record.grammar is not None:
                self.follow(record)
        refused = [span for span in spans if span[2].error is not None]
        if refused:
            spans = [span for span in spans if span[2].error is None]
        parts: list[Part] = []
        late = [span for _, span, _ in spans if span.late]
        each = CAUGHT_UP[self.seats.device.type]
        for first in range(0, len(late), each):
            self.catch_up(late[first : first + each])
        if spans:
            parts += self.compute(spans, plan.want)
        return LaunchedStep(parts, refused, self.transfers, moment(self.seats.device))

    def compute(self, spans: Seq[Span], want: int) -> list[Part]:
        """Replayed where it can be, in one pass where the graphs have prompts and decoding together."""
        if (graphs := self.graphs) is None:
            return [self.run(spans, want)]
        decoding = [span for span in spans if self.replayable(span)][: graphs.most]
        places = {place for place, _, _ in decoding}
        others = [span for span in spans if span[0] not in places]
        prompts = others if all(map(self.ends_prompt, others)) else []
        chains = self.seats.branching.isdisjoint(plan.seat for _, plan, _ in spans)
        if prompts and decoding and graphs.has_mixed_steps and chains:
            return self.replay(decoding, want, graphs, prompts)
        if decoding and len({plan.deferred for _, plan, _ in decoding}) > 1:
            return [self.run(spans, want)]  # a graph of requests that decode keeps all their rows for later, or none
        parts = self.replay(decoding, want, graphs) if decoding else []
        if prompts:
            return parts + self.replay([], want, graphs, prompts)
        return [*parts, self.run(others, want)] if others else parts

    def catch_up(self, plans: Seq[SpanPlan]) -> None:
        layout = row_layout(tuple((plan.late, 0, False) for plan in plans), self.seats.device)
        (seat_ids,) = kept((tuple(plan.seat for plan in plans),), self.seats.device)
        self.step.catch_up(layout, seat_ids, BatchSampler(self.sampling, Asked()))

    def admit(self, plan: StepPlan) -> None:
        if not plan.admissions and not plan.pages:
            return
        records = [Record(admission) for admission in plan.admissions]
        for record in records:
            self.records[record.seat] = record
            if (spec := record.sampling.grammar) is None:
                continue
            try:
                if self.grammars is None:
                    raise InvalidRequest(f"{spec.kind} needs the model's tokenizer, which this runner has not", spec.kind)
                record.grammar = self.grammars.compile(spec)
            except Exception as error:
                log.exception("request %s could not be seated", record.id)
                record.refuse(error)
        seated = [record for record in records if record.error is None]
        seat(seated, plan.pages, self.seats, self.sampling)
        if self.step.states is not None and seated:
            start_states([record.admission for record in seated], self.step.states)

    def follow(self, record: Record) -> None:
        try:
            record.advance_grammar()
        except ValueError as error:
            log.exception("the grammar of request %s does not allow its text", record.id)
            record.refuse(error)

    def replayable(self, span: Span) -> bool:
        """Among others that decode."""
        _, plan, record = span
        return plan.length == 1 and self.is_plain(plan, record) and not is_first(plan, record, self.drafter.lag)

    def ends_prompt(self, span: Span) -> bool:
        """It can be replayed among prompts. One that does not end yet has no pages where drafts would be stored."""
        _, plan, record = span
        scored = record.sampling.prompt_logprobs is not None
        stored = plan.start >= record.admission.shared
        return plan.drafts == 0 and not plan.deferred and stored and not scored and self.is_plain(plan, record)

    def is_plain(self, plan: SpanPlan, record: Record) -> bool:
        plain = record.plain and record.sampling.logprobs is None and not record.has_rules and not self.processors
        return plan.samples and plain

    def run(self, spans: Seq[Span], want: int) -> Part:
        _, plans, records = zip(*spans, strict=True)
        rows = self.rows(plans, records, want)
        computed = self.step.forward(rows)
        table = Download(computed.table)
        logprobs = downloads(computed.verdict.logprobs)
        scored = {r: downloads(scores) for r, scores in prompt_logprobs(plans, records, computed.hidden, self.step.model).items()}
        drafts = self.step.propose(rows, computed)
        count, trees = (None, False) if drafts is None else (drafts.count, drafts.tree is not None)
        drafted = [(plan, record) for plan, record in zip(plans, records, strict=True) if plan.drafts_next]
        waiting = self.note(drafted, want, count, trees)
        return Part(spans, computed.columns, table, waiting, logprobs, scored)

    def rows(self, plans: Seq[SpanPlan], records: Seq[Record], want: int) -> Rows:
        drafting = [r for r, plan in enumerate(plans) if plan.drafts_next]
        wanted, most = [records[r].wanted(want) for r in drafting], self.most([plans[r] for r in drafting], want) if want else []
        hosts = [plan.seat for plan in plans]
        groups = self.sampling.rules.groups(records)
        more = [] if groups is None else groups.lists
        resumed, unstored = after_others(plans, records, self.drafter.lag)
        known = tuple(hosts), tuple(drafting), tuple(wanted), tuple(most), tuple(resumed), tuple(unstored)
        inputs = staged([*known, *more], self.seats.device) if more else kept(known, self.seats.device)
        seat_ids, draft_spans, each, most_each, resumed_spans, unstored_spans, *lists = inputs
        rules = None if groups is None else BatchRules(self.sampling.rules, records, groups, lists)
        layout = tuple((plan.length, plan.drafts, plan.samples) for plan in plans)
        return Rows(
            row_layout(layout, self.seats.device, self.sizes.depth if self.sizes.branching else None),
            seat_ids,
            None if len(drafting) == len(plans) else draft_spans,
            Want(each, max(wanted, default=0), most_each if most else None, *deferral(plans)),
            not self.seats.branching.isdisjoint(hosts),
            BatchSampler(self.sampling, self.asked(records), rules),
            resumed_spans if resumed else None,
            unstored_spans if unstored else None,
            self.seats.predicted(hosts),
            self.keep_of(plans),
        )

    def keep_of(self, plans: Seq[SpanPlan]) -> Keep | None:
        if self.keeping.keys().isdisjoint(plan.seat for plan in plans):
            return None
        return Keep(*staged(self.kept_of(plans), self.seats.device))

    def kept_of(self, plans: Seq[SpanPlan]) -> list[list[int]]:
        """Of each span: after how many tokens a state is kept, and which one."""
        kept = [self.keeping.get(plan.seat, NOWHERE) for plan in plans]
        return [[each.tokens for each in kept], [each.state for each in kept]]

    def asked(self, records: Seq[Record]) -> Asked:
        """The same object as in the last step where the requests are the same, as in steady decoding."""
        if records != self.last[0]:
            self.last = records, Asked.of(records, self.drafter.coupled)
        return self.last[1]

    def replay(self, decoding: Seq[Span], want: int, graphs: StepGraphs, prompts: Seq[Span] = ()) -> list[Part]:
        """All `decoding` spans are `replayable`, all `prompts` `ends_prompt`."""
        spans = [*decoding, *prompts]
        _, plans, records = zip(*spans, strict=True)
        hosts, wanted = [plan.seat for plan in plans], [record.wanted(want) for record in records]
        trees = not self.seats.branching.isdisjoint(hosts)
        deferred, drafts = any(plan.deferred for plan in plans), max(plan.drafts for plan in plans)
        kept, lengths = () if self.step.states is None else self.kept_of(plans), None
        if prompts:
            first = len(decoding)
            lengths = Prompts([plan.length for plan in plans[first:]], after_others(plans[first:], records[first:], self.drafter.lag)[0])
        # Without requests that decode: what steady decoding asks for is kept.
        asked = self.asked(records) if decoding else Asked.of(records, self.drafter.coupled)
        outcome = graphs.replay(hosts, wanted, self.most(plans, want), drafts, want, asked, trees, deferred, kept, lengths)
        if outcome is None:
            # It is launched by itself: beside requests with grammars its drafts would become trees.
            return [self.run(spans, want)]
        parts = []
        for some, first in ((decoding, 0), (prompts, outcome.decoding)):
            if some:
                count = None if outcome.count is None else outcome.count[first:]
                waiting = self.note([(plan, record) for _, plan, record in some], want, count, outcome.trees)
                parts.append(Part(some, outcome.columns, Download(outcome.table[first : first + len(some)]), waiting))
        return parts

    def most(self, plans: Seq[SpanPlan], want: int) -> list[int]:
        """Drafts that the algorithm may give each request after these spans, `want` deep; empty: as many as it has."""
        enough = self.sizes.proposed if self.sizes.trees else want
        if all(plan.most is None or plan.most >= enough for plan in plans):
            return []
        return [self.sizes.proposed if plan.most is None else min(plan.most, self.sizes.proposed) for plan in plans]

    def note(self, drafted: Seq[tuple[SpanPlan, Record]], want: int, count: Tensor | None, trees: bool) -> Download | Seq[int]:
        """What is known on the host about the drafts that now wait. `count` [requests, and padding], None where nothing was drafted."""
        if count is None:
            return [0] * len(drafted)
        self.seats.branch([record.seat for _, record in drafted], trees)
        if self.overlapped:
            return [self.sizes.proposals(record.wanted(want), record.plain, plan.most) for plan, record in drafted]
        return Download(count)


def deferral(plans: Seq[SpanPlan]) -> tuple[bool, bool]:
    """Want.keeps and Want.absorbs."""
    return any(plan.deferred for plan in plans), not all(plan.deferred for plan in plans)


@lru_cache(maxsize=64)
def kept(lists: tuple[tuple[int, ...], ...], device: torch.device) -> list[Tensor]:
    """`staged`, for lists that steady decoding repeats step after step. Nobody writes to these tensors."""
    return staged(lists, device)


def downloads(scores: Logprobs | None) -> tuple[Download, ...]:
    parts: tuple[Tensor, ...] = () if scores is None else (scores.chosen, scores.ranks, scores.top_ids, scores.top)
    return tuple(Download(part) for part in parts)
