"""No drafts: with this drafter the step is an ordinary decoding step."""

from __future__ import annotations

from mtpserve.core.batch import Batch, Drafts, Hidden, Verdict


class NullDrafter:
    max_drafts = 0

    def draft(self, batch: Batch, hidden: Hidden, verdict: Verdict, want: int) -> Drafts | None:
        return None
