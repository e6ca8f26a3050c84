"""The host's side of a step: which rows are computed together, launched without waiting, and read when the result is asked for.

The steps themselves are step.py; what is replayed instead of launched, graphs.py.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
from torch import Tensor

from mtpserve.core.batch import Logprobs, Span, SpanResult, StepResult
from mtpserve.core.draft_sizes import DraftSizes
from mtpserve.core.sequence import Sequence
from mtpserve.runtime.graphs import StepGraphs
from mtpserve.runtime.inputs import rows_of, seat_of, wanted_of
from mtpserve.runtime.publish import Columns, prompt_logprobs, results
from mtpserve.runtime.rules import asks
from mtpserve.runtime.sampling import Asked, SeatSampling
from mtpserve.runtime.step import Step
from mtpserve.runtime.transfer import Download


@dataclass(frozen=True, slots=True)
class Part:
    """Spans that were computed together, and their copies for the host on the way."""

    places: Seq[int]  # of its spans among the step's
    spans: Seq[Span]
    columns: Columns
    table: Download
    waiting: Download | Seq[int]  # drafts of those of its spans that are drafted for
    logprobs: tuple[Download, ...]
    scored: dict[int, tuple[Download, ...]]

    def read(self) -> list[SpanResult]:
        logprobs = Logprobs(*(part.wait() for part in self.logprobs)) if self.logprobs else None
        scored = {r: Logprobs(*(part.wait() for part in parts)) for r, parts in self.scored.items()}
        table = self.table.wait()
        waiting = self.waiting.wait().tolist() if isinstance(self.waiting, Download) else self.waiting
        return results(self.spans, self.columns, table, waiting, logprobs, scored)


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """core.protocols.Launched."""

    parts: Seq[Part]

    def result(self) -> StepResult:
        found = {place: result for part in self.parts for place, result in zip(part.places, part.read(), strict=True)}
        return StepResult([found[place] for place in range(len(found))])


class Runner:
    """core.protocols.ModelRunner. With `graphs`, decoding requests are replayed and the others run beside them.

    `overlapped`: the engine plans with bounds anyway, so nobody waits to learn how many drafts there are.
    """

    def __init__(self, step: Step, sampling: SeatSampling, graphs: StepGraphs | None = None, overlapped: bool = False) -> None:
        self.step, self.sampling, self.graphs, self.overlapped = step, sampling, graphs, overlapped
        self.drafter, self.seats = step.drafter, step.seats

    @property
    def sizes(self) -> DraftSizes:
        return self.drafter.sizes

    def lockstep(self, seq: Sequence) -> bool:
        return seq.grammar is not None or bool(self.sampling.rules.processors)

    def admit(self, seq: Sequence) -> None:
        self.seats.admit(seq)
        self.sampling.admit(seq)

    def release(self, seats: Seq[int]) -> None:
        self.seats.release(seats)

    @torch.inference_mode()
    def launch(self, spans: Seq[Span], want: int) -> LaunchedStep:
        for span in spans:
            self.seats.extend_pages(span.seq)
        if self.graphs is None:
            return LaunchedStep([self.run(range(len(spans)), spans, want)])
        replayed = [r for r, span in enumerate(spans) if self.replayable(span)][: self.graphs.most]
        rest = sorted(set(range(len(spans))).difference(replayed))
        # What cannot be replayed after all is launched by itself: beside requests with grammars its drafts would become trees.
        parts = [self.replay(replayed, [spans[r] for r in replayed], want, self.graphs)] if replayed else []
        if rest:
            parts.append(self.run(rest, [spans[r] for r in rest], want))
        return LaunchedStep(parts)

    def replayable(self, span: Span) -> bool:
        seq = span.seq
        return span.samples and span.length == 1 and seq.sampling.logprobs is None and seq.plain and not self.has_rules(seq)

    def has_rules(self, seq: Sequence) -> bool:
        return bool(self.sampling.rules.processors) or asks(seq)

    def run(self, places: Seq[int], spans: Seq[Span], want: int) -> Part:
        sampler = self.sampling.for_batch([span.seq for span in spans], self.drafter.coupled)
        rows = rows_of(spans, want, self.seats, sampler, self.sizes.depth if self.sizes.branching else None, self.drafter.lag)
        verified = self.step.verify(rows)
        table = Download(verified.table)
        logprobs = downloads(verified.verdict.logprobs)
        scored = {r: downloads(found) for r, found in prompt_logprobs(spans, verified.hidden, self.step.model).items()}
        drafts = self.step.propose(rows, verified)
        count, trees = (None, False) if drafts is None else (drafts.count, drafts.tree is not None)
        waiting = self.note([span for span in spans if span.drafts_next], want, count, trees)
        return Part(places, spans, verified.columns, table, waiting, logprobs, scored)

    def replay(self, places: Seq[int], spans: Seq[Span], want: int, graphs: StepGraphs) -> Part:
        hosts, wanted = [seat_of(span) for span in spans], [wanted_of(span, want) for span in spans]
        asked = Asked.of([span.seq for span in spans], self.drafter.coupled)
        trees = not self.seats.branching.isdisjoint(hosts)
        outcome = graphs.replay(hosts, wanted, max(span.drafts for span in spans), asked, trees)
        if outcome is None:
            return self.run(places, spans, want)
        waiting = self.note(spans, want, outcome.count, outcome.trees)
        return Part(places, spans, outcome.columns, Download(outcome.table), waiting, (), {})

    def note(self, spans: Seq[Span], want: int, count: Tensor | None, trees: bool) -> Download | Seq[int]:
        """What is known on the host about the drafts that now wait. `count` [spans, and padding], None where nothing was drafted."""
        if count is None:
            return [0] * len(spans)
        self.seats.branch([seat_of(span) for span in spans], trees)
        if self.overlapped:
            return [self.sizes.proposals(wanted_of(span, want), span.seq.plain) for span in spans]
        return Download(count)


def downloads(found: Logprobs | None) -> tuple[Download, ...]:
    parts: tuple[Tensor, ...] = () if found is None else (found.chosen, found.ranks, found.top_ids, found.top)
    return tuple(Download(part) for part in parts)
