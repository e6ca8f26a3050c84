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
class Sequence:
    """The token ranges, for a decoding request with two drafts:

        tokens    |---- prompt ----|---- output ----|x|
        computed  |------- KV is in the pages ------|
        drafts                                        |d1 d2|      not in `tokens`: proposals only

    `computed < len(tokens)` while the request lives: the last token's KV is written by the step that verifies what follows it.

    Steps may be in flight, launched and not yet booked. What is known of them: `launched` rows are computed then, and each of `ahead`
    spans gives at least one token. The device knows the rest, and the host only bounds.
    """

    id: str
    tokens: list[int]
    prompt_len: int
    sampling: SamplingParams
    max_len: int  # tokens that it may ever hold: prompt + max_tokens, at most the context length
    seed: int  # the request's own, or drawn at admission
    bad_words: list[list[int]] = field(default_factory=list)
    prediction: list[int] = field(default_factory=list)  # what the output probably repeats
    prompt_scored: int = 0  # prompt tokens, from the second on, whose log-probabilities were reported
    root: bytes | None = None  # what the key of its first page continues; None: it shares no pages
    keys: list[bytes] = field(default_factory=list)  # of its whole pages, see cache/keys: of the prompt's, and of what was computed since
    labelled: int = 0  # columns whose pages have got their keys
    vouched: int = 0  # of these, columns that a token was sampled after: what they hold are numbers
    matched: int = 0  # columns of `keys` that were found when somebody last looked
    keeps: list[int] = field(default_factory=list)  # columns after which the state is kept that recurrent layers have then, ascending
    branch: int = 0  # of these, the one after which it leaves what was computed before; 0: none
    state: int = -1  # the kept state that it started from in its seat; -1: with its first token
    loading: int = 0  # number of the last loading of pages that it has waited for
    loads: int = 0  # how many it has waited for since it had a seat
    source: PageSource | None = None  # who has the pages of its prompt
    pulls: frozenset[int] | None = None  # what it waits for from there: see engine/pages/pulls; None: it has not asked yet
    lease: str | None = None  # the name under which its prompt's pages are kept for another node once it has ended
    offer: PageOffer | None = None  # these
    cached: int = 0  # prompt tokens that it had not to compute when it was first seated
    overtaken: int = 0  # later requests that were seated before it
    ran: bool = False  # it has had a seat
    coupled: bool = False  # as of core.plan.Admission
    depth: int | None = None  # how deep it lets the engine draft; None: as deep as that does
    reach: int = 0  # tokens after the last committed one that a step may write for it
    lookahead: int = 0  # tokens after those that the host knows for which pages are held: DraftSizes.lookahead
    lockstep: bool = False  # its next step cannot be launched before the last one is booked: the host has a say in it
    proposals: int = 0  # that a step may leave waiting for it, at most
    mixed: bool = False  # some of them are not the algorithm's
    most: int | None = None  # drafts that the algorithm may give it after its next span; None: as many as it has
    computed: int = 0
    absorbed: int = 0  # of `computed`, rows that the draft model has absorbed: all, or all but those that steps have deferred
    settled: int = 0  # tokens that the states of recurrent layers have taken in: not the drafts that the last step accepted
    deferred: int = 0  # rows of the last steps launched that it has not absorbed
    shared: int = 0  # tokens in the pages that another request has computed; one of them may be computed again, and is not stored
    launched: int = 0  # `computed`, and the committed tokens of the spans in flight
    ahead: int = 0  # spans in flight that give tokens
    drafts: int = 0  # proposals that wait on the device to be verified by the next span; with spans in flight at most so many
    factor: float = 1.0  # how much more often than others' its drafts are accepted: engine/depth/survival
    tried: int = 0  # the last trial of another depth that drafted for it: engine/depth/policy
    held: list[Held] = field(default_factory=list)  # by group of pages; empty while it waits
    grown: bool = False  # it holds pages that no plan has named
    seat: int | None = None  # its row in the runner's tensors while it runs
    rank: tuple[int, int] = (0, 0)  # its priority and the number of its arrival: the scheduler serves lower ones first
    arrived: float = 0.0  # perf_counter's, as `seated`
    seated: float | None = None  # the first time
    finish: Finish | None = None
    error: str | None = None

    @property
    def plain(self) -> bool:
        """Drafts come from the algorithm alone: neither a grammar nor a prediction proposes any."""
        return self.sampling.grammar is None and not self.prediction

    @property
    def output_len(self) -> int:
        return len(self.tokens) - self.prompt_len

    @property
    def prefill_end(self) -> int:
        """Up to where it is computed before it decodes."""
        return len(self.tokens) - (1 if self.output_len > 0 else 0)

    @property
    def room(self) -> int:
        """Tokens that it may still produce."""
        return self.max_len - len(self.tokens)

    @property
    def most_proposals(self) -> int:
        """Drafts that a step may leave for it, at most, as the policy has limited them."""
        return self.proposals if self.most is None or self.mixed else min(self.proposals, self.most)

    @property
    def expected(self) -> int:
        """Tokens that it has for certain once everything in flight is booked, unless it ends before."""
        return len(self.tokens) + self.ahead

    @property
    def in_flight(self) -> bool:
        return self.launched != self.computed
