"""The sizes of drafting: computed once from the options, used by scheduler, seats, memory plan and captured
steps."""

from __future__ import annotations

from dataclasses import dataclass

from mtpserve.core.errors import ConfigError, PoolTooSmall


@dataclass(frozen=True, slots=True)
class SpecShape:
    """What the algorithm drafts for each request, as the options have it. The default is plain decoding."""

    steps: int = 0
    topk: int = 1  # 1 is a chain, of as many nodes as steps
    nodes: int = 0  # drafts that are verified

    @property
    def pool(self) -> int:
        """Candidates that such a tree has: topk in the first step, topk for each of topk nodes in each
        further one."""
        return self.topk + (self.steps - 1) * self.topk**2 if self.steps else 0


@dataclass(frozen=True, slots=True)
class SpecSizes:
    """All numbers are per request. The defaults are those of plain decoding.

    A request is *plain* if it has neither a grammar nor a prediction: then only the algorithm proposes drafts
    for it.
    """

    steps: int = 0  # depth of the algorithm's drafts
    num_proposed: int = 0  # the most drafts that the algorithm proposes; `steps` for a chain
    # slots after the last committed token that the algorithm's passes write, or that its pending drafts will
    written: int = 0
    # further drafts, without a pass of a model: tokens that a grammar forces, or from a prediction or n-grams
    free: int = 0
    # n-grams are looked up for every request, so that plain ones have free drafts too
    always_free: bool = False
    trees: bool = False  # the algorithm's own drafts are a tree
    # rows of a request that a draft model may absorb in a later step, all at once, while nothing is drafted
    max_deferred_tokens: int = 0

    @property
    def depth(self) -> int:
        """Depth of the deepest draft."""
        return max(self.steps, self.free)

    def holds(self, other: SpecSizes) -> bool:
        """True if tensors of these sizes have room for the other's drafts."""
        pairs = (
            (self.depth, other.depth),
            (self.nodes, other.nodes),
            (self.num_proposed, other.num_proposed),
            (self.num_write_ahead(), other.num_write_ahead()),
        )
        return all(ours >= theirs for ours, theirs in pairs) and (self.branching or not other.branching)

    @property
    def branching(self) -> bool:
        """True if a request's drafts may be a tree."""
        return self.trees or self.free > 0

    @property
    def nodes(self) -> int:
        """Drafts that a request may bring to one step."""
        return self.num_proposed + self.free

    @property
    def rows_per_step(self) -> int:
        """Rows of a request that is verified: its last committed token and its drafts."""
        return self.nodes + 1

    def require(self, budget: int, room: int, reserve: int) -> None:
        """`budget`: rows of a step. `room`: tokens that a request may have, `reserve` those of the pool that
        are kept for its drafts. Raises ConfigError."""
        rows = self.rows_per_step
        if budget < rows:
            raise ConfigError(
                f"--chunked-prefill-size must be at least {rows}, for one token and {rows - 1} drafts "
                f"of a request, got {budget}"
            )
        if room < 2:
            least = f"at least {reserve + 2}: two tokens and {reserve} kept for drafting"
            raise PoolTooSmall(f"--max-total-tokens must be {least}, got {room + reserve}")

    def num_write_ahead(self, plain: bool = False) -> int:
        """Tokens after the last committed one that a step may write."""
        return self.written if plain and not self.always_free else max(self.written, self.nodes)

    def num_lookahead_tokens(self, in_flight: int, plain: bool = False) -> int:
        """Tokens after those that the host knows for which pages are held: what each step commits and drafts,
        including the `in_flight` steps that may be launched and not read yet."""
        return (2 + in_flight) * (self.num_write_ahead(plain) + 1)

    def max_draft_tokens(self, draft_depth: int, plain: bool, limit: int | None = None) -> int:
        """The most drafts that a step may leave for the next one if it drafts to depth `draft_depth`, `limit`
        of them by the algorithm."""
        if draft_depth == 0:
            return 0
        if not plain or self.always_free:
            return self.nodes
        num_drafts = self.num_proposed if self.trees else min(draft_depth, self.steps)
        return num_drafts if limit is None else min(num_drafts, limit)
