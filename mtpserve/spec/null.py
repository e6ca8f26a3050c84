"""No drafts: with this drafter the step is an ordinary decoding step."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from mtpserve.core.batch import Batch, Drafts, Hidden, Verdict


class NullDrafter:
    max_drafts = depth = reach = plain_reach = 0
    trees, coupled = False, False

    def draft(self, batch: Batch, hidden: Hidden, verdict: Verdict, want: Seq[int]) -> Drafts | None:
        return None
