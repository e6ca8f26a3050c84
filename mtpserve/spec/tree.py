"""Drafting a tree with a draft model: the nodes with the best scores are expanded, and the best of all candidates are verified.

Each step runs the layer over `topk` nodes per request; each of them gives `topk` candidates, and the best candidates are expanded next.
All candidates stay in the pool; in the end those with the best scores, products of probabilities along the path, are taken (EAGLE-2,
https://arxiv.org/abs/2406.16858 §4). A child scores less than its parent, so the taken nodes form a tree.

Expanded nodes are stored in consecutive slots of the request in the order of expansion. A bitmask lets each attend to the committed
tokens and its own ancestors, so that each branch uses its own keys:

    slots     … committed | a b | c d | e f        a → c → e,  a → d → f,  b: not expanded further      f attends to a, d and itself

For requests that sample, the probabilities are replaced by each candidate's share of the race in which the target chooses its token
with the same noise (runtime/sampling): so the tree contains the tokens that the target will probably draw with this noise.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mtpserve.core.batch import Batch, Drafts, Hidden, Tree, Verdict, Want
from mtpserve.core.draft_sizes import DraftSizes
from mtpserve.spec.passes import DraftPasses
from mtpserve.spec.propose import valid
from mtpserve.spec.streams import DRAW

TIE = 1e-4  # subtracted for each level, so that a child of probability 1 scores less than its parent
LEAST = -1e30  # the score of a place without a proposal


@dataclass(frozen=True, slots=True)
class Frontier:
    """The nodes to be expanded next, B per request."""

    tokens: Tensor  # [D, B]
    scores: Tensor  # [D, B] logarithms
    pool: Tensor  # [D, B] their places in the pool
    path: Tensor  # [D, B, depth] their ancestors' tokens and their own
    bits: Tensor  # [D, B] their ancestors, as a set of expanded nodes
    state: Tensor | None  # [D, B, Features.width] the model's output at their parents


class TreeDrafter:
    """core.protocols.Drafter."""

    coupled = graph_safe = True

    def __init__(self, passes: DraftPasses, sizes: DraftSizes, topk: int) -> None:
        self.passes, self.sizes, self.topk = passes, sizes, topk
        self.features, self.lag = passes.model.features, passes.model.lag

    def draft(self, batch: Batch, hidden: Hidden, verdict: Verdict, want: Want) -> Drafts | None:
        hidden = self.passes.joined(batch, hidden, verdict)
        steps = min(want.deepest, self.sizes.steps)
        if steps == 0:
            self.passes.skip(batch, hidden, verdict, want)
            return None
        state, seat_ids = self.passes.absorb(batch, hidden, verdict)
        length = batch.seats.length[seat_ids]
        root = Frontier(
            length.new_zeros(len(length), 1),
            torch.zeros(len(length), 1, device=length.device),
            length.new_full((len(length), 1), -1),
            length.new_zeros(len(length), 1, 0),
            length.new_zeros(len(length), 1),
            None if state.features is None else state.features.unsqueeze(1),
        )
        pool, frontier = self.grow(batch, seat_ids, length, root, state, 0, 0)
        pools = [pool]
        for step in range(1, steps):
            fed, state = self.feed(batch, seat_ids, length, frontier, step)
            pool, frontier = self.grow(batch, seat_ids, length, fed, state, step, sum(part.tokens.shape[1] for part in pools))
            pools.append(pool)
        return choose(pools, want, self.sizes.proposed)

    def catch_up(self, batch: Batch) -> None:
        self.passes.catch_up(batch)

    def feed(self, batch: Batch, seat_ids: Tensor, length: Tensor, frontier: Frontier, step: int) -> tuple[Frontier, Hidden]:
        """One pass of the layer over the frontier's nodes. → the same nodes with their own bits set, and the output."""
        width = frontier.tokens.shape[1]
        first = (step - 1) * self.topk
        place = first + torch.arange(width, device=length.device)
        start = length - self.passes.model.lag  # index of the first node's row
        index = (start.unsqueeze(1) + place).flatten()
        positions = (start + step - 1).repeat_interleave(width)
        bits = frontier.bits | (1 << place)
        rows = self.passes.rows(batch, seat_ids, frontier.tokens.flatten(), index, positions)
        rows = rows._replace(tree_bits=bits.flatten(), tree_start=start)
        state = self.passes.step(rows, None if frontier.state is None else frontier.state.flatten(0, 1), step)
        return replace(frontier, bits=bits), state

    def grow(
        self, batch: Batch, seat_ids: Tensor, length: Tensor, parents: Frontier, state: Hidden, step: int, offset: int
    ) -> tuple[Pool, Frontier]:
        """The candidates from the parents' outputs, and the best of them as the next frontier."""
        requests, width = parents.tokens.shape
        owners, sampler = seat_ids.repeat_interleave(width), batch.sampler
        path, count = parents.path.flatten(0, 1), length.new_full((len(owners),), step)
        logits, columns = self.passes.logits(state.head, step, batch, owners, (path, count))
        logits = valid(logits)
        shares = logits.softmax(-1)
        if not sampler.all_greedy:
            index = (length + step).repeat_interleave(width)
            race = sampler.race(sampler.probs(logits, owners), owners, index, DRAW)
            drawn = (race / race.sum(-1, keepdim=True)).float()
            shares = torch.where(sampler.greedy(owners).unsqueeze(1), shares, drawn)
        best = shares.topk(min(self.topk, shares.shape[1]), -1)
        children = best.values.shape[1]
        gained = torch.where(best.values > 0, best.values.log(), LEAST).view(requests, width, children)
        scores = (parents.scores.unsqueeze(2) + gained - TIE).flatten(1)
        tokens = (best.indices if columns is None else columns[best.indices]).view(requests, -1)
        above = parents.pool.repeat_interleave(children, 1)
        pool = Pool(tokens, scores, above)
        kept = scores.topk(min(self.topk, scores.shape[1]), -1)
        parent = kept.indices // children
        each = torch.arange(requests, device=length.device).unsqueeze(1)
        chosen = tokens.gather(1, kept.indices)
        outputs = None if state.features is None else state.features.unflatten(0, (requests, width))[each, parent]
        return pool, Frontier(
            chosen,
            kept.values,
            offset + kept.indices,
            torch.cat([parents.path[each, parent], chosen.unsqueeze(2)], 2),
            parents.bits.gather(1, parent),
            outputs,
        )


