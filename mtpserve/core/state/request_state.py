"""One request as the scheduler sees it. Mutable, on the host, no tensors."""

from __future__ import annotations

from dataclasses import dataclass, field

from mtpserve.core.request import Finish, Request
from mtpserve.core.sampling import SamplingParams
from mtpserve.core.state.cache_state import CacheState
from mtpserve.core.state.draft_state import DraftingState
from mtpserve.core.state.queue_state import QueueState


@dataclass(slots=True)
class RequestState:
    """The token ranges, for a decoding request with two drafts:

        tokens                |---- prompt ----|---- output ----|x|
        num_computed_tokens   |------- KV is in the pages ------|
        num_draft_tokens                                          |d1 d2|      drafts are not in `tokens`

    `num_computed_tokens < len(tokens)` while the request lives: the step that verifies what follows the last
    token writes that token's KV.

    Steps may be in flight: launched, with results that are not yet committed. The host knows two bounds.
    These steps compute `num_scheduled_tokens` tokens, and each of `num_pending_outputs` spans gives at least
    one token. The device knows the exact numbers.
    """

    request: Request  # with its seed
    tokens: list[int]  # prompt and output
    max_num_tokens: int  # prompt + max_tokens, at most the context length
    # Prompt tokens, from the second on, whose log-probabilities were reported.
    num_scored_prompt_tokens: int = 0
    # From so many output tokens on the host must commit its last step before it can launch the next one.
    synchronous_from: int | None = None
    num_write_ahead: int = 0  # tokens after the last committed one that a step may write for it
    # Tokens after those that the host knows for which it holds pages: SpecSizes.num_lookahead_tokens.
    num_lookahead_tokens: int = 0
    num_computed_tokens: int = 0
    num_scheduled_tokens: int = 0  # `num_computed_tokens`, and the committed tokens of the spans in flight
    num_pending_outputs: int = 0  # spans in flight that give tokens
    # Drafts on the device that the next span verifies. With spans in flight this is an upper bound.
    num_draft_tokens: int = 0
    req_idx: int | None = None  # its row in the runner's tensors while it runs
    finish: Finish | None = None
    error: str | None = None
    cache: CacheState = field(default_factory=CacheState)
    draft: DraftingState = field(default_factory=DraftingState)
    queue: QueueState = field(default_factory=QueueState)

    @property
    def id(self) -> str:
        return self.request.id

    @property
    def sampling(self) -> SamplingParams:
        return self.request.sampling

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt)

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def prefill_end(self) -> int:
        """The number of tokens that are computed before the request decodes."""
        return len(self.tokens) - (1 if self.num_output_tokens > 0 else 0)

    @property
    def num_free_tokens(self) -> int:
        """Tokens that it may still produce."""
        return self.max_num_tokens - len(self.tokens)

    @property
    def num_expected_tokens(self) -> int:
        """The fewest tokens that it has once all steps in flight are committed, unless it ends before."""
        return len(self.tokens) + self.num_pending_outputs

    @property
    def is_synchronous(self) -> bool:
        return self.synchronous_from is not None and self.num_output_tokens >= self.synchronous_from

    @property
    def in_flight(self) -> bool:
        return self.num_scheduled_tokens != self.num_computed_tokens

    def check_counters(self, num_slots: int, max_deferred_tokens: int) -> None:
        """`num_slots`: tokens for which it holds pages. Raises RuntimeError where a running request's
        counters contradict each other."""
        computed, scheduled = self.num_computed_tokens, self.num_scheduled_tokens
        num_stored, deferred = self.cache.num_stored_tokens, self.draft.num_deferred_tokens
        if not computed < len(self.tokens) < self.max_num_tokens or scheduled > num_slots:
            raise RuntimeError(
                f"request {self.id}: {computed} of {len(self.tokens)} tokens computed, pages for {num_slots}"
            )
        if not num_stored <= computed <= num_stored + max_deferred_tokens or deferred > max_deferred_tokens:
            raise RuntimeError(
                f"request {self.id}: {num_stored} of {computed} tokens stored, {deferred} deferred"
            )
        outputs = self.num_pending_outputs
        if self.in_flight != (scheduled > computed) or outputs < 0 or (outputs and not self.in_flight):
            raise RuntimeError(
                f"request {self.id}: {scheduled} tokens scheduled, {computed} computed, {outputs} outputs"
            )

    def check_waiting(self) -> None:
        """Raises RuntimeError where a waiting request holds anything."""
        counts = self.num_computed_tokens, self.num_draft_tokens
        if self.cache.blocks or self.req_idx is not None or any(counts):
            raise RuntimeError(
                f"request {self.id} waits but holds {self.cache.blocks} and row {self.req_idx}"
            )
