"""The watchdog measures at start and while serving if the draft model works. A broken one changes no text.
Nothing else names it.

    at start        The engine's own requests: the model goes on greedily from a few tokens at full depth, and
                    the share of verifications that accept the first draft is measured, and named where it is
                    below what the model's family reaches.
    while serving   First drafts of the clients' requests are compared with the best before, 32 at a time.
                    Below half of it there is a doubt, and no more than that: clients may have begun to
                    send text that nobody can guess, and one client's random tokens look like a broken head.
    a doubt         is decided by the engine's own requests, the same as at start, on pages that no other
                    request has written. If their drafts are accepted the texts have changed, and the next
                    doubt waits a while. If less than half as many are as at start, the draft model is at
                    fault: that is logged and counted once. Below a quarter, or below 5 %, drafting ends too,
                    and the same requests run again after 30 s, 60 s, … 10 min. Half of what they reached at
                    start is a recovery: drafting begins again.

Where none of these requests gets a seat for 4 s, the clients' drafts decide alone. No single client or text
fulfils their rule: less than 5 % of 512 verifications of 8 requests.

Only the first draft is counted, in a tree the node with the best score. The draft model must have proposed
it: what a grammar forces or a prediction proposes says nothing of the model. Nothing is read from the device
that is not read anyway.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, field
from time import perf_counter

from mtpserve.config.drafters import MTP
from mtpserve.core.errors import EngineBusy
from mtpserve.core.request import Proposal, Request, TokenEvent
from mtpserve.core.sampling import SamplingParams
from mtpserve.core.state.request_state import RequestState
from mtpserve.core.stats.engine_stats import DraftHealth, DraftState
from mtpserve.engine.depth.control import EngineControl
from mtpserve.engine.depth.depth_config import WATCHDOG_CONFIG, WatchdogConfig
from mtpserve.engine.depth.survival import sample_of
from mtpserve.engine.steps import RequestEvent

log = logging.getLogger(__name__)

MIN_PRIORITY = -(2**31)  # before all requests of clients
CAUSES = (
    "the draft model's weights are of another model or damaged, --speculative-draft-model-path "
    "names the wrong checkpoint, or it is not "
    "trained"
)


@dataclass(slots=True)
class FirstDrafts:
    """First drafts of the draft model, and what became of them."""

    config: WatchdogConfig
    verified: int = 0
    accepted: int = 0
    tokens: set[int] = field(default_factory=set)  # that were drafted; at most two
    requests: set[str] = field(default_factory=set)  # whose they were; no more than decide

    @property
    def is_enough(self) -> bool:
        return self.verified >= self.config.min_verifications

    @property
    def rate(self) -> float:
        return self.accepted / self.verified if self.verified else 0.0

    def count(self, request_id: str, proposal: Proposal, hit: bool) -> None:
        self.verified, self.accepted = self.verified + 1, self.accepted + hit
        if len(self.tokens) < 2:
            self.tokens.add(proposal.tokens[0])
        if len(self.requests) < self.config.min_client_requests:
            self.requests.add(request_id)

    def __str__(self) -> str:
        return f"{100 * self.rate:.0f} % of {self.verified}"

    @property
    def symptom(self) -> str:
        """What the drafts look like where they are not accepted."""
        if len(self.tokens) == 1 and self.is_enough:
            return (
                f"all of them are token {min(self.tokens)}, as where weights are zero or numbers are "
                f"not finite"
            )
        return (
            "they differ, but are not what the model says, as with weights that are damaged or another "
            "model's"
        )


@dataclass(slots=True)
class SelfCheck:
    """The engine's own requests."""

    start_s: float  # by the watchdog's clock
    tally: FirstDrafts
    ids: set[str] = field(default_factory=set)  # that have not ended


