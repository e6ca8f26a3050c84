"""What must hold after each step that the scheduler has planned, whatever was asked of it: watched from outside, by what it did."""

from __future__ import annotations

from typing import Any

from mtpserve.cache.groups import PageGroups
from mtpserve.core.sequence import Sequence
from mtpserve.engine.queue import MOST_OVERTAKEN, UNLIMITED
from mtpserve.engine.scheduler import Scheduler
from mtpserve.engine.spans import decodes, ends
from mtpserve.engine.steps import Planned


class WatchedScheduler(Scheduler):
    """A scheduler that checks its promises itself. After each plan: what takes as long as the step is wide, and all that it holds once
    in `every` steps. Give `watch` to the simulation."""

    def __init__(self, pages: PageGroups, *, every: int = 1, **options: Any) -> None:
        super().__init__(pages, **options)
        self._every, self._steps = every, 0
        self._options = options
        self._served: dict[str, int] = {}  # running requests → the last step in which they had rows
        self._before: dict[str, int] = {}  # rows that a request had to compute before it could decode, when the step was planned
        self.overtaken = 0  # times that one request was, at most
        self._passed: set[str] = set()  # who was passed over for one of the reasons that there are
        self.checked = 0  # steps after which everything was checked

    @property
    def service(self) -> Any:
        return self._options.get("service", UNLIMITED)

    def plan(self, want: int) -> Planned:
        planned = super().plan(want)
        self._steps += 1
        return planned

    def watch(self, planned: Planned) -> None:
        self._check_budget(planned)
        self._check_turns(planned)
        self._check_pages(planned)
        if self._steps % self._every == 0:
            self.check_integrity()
            self.checked += 1

    # -------------------------------------------------------------------------------------------------- budgets

    def _check_budget(self, planned: Planned) -> None:
        spans = planned.plan.spans
        assert sum(span.width for span in spans) <= self._options["token_budget"]
        assert len({span.seat for span in spans}) == len(spans) <= self._options["max_running"]
        assert all(span.length >= 1 and span.drafts <= self._options["max_drafts"] for span in spans)
        if self.service.long_prompt is None:
            return
        # `launched` counts the step already. The last token of a prompt is a row like one that decodes.
        long = [
            span.width
            for seq, span in zip(planned.seqs, spans, strict=True)
            if seq.prefill_end - seq.shared > self.service.long_prompt and span.start < seq.prefill_end - 1
        ]
        assert len(long) <= self.service.max_long
        assert len(self.live) == 1 or all(width <= self.service.long_rows for width in long)

    def _check_turns(self, planned: Planned) -> None:
        """A decoding request that finds no room is first in the next step, so it waits for no more steps than take all the others."""
        served = {seq.id: self._steps for seq in planned.seqs}
        self._served = {seq.id: served.get(seq.id) or self._served.get(seq.id, self._steps) for seq in self.running}
        widest = self._options["max_drafts"] + 1
        rounds = 2 + len(self.running) // max(self._options["token_budget"] // widest, 1)
        for seq in self.running:
            if decodes(seq) and not ends(seq):
                assert self._steps - self._served[seq.id] <= rounds, (
                    f"{seq.id} has had no rows for {self._steps - self._served[seq.id]} steps"
                )

    # ---------------------------------------------------------------------------------------------------- pages

    def _check_pages(self, planned: Planned) -> None:
        """A page that a step writes has one holder; there is a page for each row, and for what the device may write on its own."""
        size = self._pages.page_size
        for seq, span in zip(planned.seqs, planned.plan.spans, strict=True):
            for group, held in zip(self._pages.groups, seq.held, strict=True):
                assert held.end * size >= span.start + span.width
                first = max(span.start, seq.shared) // size
                last = (span.start + span.width - 1) // size
                for column in range(max(first, held.first), last + 1):
                    page = held.pages[column - held.first]
                    assert group.allocator._references[page] == 1, f"page {page} is written for {seq.id} and held by others"

    # ---------------------------------------------------------------------------------------------------- order

    def _admit(self, long: bool) -> Sequence | None:
        """Who is passed over waits for pages that another computes or that are loaded, or is long while enough long ones run."""
        ranked = list(self.waiting[:200]) if self._steps % self._every == 0 else []
        excused = {seq.id for seq in ranked if self._may_be_passed(seq, long)}
        seq = super()._admit(long)
        if self._tiers is not None:
            # Pages that others load may have taken the place of what it had found.
            excused |= {each.id for each in ranked if self._may_be_passed(each, long)}
        if seq is not None and not self.service.longest_prefix:
            for other in ranked:
                if other.rank >= seq.rank:
                    break
                assert other.id in excused, f"{seq.id} was served before {other.id}"
        if seq is not None:
            self.overtaken = max(self.overtaken, seq.overtaken)
            # The first in order may be one of several that were overtaken so often.
            bound = MOST_OVERTAKEN + self._options["max_running"]
            assert seq.overtaken <= bound or seq.id in self._passed, f"{seq.overtaken} later ones were served before {seq.id}"
            self._passed.discard(seq.id)
            self._passed.update(excused - {seq.id})
        return seq

    def _may_be_passed(self, seq: Sequence, long: bool) -> bool:
        columns = self._pages.matched(seq.keys)
        coming = columns < len(seq.keys) and seq.keys[columns] in self._prefixes._coming
        if coming or (self._tiers is not None and self._pages.matched(seq.keys, found=self._tiers.found) > columns):
            return True
        if self._tiers is not None and self._tiers.is_loading(seq.loading):  # pages that the tier has dropped since
            return True
        return not long and self._is_long(seq, columns * self._pages.page_size)

    # ------------------------------------------------------------------------------------------------------ end

    def check_empty(self) -> None:
        """Everybody has ended: every page and seat is free."""
        self.check_integrity()
        assert not self.live and not self.running and not self.waiting
        assert self._pages.used == 0 and self.free_seats == self._options["max_running"]
        assert not self._prefixes._coming, "pages are waited for that nobody computes"
        if self._tiers is not None:
            assert not self._tiers.pending and not any(pins for host in self._tiers.groups for pins in host.pins)
            assert all(sorted([*host.free, *host.blocks.values()]) == list(range(len(host.pins))) for host in self._tiers.groups)