@dataclass(frozen=True, slots=True)
class Pool:
    """The candidates of one depth."""

    tokens: Tensor  # [D, n]
    scores: Tensor  # [D, n]
    parents: Tensor  # [D, n] places in the pool of all depths, -1 for the root


def choose(pools: list[Pool], want: Want, nodes: int) -> Drafts:
    """The best `nodes` candidates of all depths, fewer and not as deep where `want` says so, as a tree. The best is node 1."""
    tokens, scores, parents = (torch.cat([getattr(pool, part) for pool in pools], 1) for part in ("tokens", "scores", "parents"))
    depth = torch.cat([tokens.new_full((pool.tokens.shape[1],), d) for d, pool in enumerate(pools, 1)])
    scores = scores.masked_fill(depth > want.each.unsqueeze(1), LEAST)
    # A parent scores more than its children, so that it comes before them.
    best = scores.topk(min(nodes, scores.shape[1]), -1)
    taken = best.indices
    number = torch.arange(1, taken.shape[1] + 1, device=taken.device)
    real = best.values > LEAST / 2
    real = real if want.most is None else real & (number <= want.most.unsqueeze(1))
    count = real.sum(1)
    node_of = taken.new_zeros(scores.shape[0], scores.shape[1] + 1)  # place in the pool → node; the root, node 0, is at the last place
    node_of = node_of.scatter(1, torch.where(real, taken, scores.shape[1]), torch.where(real, number, 0))
    above = parents.gather(1, taken)
    above = node_of.gather(1, torch.where(above < 0, scores.shape[1], above))
    above = torch.where(real, above, 0)
    return Drafts(tokens.gather(1, taken), count, tree=tree_of(above, len(pools)))


def tree_of(parents: Tensor, depth: int) -> Tree:
    """parents [D, K] → the tree; no node is deeper than `depth`."""
    number = torch.arange(parents.shape[1] + 1, device=parents.device)
    ancestors = (1 << number).expand(len(parents), -1)
    depths = (number > 0).long().expand(len(parents), -1)
    above = torch.cat([torch.zeros_like(parents[:, :1]), parents], 1)
    own = ancestors
    for _ in range(depth):
        ancestors = own | ancestors.gather(1, above)
    for _ in range(depth - 1):
        depths = (number > 0).long() + depths.gather(1, above)
    return Tree(parents, ancestors, depths)
