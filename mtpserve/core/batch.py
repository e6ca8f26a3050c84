"""What goes into a step and what comes out of it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class Source(IntEnum):
    """The source of a draft."""

    MODEL = 0  # the draft model: an MTP layer, a head, or a model of its own
    NGRAM = 1
    PREDICTION = 2
    GRAMMAR = 3  # the only token that the request's grammar allows: costs no pass of any model

    @staticmethod
    def names(drafter: str) -> tuple[str, ...]:
        """The sources' names in traces and metrics. `drafter`: the draft model's name."""
        return (drafter, *(source.name.lower() for source in Source if source is not Source.MODEL))


class Tree(NamedTuple):
    """Which draft continues which. Node 0 is the last committed token, draft i is node i + 1, a parent comes
    before its children.

    chain of 3:   0 → 1 → 2 → 3          parents 0 1 2
    tree of 3:    0 → 1 → 3              parents 0 0 1        ancestors of node 3: bits 0, 1 and 3
                  └→ 2
    """

    parents: Tensor  # [R, K] int64
    # [R, K+1] int64, per node the set of nodes on its path, itself included: bit j for node j
    ancestors: Tensor
    depths: Tensor  # [R, K+1] int64, the root's is 0


class Batch(NamedTuple):
    """One step's rows on the device: T rows of R spans. The widest span has K drafts; narrower ones are
    padded where it says so.

    A row's index is its place in the request (`start + i`), which is where its KV goes; for a chain it is the
    position too.
    """

    input_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64, by depth: siblings of a tree share one
    token_indices: Tensor  # [T] int64, place in the request
    slot_mapping: Tensor  # [T] int64, where its keys and values are stored, in the pages of group 0
    token_req_indices: Tensor  # [T] int64, whose row it is
    req_indices: Tensor  # [R] int64
    query_start_loc: Tensor  # [R+1] int64, first row of each span
    seq_lens: Tensor  # [R] int64, tokens in the cache after this step's rows are stored
    num_draft_tokens: Tensor  # [R] int64, drafts that span r really has; later rows are padding
    last_token_rows: Tensor  # [R] int64, row of the span's last committed token
    sample_rows: Tensor  # [R, K+1] int64, that row and its drafts' rows; short spans repeat their last row
    # [R] int64, 1 where the span reaches the end of what is committed, and the request has not ended
    samples: Tensor
    req_tensors: RequestTensors
    sampler: Sampler
    longest: int = 1  # the most committed rows of a span
    tree: Tree | None = None  # None: every span's drafts are a chain
    # Row t sees column c (a place in the request) where c <= index[t], and bit c - tree_start of tree_bits[t]
    # is set or c is before tree_start of its span. None: every row sees all columns before it.
    tree_bits: Tensor | None = None  # [T] int64, -1 for a row that is no node
    tree_start: Tensor | None = None  # [R] int64, index of node 0
    # The key of column c (a place in the request) is in the slot of token c + shift. Nothing else is shifted.
    shift: int = 0
    # [N] int64, spans that start right after pages which another request computed; None: none does.
    resumed: Tensor | None = None
    # [N] int64, spans whose first row is computed and not stored: its slot is spare. None: all rows are
    # stored.
    unstored: Tensor | None = None
    # What each request's output probably repeats [R, longest] int64, and its length [R] int64, 0 where there
    # is none. None: nowhere is one.
    predictions: tuple[Tensor, Tensor] | None = None
    # Recurrent layers keep a state of span r after `checkpoint_tokens[r]` tokens of its request, if the step
    # takes the state past them; 0: of none. `checkpoint_states[r]` is its place among the kept states.
    checkpoint_tokens: Tensor | None = None  # [R] int64
    checkpoint_states: Tensor | None = None  # [R] int64
    # The next drafts.
    draft_spans: Tensor | None = None  # [D] int64, spans that may be drafted for; None: all
    draft_depth: int = 0  # no request wants deeper drafts; 0: none wants any
    num_draft_steps: Tensor | None = None  # [D] int64, how deep each wants them; None: none wants any
    # [D] int64, how many drafts the algorithm may give; None: all it has
    max_draft_tokens: Tensor | None = None
    defers_kv: bool = False  # a later step stores the draft model's KV of some spans' last rows
    extends_kv: bool = True  # this step stores that of some spans' rows
    has_adapters: bool = False  # some row's request has one
    has_trees: bool = False  # drafts of some request branch, or may be left from drafts that did

    @property
    def drafts(self) -> Tensor:
        """[R, K]; what comes after `num_draft_tokens` is void."""
        return self.input_ids[self.sample_rows[:, 1:]]

    def drafted(self, rows: Tensor) -> Tensor:
        """[R, …] → [D, …]: of the spans that may be drafted for."""
        return rows if self.draft_spans is None else rows[self.draft_spans]


class Hidden(NamedTuple):
    """What a pass of the trunk, or of a draft model, gives for each row."""

    head: Tensor  # [rows, hidden], what the language-model head multiplies
    # [rows, Features.width], what a draft model's next pass is fed with; None: nothing
    features: Tensor | None

    def at(self, rows: Tensor) -> Hidden:
        """Some of the rows [n]."""
        # Indexing takes twice as long.
        return Hidden(
            self.head.index_select(0, rows),
            None if self.features is None else self.features.index_select(0, rows),
        )


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of the tokens that a step commits, by the target's distribution. N: the most
    alternatives that a request wants."""

    token_logprobs: Tensor  # [R, D+1] float32
    ranks: Tensor  # [R, D+1] int64
    top_ids: Tensor  # [R, D+1, N] int64
    top: Tensor  # [R, D+1, N] float32


