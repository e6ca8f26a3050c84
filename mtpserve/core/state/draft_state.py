"""What drafting keeps of one request."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class DraftingState:
    coupled: bool = False  # as in core.plan.NewRequest
    max_pending_draft_tokens: int = 0  # drafts that a step may leave for it
    has_mixed_sources: bool = False  # some drafts come from a grammar, a prediction or n-grams
    max_draft_tokens: int | None = None  # the policy's limit after its next span; None: no limit
    num_deferred_tokens: int = 0  # rows of the last launched steps whose draft KV is not stored
    acceptance_factor: float = 1.0  # its acceptance over the average: see engine/depth/survival
    last_probe: int = 0  # the last step that drafted for it at another depth: see engine/depth/policy

    @property
    def pending_draft_limit(self) -> int:
        """Drafts that a step may leave for it, at most, as the policy has limited them."""
        if self.max_draft_tokens is None or self.has_mixed_sources:
            return self.max_pending_draft_tokens
        return min(self.max_pending_draft_tokens, self.max_draft_tokens)