class Watchdog:
    """`max_depth`: of the drafts; 0: there is nothing to watch. `vocab`: of the model. `min_acceptance`: the
    least rate of the model's family. `drafter`: the draft model's name among the sources. `clock` in seconds.

    The engine calls `start` once, `before_step` and `limit_drafts` for each step that it plans, and
    `client_events` for what each one yielded.
    """

    def __init__(
        self,
        max_depth: int = 0,
        vocab: int = 1,
        min_acceptance: float = 0.4,
        drafter: str = MTP,
        clock: Callable[[], float] = perf_counter,
        config: WatchdogConfig = WATCHDOG_CONFIG,
    ) -> None:
        self.max_depth, self.vocab, self.min_acceptance = max_depth, vocab, min_acceptance
        self.drafter, self.clock, self.config = drafter, clock, config
        self.health = DraftHealth("unmeasured", floor=min_acceptance) if max_depth else DraftHealth()
        self.best_rate = 0.0  # the best window, or the rate at start
        self._self_check: SelfCheck | None = None
        # of clients' drafts: the current window, and all since the last good window
        self._window, self._since_good = FirstDrafts(config), FirstDrafts(config)
        self._doubt = False
        # the time of the next decision, and how long to wait after it: in doubt, and suspended
        self._next_s = 0.0
        self._doubt_interval_s, self._retry_interval_s = config.doubt_interval_s, config.retry_interval_s
        self._has_limits = False  # requests have limits of drafts
        self._num_steps = 0  # see sample_of
        self._armed = False  # clients' drafts are watched

    @property
    def suspended(self) -> bool:
        return self.health.state == "suspended"

    # ----------------------------------------------------------------------------------------------- at start

    def start(self, engine: EngineControl) -> None:
        """Checks the draft model. From then on clients' drafts are watched. It leaves no request."""
        if not self.max_depth:
            return
        end = self.clock() + self.config.max_start_check_s
        self_check = self._begin(engine)
        while not self._is_complete(self_check) and self.clock() < end:
            engine.step()
        tally = self._end(engine)
        while engine.has_work:
            engine.step()
        self._armed, self._window, self._since_good = True, FirstDrafts(self.config), FirstDrafts(self.config)
        if not tally.is_enough:
            log.info(
                "%s self-test: no result after %d verifications, %d are needed; the time limit was reached",
                self.drafter,
                tally.verified,
                self.config.min_verifications,
            )
            return
        self.health.start = self.best_rate = tally.rate
        if tally.rate >= self.min_acceptance:
            self.health.state = "ok"
            log.info(
                "%s self-test: %d of %d first drafts accepted (%.0f %%): OK",
                self.drafter,
                tally.accepted,
                tally.verified,
                100 * tally.rate,
            )
            return
        summary = (
            f"at start the first draft was accepted in {tally} verifications, and at least "
            f"{100 * self.min_acceptance:.0f} % are expected"
        )
        self._report("weak", f"{summary}: {tally.symptom}; probably {CAUSES}")

    def renew(self) -> None:
        """The weights are new: what was measured is void, and the engine's own requests come at once."""
        self._window, self._since_good = FirstDrafts(self.config), FirstDrafts(self.config)
        self.best_rate, self._next_s, self._doubt = 0.0, 0.0, self._armed
        self._retry_interval_s = self.config.retry_interval_s
        if self._self_check is not None:
            self._self_check.tally = FirstDrafts(self.config)

    # ---------------------------------------------------------------------------------------------- each step

    def before_step(self, engine: EngineControl) -> None:
        """Begins or ends the engine's own requests where that is due. A step is about to be planned."""
        if not self._armed or not (self._self_check is not None or self._doubt or self.suspended):
            return
        self_check = self._self_check
        if self_check is None:
            if self.clock() >= self._next_s:
                self._begin(engine)
        elif self._is_complete(self_check):
            self._decide(engine, self._end(engine))
        elif (
            not self_check.tally.verified
            and not self.suspended
            and self.clock() - self_check.start_s > self.config.seat_wait_s
            and self._is_dead(self._since_good)
        ):
            tally = self._since_good
            self._suspend(f"{tally} first drafts of clients' requests were accepted: {tally.symptom}")

    def _is_complete(self, self_check: SelfCheck) -> bool:
        return not self_check.ids or self_check.tally.verified >= self.config.window_verifications

    def is_self_check(self, request_id: str) -> bool:
        return self._self_check is not None and request_id in self._self_check.ids

    def limit_drafts(self, running: Seq[RequestState], draft_depth: int) -> int:
        """→ the depth of the next step, where others chose `draft_depth`. Sets how many drafts each request
        may have."""
        if self._self_check is None and not self.suspended:
            if self._has_limits:
                self._has_limits = False
                for req in running:
                    req.draft.max_draft_tokens = None
            return draft_depth
        self._has_limits, draft_depth = True, 0 if self.suspended else draft_depth
        deep = False
        for req in running:
            if self.is_self_check(req.id):
                deep, req.draft.max_draft_tokens = True, None
            elif draft_depth < self.max_depth:
                req.draft.max_draft_tokens = (
                    draft_depth
                    if req.draft.max_draft_tokens is None
                    else min(req.draft.max_draft_tokens, draft_depth)
                )
        return self.max_depth if deep else draft_depth

    def client_events(self, events: Seq[RequestEvent], verified: bool = True) -> Seq[RequestEvent]:
        """→ what a step yielded for clients' requests. Drafts that were `verified` are counted. Of many
        requests a sample is counted."""
        if self._self_check is None:
            if verified and self._armed and not self.suspended:
                self._num_steps += 1
                for _, event in sample_of(events, self._num_steps):
                    self._count(event, None)
            return events
        client_events = list[RequestEvent]()
        for req, event in events:
            self_check = self._self_check if self.is_self_check(event.id) else None
            self._count(event, self_check)
            if self_check is None:
                client_events.append((req, event))
            elif event.finish is not None:
                self_check.ids.discard(event.id)
        return client_events

    def _count(self, event: TokenEvent, self_check: SelfCheck | None) -> None:
        proposal = event.proposal
        if proposal.tokens and proposal.sources[0] == self.drafter and event.error is None:
            self._observe(event.id, proposal, self_check)

    # ---------------------------------------------------------------------------------------------- decisions

    def _observe(self, request_id: str, proposal: Proposal, self_check: SelfCheck | None) -> None:
        hit = 1 in proposal.path
        if self_check is not None:
            self_check.tally.count(request_id, proposal, hit)
        if self_check is not None or not self._armed or self.suspended:
            return
        for tally in (self._window, self._since_good):
            tally.count(request_id, proposal, hit)
        if self._window.verified < self.config.window_verifications:
            return
        rate, self._window = self._window.rate, FirstDrafts(self.config)
        good = rate >= max(self.config.min_rate, self.config.weak_rate_fraction * self.best_rate)
        self.best_rate = max(self.best_rate, rate)
        self._doubt = (not good or self._is_worse) and self.best_rate >= self.min_acceptance
        if good:
            self._since_good, self._doubt_interval_s = FirstDrafts(self.config), self.config.doubt_interval_s

    def _is_dead(self, tally: FirstDrafts) -> bool:
        return (
            tally.verified >= self.config.min_client_verifications
            and tally.rate < self.config.min_rate
            and len(tally.requests) >= self.config.min_client_requests
        )

    def _decide(self, engine: EngineControl, tally: FirstDrafts) -> None:
        """What the engine's own requests say."""
        expected = max(self.health.start or 0.0, self.min_acceptance)
        self._next_s = self.clock() + (self._retry_interval_s if self.suspended else self._doubt_interval_s)
        if not tally.is_enough:
            return
        if self.suspended:
            if tally.rate >= self.config.weak_rate_fraction * expected:
                self._recover(engine, tally)
            else:
                self._retry_interval_s = min(2 * self._retry_interval_s, self.config.max_retry_interval_s)
                self._next_s = self.clock() + self._retry_interval_s
                log.info(
                    "drafting stays off: %s first drafts accepted; next self-test in %.0f s",
                    tally,
                    self._retry_interval_s,
                )
            return
        summary = (
            f"the first draft is accepted in {tally} verifications of a text where {100 * expected:.0f} "
            f"% are expected"
        )
        if tally.rate < max(self.config.min_rate, self.config.dead_rate_fraction * expected):
            self._suspend(f"{summary}: {tally.symptom}")
            return
        self._doubt_interval_s = min(2 * self._doubt_interval_s, self.config.retry_interval_s)
        self._doubt = tally.rate < self.config.weak_rate_fraction * expected
        if not self._doubt:
            log.debug(
                "the draft model works, but the requests' texts are hard to draft: %s first drafts "
                "accepted in the self-test",
                tally,
            )
            if self._is_worse:
                log.warning(
                    "the draft model (%s) works again: %s first drafts accepted",
                    self.drafter,
                    tally,
                )
                self.health.state = "ok"
        elif self.health.state != "weak":
            self._report(
                "weak", f"{summary}: {tally.symptom}; it drafts on, as deep as that is worth its time"
            )

    @property
    def _is_worse(self) -> bool:
        """It is weak, and was not at start."""
        return self.health.state == "weak" and (self.health.start or 0.0) >= self.min_acceptance

    def _suspend(self, reason: str) -> None:
        self._retry_interval_s = self.config.retry_interval_s
        self._next_s = self.clock() + self._retry_interval_s
        self._report(
            "suspended", f"{reason}; drafting is off and tried again in {self._retry_interval_s:.0f} s"
        )

    def _report(self, state: DraftState, reason: str) -> None:
        self.health.state, self.health.reason = state, reason
        self.health.faults_total += 1
        log.warning("DRAFT MODEL DOES NOT WORK (%s): %s", self.drafter, reason)

    def _recover(self, engine: EngineControl, tally: FirstDrafts) -> None:
        log.warning(
            "the draft model (%s) works again: %s first drafts accepted; drafting is on",
            self.drafter,
            tally,
        )
        self.health.state = "ok"
        self._window, self._since_good, self._doubt = (
            FirstDrafts(self.config),
            FirstDrafts(self.config),
            False,
        )
        self._next_s, self._doubt_interval_s = 0.0, self.config.doubt_interval_s
        # Its rows in pages that were computed meanwhile may be as bad as its drafts were, and what was
        # learned is void.
        engine.reset_prefix_cache()
        if engine.policy is not None:
            engine.policy.forget()

    # ------------------------------------------------------------------------------ the engine's own requests

    def _begin(self, engine: EngineControl) -> SelfCheck:
        self_check = self._self_check = SelfCheck(self.clock(), FirstDrafts(self.config))
        length = min(self.config.self_check_tokens, engine.context_length - 1)
        sampling = SamplingParams(
            max_tokens=length, temperature=0, ignore_eos=True, seed=0, priority=MIN_PRIORITY
        )
        count = self.config.num_self_checks
        for number in range(count):
            name = f"mtpserve self-check {number}"
            self_check.ids.add(name)
            try:
                engine.add(Request(name, [number * self.vocab // count], sampling))
            except EngineBusy:
                self_check.ids.discard(name)
        return self_check

    def _end(self, engine: EngineControl) -> FirstDrafts:
        assert self._self_check is not None
        self_check, self._self_check = self._self_check, None
        for request_id in self_check.ids:
            engine.abort(request_id)
        return self_check.tally
