"""What crosses between planning and computing: a step's plan, and its result. Plain data that could be sent,
and is recorded.

    scheduler.plan() → StepPlan → runner.launch(plan) → StepResult → scheduler.commit

Nothing else crosses: what a runner needs of a request comes once, with its admission, and what follows of its
text it reads from its own results. As msgpack, a step that decodes a few requests is some dozens of bytes.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from mtpserve.core.kv_transfer import PageSource
from mtpserve.core.request import Request, TokenLogprob

NOT_FINITE = "the model produced non-finite numbers (NaN) for this request"
# the beginning of an error that is the request's own: its constraints exclude every token
NOTHING_ALLOWED = "nothing is left that this request allows"


class NewRequest(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A request gets a row of the runner's tensors: its first, or another one after a preemption."""

    req_idx: int
    request: Request  # with its seed
    output_ids: list[int]  # what it has said by now
    num_computed_tokens: int  # tokens whose KV is in its pages already
    max_num_tokens: int  # prompt and output together
    # Tokens in pages that another request has computed. One of them may be computed again, and is not stored.
    num_shared_tokens: int = 0
    # Its drafts follow the target's noise, so that a seed's text does not depend on their number.
    coupled: bool = False
    # Where `num_computed_tokens` is not 0: the kept state from which its recurrent layers start.
    start_state: int = -1
    adapter_slot: int = -1  # where the layers find its adapter; -1: it has none

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def num_tokens(self) -> int:
        """Prompt and output."""
        return len(self.request.prompt) + len(self.output_ids)

    @property
    def point_masses(self) -> bool:
        """Its drafts are verified as such. Where they come from several sources, at most one knows its
        distribution."""
        return self.coupled or not self.request.plain


class SpanPlan(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The rows that one request brings to a step: `num_tokens` committed tokens from `start`, then its
    drafts.

    A prompt chunk is many tokens and no drafts, plain decoding one token and no drafts, a verification one
    token and k.

    While a step of the request is in flight, `start` and `num_draft_tokens` are bounds: it starts no earlier,
    and has no more drafts. The device has the exact numbers.
    """

    req_idx: int
    start: int
    num_tokens: int
    num_draft_tokens: int
    # The span reaches the end of what is committed, so the step produces a token for it.
    samples: bool
    # After the step everything but the last token is computed, so the request can be drafted for. True for
    # every span that samples, and for a preempted request that was recomputed up to its last token: it goes
    # on with the very drafts that it had, so that preemption does not change what a seed gives.
    drafts_next: bool
    max_draft_tokens: int | None = None  # drafts that the algorithm may then give it; None: as many as it has
    # the draft model absorbs the span's only row with a later step, not with this one
    defers_kv: bool = False
    num_deferred_tokens: int = 0  # the last rows before the span, which it absorbs before this step
    # (tokens, place): recurrent layers keep their state after so many tokens of the request, for others to
    # start from, at this place among the kept states. Nothing is kept if the step does not come to it, or
    # earlier ones have.
    checkpoint: tuple[int, int] | None = None

    @property
    def num_rows(self) -> int:
        return self.num_tokens + self.num_draft_tokens


# (page group, req_idx, column, page): column c of a request's page table is the page of its tokens from
# c · page_size on. Groups: see core.arch.model.page_groups.
BlockTableEntry = tuple[int, int, int, int]


class Transfer(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A page's contents on their way between device, host, disk and other nodes. A block is a place for a
    page in host memory.

    save     device → host, before this step and all after it write anything
    load     host → device, beside the steps; no step touches the page before the load has ended
    spill    host → disk, beside the steps, after the save has ended
    fetch    disk → host, beside the steps
    pull     another node → host, beside the steps; those of a plan from one source are asked for together
    """

    number: int
    kind: Literal["save", "load", "spill", "fetch", "pull"]
    group: int  # the page group
    block: int
    page: int = -1  # a page of the device's pool, to save and to load
    key: bytes = b""  # the page's key; empty for a load
    source: PageSource | None = None  # for a pull

    @property
    def of_each_rank(self) -> bool:
        """Each rank moves its part of the page. Otherwise rank 0 moves the whole block."""
        return self.kind in ("save", "load")


class Transferred(msgspec.Struct, frozen=True, array_like=True, gc=False):
    transfer: Transfer
    good: bool  # not so: a page is not there, is damaged, or could not be written
    seconds: float
    bytes: int
    reason: str = ""  # in a word, why a pull came to nothing


class StepPlan(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Without spans: nothing but transfers can be done."""

    spans: list[SpanPlan]  # one per seat at most
    draft_depth: int  # how deep to draft for the next step
    new_requests: list[NewRequest] = []  # each has a span in the same plan
    new_blocks: list[BlockTableEntry] = []  # pages that no plan has named yet, of requests with a span
    transfers: list[Transfer] = []


class SpanResult(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One span's outcome."""

    # committed by this step: accepted drafts and one more; empty for a chunk that ends inside the prompt
    tokens: list[int]
    num_accepted_tokens: int  # drafts among them
    num_draft_tokens: int  # proposals that now wait for the next step
    proposed: list[int] = []  # the drafts that were verified
    parents: list[int] = []  # the node that each continues
    sources: list[int] = []  # one core.batch.Source for each
    path: list[int] = []  # the nodes of the drafts that were accepted
    error: str | None = None  # the request cannot go on; the rest is void
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    routed_experts: list[bytes] | None = None  # of the last computed tokens: [layers, experts] of each


class StepResult(msgspec.Struct, frozen=True, array_like=True, gc=False):
    spans: list[SpanResult]  # in the order of the plan's spans
    transferred: list[Transferred] = []  # transfers of any plan that have ended since the last result
