"""No drafts: with this drafter a step is ordinary decoding."""

from __future__ import annotations

from mtpserve.core.arch import Features
from mtpserve.core.batch import Batch, Drafts, Hidden, Verdict, Want
from mtpserve.core.draft_sizes import DraftSizes


class NullDrafter:
    sizes = DraftSizes()
    features, lag = Features(), None
    coupled = False
    graph_safe = True

    def draft(self, batch: Batch, hidden: Hidden, verdict: Verdict, want: Want) -> Drafts | None:
        return None
