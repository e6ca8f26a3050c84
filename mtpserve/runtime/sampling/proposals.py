"""Proposals of a request with a grammar, for a step that is captured: nothing is read while such a step runs,
so the host decides before it. It knows the text and what waits after it, and computes which proposals stay
and what may follow each.

    waits         { → "a → :         the grammar forces {"name":
    stays         {" → name → ":     what the grammar forces goes first
                  { → "a  is not allowed, and is gone

Proposals may be replaced: a request with a grammar has point masses, whose verification is lossless for any
tokens (spec/verify/accept).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from mtpserve.core.batch import Source
from mtpserve.core.protocols.grammars import Grammar


class Node(NamedTuple):
    """Node 0 is the text's last token; a parent comes before its children, as in core.batch.Tree."""

    token: int
    parent: int
    source: int


@dataclass(frozen=True, slots=True)
class ProposalLimits:
    nodes: int  # proposals of one request, at most
    depth: int  # of the deepest
    forced: int  # tokens that a grammar may add
    steps: int  # a request that limits the depth to less limits these tokens too
    branches: bool  # not so: proposals are a chain

    def limited(self, depth: int) -> ProposalLimits:
        """The limits of a request that wants no deeper proposals."""
        return self if depth >= self.steps else replace(self, forced=min(self.forced, depth))


class Proposals:
    """What stays of one request's proposals. `words` [1 + nodes, words] int32: what may follow each node, as
    core.protocols.grammars has it."""

    def __init__(self, grammar: Grammar, vocab: int, limits: ProposalLimits, waiting: Seq[Node] = ()) -> None:
        """`waiting`: what the device has, in its order."""
        self.grammar, self.limits = grammar, limits
        self.nodes: list[Node] = []
        self.paths: list[list[int]] = [[]]  # of each node
        self.rows = np.empty((limits.nodes + 1, -(-vocab // 32)), dtype=np.int32)
        grammar.masks(self.paths, self.rows[:1])
        self.forced = limits.forced
        self.force(0)
        numbers: list[int | None] = [0]  # of each node that waits, among those that stay
        for token, parent, source in waiting:
            above = numbers[parent]
            node = None if above is None else self.child(above, token)
            if node is None and above is not None:
                node = self.add(token, above, source)
                self.force(node)
            numbers.append(node)
        self.loses_first = None in numbers[1:2]

    @property
    def words(self) -> np.ndarray:
        return self.rows[: len(self.paths)]

    def child(self, parent: int, token: int) -> int | None:
        return next(
            (
                number
                for number, node in enumerate(self.nodes, 1)
                if node.parent == parent and node.token == token
            ),
            None,
        )

    def add(self, token: int, parent: int, source: int) -> int | None:
        """Returns the new node's number; None: there is no room, or the grammar forbids it."""
        path, number = [*self.paths[parent], token], len(self.paths)
        if number > self.limits.nodes or len(path) > self.limits.depth:
            return None
        if parent != number - 1 and not self.limits.branches:
            return None
        if not self.grammar.masks([path], self.rows[number : number + 1])[0]:
            return None
        self.nodes.append(Node(token, parent, source))
        self.paths.append(path)
        return number

    def force(self, node: int | None) -> None:
        """Adds what the grammar forces after `node`."""
        if node is None or self.forced == 0:
            return
        for token in self.grammar.forced(self.paths[node], self.forced):
            node = self.add(token, node, Source.GRAMMAR)
            if node is None:
                return
            self.forced -= 1
