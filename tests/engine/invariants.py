"""What must hold after each step that the scheduler has planned, whatever was asked of it: watched from outside, by what it did."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from mtpserve.cache.groups import PageGroups
from mtpserve.core.state.request_state import RequestState
from mtpserve.engine.integrity import check_integrity
from mtpserve.engine.queue import MAX_OVERTAKEN, UNLIMITED
from mtpserve.engine.scheduler import Scheduler
from mtpserve.engine.spans import decodes, ends
from mtpserve.engine.steps import ScheduledStep


class WatchedScheduler(Scheduler):
    """A scheduler that checks its promises itself. After each plan: what takes as long as the step is wide, and all that it holds once
    in `every` steps. Give `watch` to the simulation."""

    def __init__(self, pages: PageGroups, *, every: int = 1, **options: Any) -> None:
        super().__init__(pages, **options)
        self.admission._admit_next = partial(self._watch_admission, self.admission._admit_next)  # type: ignore[method-assign]
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

    def plan(self, draft_depth: int) -> ScheduledStep:
        planned = super().plan(draft_depth)
        self._steps += 1
        return planned

    def watch(self, planned: ScheduledStep) -> None:
        self._check_budget(planned)
        self._check_turns(planned)
        self._check_pages(planned)
        if self._steps % self._every == 0:
            check_integrity(self)
            self.checked += 1

    # -------------------------------------------------------------------------------------------------- budgets

    def _check_budget(self, planned: ScheduledStep) -> None:
        spans = planned.plan.spans
        assert sum(span.num_rows for span in spans) <= self._options["token_budget"]
        assert len({span.req_idx for span in spans}) == len(spans) <= self._options["max_running"]
        assert all(span.num_tokens >= 1 and span.num_draft_tokens <= self._options["max_drafts"] for span in spans)
        if self.service.long_prompt_tokens is None:
            return
        # `launched` counts the step already. The last token of a prompt is a row like one that decodes.
        long = [
            span.num_rows
            for req, span in zip(planned.reqs, spans, strict=True)
            if req.prefill_end - req.cache.num_shared_tokens > self.service.long_prompt_tokens and span.start < req.prefill_end - 1
        ]
        assert len(long) <= self.service.max_long_prompts
        assert len(self.live) == 1 or all(width <= self.service.long_chunk_tokens for width in long)

    def _check_turns(self, planned: ScheduledStep) -> None:
        """A decoding request that finds no room is first in the next step, so it waits for no more steps than take all the others."""
        served = {req.id: self._steps for req in planned.reqs}
        self._served = {req.id: served.get(req.id) or self._served.get(req.id, self._steps) for req in self.running}
        widest = self._options["max_drafts"] + 1
        rounds = 2 + len(self.running) // max(self._options["token_budget"] // widest, 1)
        for req in self.running:
            if decodes(req) and not ends(req):
                assert self._steps - self._served[req.id] <= rounds, (
                    f"{req.id} has had no rows for {self._steps - self._served[req.id]} steps"
                )

    # ---------------------------------------------------------------------------------------------------- pages

    def _check_pages(self, planned: ScheduledStep) -> None:
        """A page that a step writes has one holder; there is a page for each row, and for what the device may write on its own."""
        size = self.pages.page_size
        for req, span in zip(planned.reqs, planned.plan.spans, strict=True):
            for group, held in zip(self.pages.groups, req.cache.blocks, strict=True):
                assert held.end * size >= span.start + span.num_rows
                first = max(span.start, req.cache.num_shared_tokens) // size
                last = (span.start + span.num_rows - 1) // size
                for column in range(max(first, held.first), last + 1):
                    page = held.pages[column - held.first]
                    assert group.allocator._references[page] == 1, f"page {page} is written for {req.id} and held by others"

    # ---------------------------------------------------------------------------------------------------- order

    def _watch_admission(
        self, admit: Callable[[list[RequestState], bool], RequestState | None], running: list[RequestState], long: bool
    ) -> RequestState | None:
        """Who is passed over waits for pages that another computes or that are loaded, or is long while enough long ones run."""
        ranked = list(self.waiting[:200]) if self._steps % self._every == 0 else []
        excused = {req.id for req in ranked if self._may_be_passed(req, long)}
        req = admit(running, long)
        if self.kv_connector is not None:
            # Pages that others load may have taken the place of what it had found.
            excused |= {each.id for each in ranked if self._may_be_passed(each, long)}
        if req is not None and not self.service.longest_prefix:
            for other in ranked:
                if other.queue.key >= req.queue.key:
                    break
                assert other.id in excused, f"{req.id} was served before {other.id}"
        if req is not None:
            self.overtaken = max(self.overtaken, req.queue.num_overtaken)
            # The first in order may be one of several that were overtaken so often.
            bound = MAX_OVERTAKEN + self._options["max_running"]
            assert req.queue.num_overtaken <= bound or req.id in self._passed, (
                f"{req.queue.num_overtaken} later ones were served before {req.id}"
            )
            self._passed.discard(req.id)
            self._passed.update(excused - {req.id})
        return req

    def _may_be_passed(self, req: RequestState, long: bool) -> bool:
        columns = self.pages.matched(req.cache.block_hashes)
        coming = columns < len(req.cache.block_hashes) and req.cache.block_hashes[columns] in self.prefixes._pending_keys
        if coming or (
            self.kv_connector is not None and self.pages.matched(req.cache.block_hashes, lookup=self.kv_connector.has_page) > columns
        ):
            return True
        if self.kv_connector is not None and self.kv_connector.is_loading(req.cache.kv_load):  # pages that the tier has dropped since
            return True
        return not long and self.admission.is_long(req, columns * self.pages.page_size)

    # ------------------------------------------------------------------------------------------------------ end

    def check_empty(self) -> None:
        """Everybody has ended: every page and seat is free."""
        check_integrity(self)
        assert not self.live and not self.running and not self.waiting
        assert self.pages.num_used_pages == 0 and self.num_free_slots == self._options["max_running"]
        assert not self.prefixes._pending_keys, "pages are waited for that nobody computes"
        if self.kv_connector is not None:
            assert not self.kv_connector.pending and not any(pins for host in self.kv_connector.groups for pins in host.pins)
            assert all(sorted([*host.free, *host.blocks.values()]) == list(range(len(host.pins))) for host in self.kv_connector.groups)
