"""How much room drafting needs: computed once from the options, read by scheduler, seats, memory plan and captured steps alike."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DraftSizes:
    """All numbers are per request. The defaults are those of plain decoding.

    A request is *plain* if it has neither a grammar nor a prediction: then only the algorithm proposes drafts for it.
    """

    steps: int = 0  # depth to which the algorithm drafts
    proposed: int = 0  # drafts that the algorithm proposes at most; `steps` for a chain
    written: int = 0  # tokens after the last committed one whose slots the algorithm's passes write, or whose drafts wait
    free: int = 0  # further drafts that cost no pass of a model: what a grammar forces, a prediction or n-grams continue with
    always_free: bool = False  # n-grams look at every request, so that plain ones have free drafts too
    trees: bool = False  # the algorithm's own drafts branch

    @property
    def depth(self) -> int:
        """Of the deepest draft."""
        return max(self.steps, self.free)

    @property
    def branching(self) -> bool:
        """A request's drafts may be a tree."""
        return self.trees or self.free > 0

    @property
    def nodes(self) -> int:
        """Drafts that a request may bring to one step."""
        return self.proposed + self.free

    @property
    def rows_per_step(self) -> int:
        """Rows of a request that is verified: its last committed token and its drafts."""
        return self.nodes + 1

    def reach(self, plain: bool = False) -> int:
        """Tokens after the last committed one that a step may write."""
        return self.written if plain and not self.always_free else max(self.written, self.nodes)

    def lookahead(self, in_flight: int, plain: bool = False) -> int:
        """Tokens after those that the host knows for which pages are held: what each step commits and drafts, of the `in_flight`
        steps that may be launched and not read, too."""
        return (2 + in_flight) * (self.reach(plain) + 1)

    def proposals(self, want: int, plain: bool) -> int:
        """Drafts that a step which drafts `want` deep may leave waiting, at most."""
        if want == 0:
            return 0
        if not plain or self.always_free:
            return self.nodes
        return self.proposed if self.trees else min(want, self.steps)