@dataclass(frozen=True, slots=True)
class VerifyOutput:
    """What verification decided. A span without drafts gets one token: that is sampling. Void for spans that
    do not sample.

    D is the depth of the deepest draft that the step could hold: K for a chain.
    """

    tokens: Tensor  # [R, D+1] int64: accepted drafts, then the target's own token; what follows is void
    # [R] int64: how many drafts survived; `num_accepted_tokens + 1` tokens are committed
    num_accepted_tokens: Tensor
    # [R, D+1] int64: the nodes that survived, the root first; then its last is repeated. None: a chain's
    path: Tensor | None
    failed: Tensor  # [R] bool: logits that decided something were not finite; the request ends with an error
    logprobs: Logprobs | None = None


@dataclass(frozen=True, slots=True)
class Drafts:
    """Proposals for the D spans that are drafted for. `probs` None: each proposal is a point mass."""

    tokens: Tensor  # [D, K] int64
    num_draft_tokens: Tensor  # [D] int64, how many of them are proposals; the rest is void
    probs: Tensor | None = None  # [D, K, vocabulary] float32, the distribution each was drawn from
    tree: Tree | None = None  # None: a chain
    sources: Tensor | None = None  # [D, K] int64, of Source; None: MODEL


class RequestTensors(Protocol):
    """The tensors that a step changes, one row per running request."""

    tokens: Tensor  # [seats, max_len + lookahead] int64: committed tokens, then the waiting drafts
    num_tokens: Tensor  # [seats] int64: committed tokens
    num_computed_tokens: Tensor  # [seats] int64: tokens whose KV is in the pages
    stops: Tensor  # [seats, STOPS] int64: tokens that end the output, -1: none
    block_tables: Tensor  # [groups, seats, columns] int64, see core.arch.model.page_groups
    padding_slots: list[int]  # by group: a slot that is never read
    draft_probs: Tensor  # [seats, K, vocabulary] float32: what the waiting drafts of a chain were drawn from

    def slot_mapping(self, req_indices: Tensor, index: Tensor, group: int = 0) -> Tensor:
        """Slots of token `index` of each seat's request, in the pages of this group."""
        ...

    def next_tokens(self, req_indices: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The token after each `index` [n] of these seats' requests [n]: its id, its index, and its slot in
        the pages of group 0; [n] each."""
        ...

    def num_prompt_tokens(self, req_indices: Tensor) -> Tensor: ...


class SamplingTensors(NamedTuple):
    """What the sampling kernels read, each [seats]; and whether any request of the batch uses the cut at
    all."""

    temperature: Tensor  # float32, 0 is greedy
    top_k: Tensor  # int64, 0 is off
    top_p: Tensor  # float32
    min_p: Tensor  # float32
    seed: Tensor  # int64
    coupled: Tensor  # bool
    any_top_k: bool
    any_top_p: bool
    any_min_p: bool


class Sampler(Protocol):
    """Logits to tokens, by the parameters of each request of the batch.

    A `path` is the tokens after the committed ones where a row's logits come from: the drafts that lead to
    its node.
    """

    @property
    def all_greedy(self) -> bool: ...

    @property
    def all_coupled(self) -> bool:
        """All drafts are point masses, so that the target's own choice decides: see spec/verify/accept."""
        ...

    @property
    def has_rules(self) -> bool:
        """Some request of the batch has more parameters than temperature, top_k, top_p and min_p: `processed`
        needs paths."""
        ...

    @property
    def top_logprobs(self) -> int | None:
        """The largest number of alternatives whose log-probabilities a request wants; None: no request wants
        any."""
        ...

    @property
    def parameters(self) -> SamplingTensors: ...

    def greedy(self, req_indices: Tensor) -> Tensor:
        """[rows] bool"""
        ...

    def coupled(self, req_indices: Tensor) -> Tensor | None:
        """[rows] bool: requests whose drafts are point masses. None: no request's."""
        ...

    def processed(self, logits: Tensor, req_indices: Tensor, path: Tensor, count: Tensor) -> Tensor:
        """[rows, vocabulary], path [rows, D] of which the first `count` [rows] count → logits after
        everything but temperature, top_k, top_p and min_p."""
        ...

    def probs(self, logits: Tensor, req_indices: Tensor) -> Tensor:
        """Processed logits → the distribution of each row's request, float32; greedy rows are one-hot."""
        ...

    def uniform(self, req_indices: Tensor, index: Tensor, stream: int) -> Tensor:
        """[rows], [rows, n] → [rows, n] in [0, 1), float64, from (the request's seed, the token's index, the
        stream) alone."""
        ...

    def choose(self, weights: Tensor, req_indices: Tensor, index: Tensor, stream: int) -> Tensor:
        """weights [rows, vocabulary] ≥ 0, index [rows] → [rows], a token drawn in proportion: the one with
        the largest `race`."""
        ...

    def race(self, weights: Tensor, req_indices: Tensor, index: Tensor, stream: int) -> Tensor:
        """[rows, vocabulary] float64: weights over exponential noise that (seed, index, stream, token) alone
        decide."""
        ...

    def forced(self, limit: int, req_indices: Tensor) -> tuple[Tensor, Tensor] | None:
        """Tokens that grammars leave no choice about, after what is committed now: [rows, limit] and how many
        [rows]."""
        ...

    def advance(self, batch: Batch, verify_output: VerifyOutput) -> None:
        """A verdict was committed."""
        ...
