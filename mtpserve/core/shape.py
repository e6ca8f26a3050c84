"""The shape of a span's draft tokens: which draft continues which. A chain is a tree with one branch; no drafts is a chain of 0."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

MAX_DRAFTS = 63  # one bit each in an int64, and the root


@dataclass(frozen=True)
class SpanShape:
    """`parents[i]` is the node that draft i+1 continues; node 0 is the last committed token.

    chain(3):   0 → 1 → 2 → 3          parents (0, 1, 2)
    tree:       0 → 1 → 3              parents (0, 0, 1)
                └→ 2
    """

    parents: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(self.parents) > MAX_DRAFTS:
            raise ValueError(f"a span takes at most {MAX_DRAFTS} drafts, got {len(self.parents)}")
        if any(not 0 <= p <= i for i, p in enumerate(self.parents)):
            raise ValueError(f"a draft's parent stands before it: {self.parents}")

    @classmethod
    @lru_cache(maxsize=MAX_DRAFTS + 1)
    def chain(cls, drafts: int) -> SpanShape:
        return cls(tuple(range(drafts)))

    @property
    def size(self) -> int:
        return len(self.parents)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Depth of every node, the root's 0 first."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @property
    def depth(self) -> int:
        return max(self.depths)

    @property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(self.size))

    @cached_property
    def ancestor_bits(self) -> tuple[int, ...]:
        """Per node the set of nodes that it attends to inside the span, itself included: bit j for node j."""
        bits = [1]
        for node, parent in enumerate(self.parents, 1):
            bits.append(bits[parent] | 1 << node)
        return tuple(bits)
