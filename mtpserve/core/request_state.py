"""One request as the scheduler sees it. Mutable, on the host, no tensors."""

from __future__ import annotations

from dataclasses import dataclass, field

from mtpserve.core.kv_transfer import PageOffer, PageSource
from mtpserve.core.request import Finish
from mtpserve.core.sampling import SamplingParams


@dataclass(slots=True)
class Held:
    """A request's pages of one group: those of the columns of its page table from `first` on."""

    first: int = 0
    pages: list[int] = field(default_factory=list)
    planned: int = 0  # the column after the last that a plan has named: the runner knows those before it

    @property
    def end(self) -> int:
        """The column after the last."""
        return self.first + len(self.pages)


@dataclass(slots=True)
class RequestState:
    """The token ranges, for a decoding request with two drafts:

        tokens                |---- prompt ----|---- output ----|x|
        num_computed_tokens   |------- KV is in the pages ------|
        num_draft_tokens                                          |d1 d2|      drafts are not in `tokens`

    `num_computed_tokens < len(tokens)` while the request lives: the last token's KV is written by the step
    that verifies what follows it.

    Steps may be in flight: launched, and their results not yet committed. The host knows two bounds.
    `num_scheduled_tokens` tokens are computed after these steps, and each of `num_pending_outputs` spans
    gives at least one token. The device knows the exact numbers.
    """

    id: str
    tokens: list[int]
    num_prompt_tokens: int
    sampling: SamplingParams
    max_num_tokens: int  # tokens that it may ever hold: prompt + max_tokens, at most the context length
    seed: int  # the request's own, or drawn at admission
    bad_words: list[list[int]] = field(default_factory=list)
    prediction: list[int] = field(default_factory=list)  # what the output probably repeats
    # prompt tokens, from the second on, whose log-probabilities were reported
    num_scored_prompt_tokens: int = 0
    hash_root: bytes | None = None  # what the key of its first page continues; None: it shares no pages
    # of its whole pages, see cache/keys: of the prompt's, and of what was computed since
    block_hashes: list[bytes] = field(default_factory=list)
    num_hashed_blocks: int = 0  # columns whose pages have got their keys
    # of these, columns that a token was sampled after: what they hold are numbers
    num_verified_blocks: int = 0
    num_matched_blocks: int = 0  # columns of `block_hashes` that were found when somebody last looked
    # columns after which the state is kept that recurrent layers have then, ascending
    checkpoint_blocks: list[int] = field(default_factory=list)
    branch_block: int = 0  # of these, the one after which it leaves what was computed before; 0: none
    start_state: int = -1  # the kept state that it started from in its seat; -1: with its first token
    kv_load: int = 0  # number of the last loading of pages that it has waited for
    num_kv_loads: int = 0  # how many it has waited for since it had a seat
    kv_source: PageSource | None = None  # who has the pages of its prompt
    # what it waits for from there: see engine/pages/kv_receiver; None: it has not asked yet
    kv_transfers: frozenset[int] | None = None
    # the name under which its prompt's pages are kept for another node once it has ended
    kv_lease: str | None = None
    kv_offer: PageOffer | None = None  # these
    num_cached_tokens: int = 0  # prompt tokens that it had not to compute when it was first seated
    num_overtaken: int = 0  # later requests that were seated before it
    has_run: bool = False  # it has had a seat
    coupled: bool = False  # as in core.plan.NewRequest
    max_depth: int | None = None  # how deep it lets the engine draft; None: as deep as that does
    num_write_ahead: int = 0  # tokens after the last committed one that a step may write for it
    # tokens after those that the host knows for which pages are held: DraftSizes.lookahead
    num_lookahead_tokens: int = 0
    # its next step cannot be launched before the last one is booked: the host has a say in it
    is_synchronous: bool = False
    max_pending_draft_tokens: int = 0  # that a step may leave waiting for it, at most
    has_mixed_sources: bool = False  # some of them are not the algorithm's
    # drafts that the algorithm may give it after its next span; None: as many as it has
    max_draft_tokens: int | None = None
    num_computed_tokens: int = 0
    num_stored_tokens: int = (
        # of `num_computed_tokens`, rows that the draft model has absorbed: all, or all but those that steps
        # have deferred
        0
    )
    # tokens that the states of recurrent layers have taken in: not the drafts that the last step accepted
    num_state_tokens: int = 0
    num_deferred_tokens: int = 0  # rows of the last steps launched that it has not absorbed
    num_shared_tokens: int = (
        # tokens in the pages that another request has computed; one of them may be computed again, and is not
        # stored
        0
    )
    num_scheduled_tokens: int = 0  # `num_computed_tokens`, and the committed tokens of the spans in flight
    num_pending_outputs: int = 0  # spans in flight that give tokens
    # proposals that wait on the device to be verified by the next span; with spans in flight at most so many
    num_draft_tokens: int = 0
    # how much more often than others' its drafts are accepted: engine/depth/survival
    acceptance_factor: float = 1.0
    last_probe: int = 0  # the last trial of another depth that drafted for it: engine/depth/policy
    blocks: list[Held] = field(default_factory=list)  # by group of pages; empty while it waits
    has_new_blocks: bool = False  # it holds pages that no plan has named
    req_idx: int | None = None  # its row in the runner's tensors while it runs
    # its priority and the number of its arrival: the scheduler serves lower ones first
    queue_key: tuple[int, int] = (0, 0)
    arrival_time: float = 0.0  # perf_counter's, as `start_time`
    start_time: float | None = None  # the first time
    finish: Finish | None = None
    error: str | None = None

    @property
    def plain(self) -> bool:
        """Drafts come from the algorithm alone: neither a grammar nor a prediction proposes any."""
        return self.sampling.grammar is None and not self.prediction

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def prefill_end(self) -> int:
        """Up to where it is computed before it decodes."""
        return len(self.tokens) - (1 if self.num_output_tokens > 0 else 0)

    @property
    def num_free_tokens(self) -> int:
        """Tokens that it may still produce."""
        return self.max_num_tokens - len(self.tokens)

    @property
    def pending_draft_limit(self) -> int:
        """Drafts that a step may leave for it, at most, as the policy has limited them."""
        return (
            self.max_pending_draft_tokens
            if self.max_draft_tokens is None or self.has_mixed_sources
            else min(self.max_pending_draft_tokens, self.max_draft_tokens)
        )

    @property
    def num_expected_tokens(self) -> int:
        """Tokens that it has for certain once everything in flight is booked, unless it ends before."""
        return len(self.tokens) + self.num_pending_outputs

    @property
    def in_flight(self) -> bool:
        return self.num_scheduled_tokens != self.num_computed_tokens

    def check_counters(self, num_slots: int, max_deferred_tokens: int) -> None:
        """`num_slots`: tokens for which it holds pages. Raises RuntimeError where a running request's
        counters contradict each other."""
        computed, scheduled, stored = (
            self.num_computed_tokens,
            self.num_scheduled_tokens,
            self.num_stored_tokens,
        )
        if not computed < len(self.tokens) < self.max_num_tokens or scheduled > num_slots:
            raise RuntimeError(
                f"request {self.id}: {computed} of {len(self.tokens)} tokens computed, pages for {num_slots}"
            )
        if (
            not stored <= computed <= stored + max_deferred_tokens
            or self.num_deferred_tokens > max_deferred_tokens
        ):
            raise RuntimeError(
                f"request {self.id}: {stored} of {computed} tokens stored, "
                f"{self.num_deferred_tokens} deferred"
            )
        if (
            self.in_flight != (scheduled > computed)
            or self.num_pending_outputs < 0
            or (self.num_pending_outputs and not self.in_flight)
        ):
            raise RuntimeError(
                f"request {self.id}: {scheduled} tokens scheduled, {computed} computed, "
                f"{self.num_pending_outputs} outputs"
            )
