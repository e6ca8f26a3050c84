"""Drafting a tree with a draft model: the nodes with the best scores are expanded, and the best of all
candidates are verified.

Each step runs the layer over `topk` nodes per request; each of them gives `topk` candidates, and the best
candidates are expanded next. All candidates stay in the pool; in the end those with the best scores, products
of probabilities along the path, are taken (EAGLE-2, https://arxiv.org/abs/2406.16858 §4). A child scores less
than its parent, so the taken nodes form a tree.

Expanded nodes are stored in consecutive slots of the request in the order of expansion. A bitmask lets each
attend to the committed tokens and its own ancestors, so that each branch uses its own keys:

    slots     … committed | a b | c d | e f        a → c → e,  a → d → f,  b: not expanded further
                                                   f attends to a, d and itself

For requests that sample, the probabilities are replaced by each candidate's share of the race in which the
target chooses its token with the same noise (runtime/sampling/sampling): so the tree contains the tokens that
the target will probably draw with this noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import pad

from mtpserve.core.batch import Batch, Drafts, Hidden, Tree, VerifyOutput
from mtpserve.core.spec_sizes import SpecSizes
from mtpserve.spec.draft.passes import DraftPasses, numbers
from mtpserve.spec.draft.propose import valid
from mtpserve.spec.verify.streams import DRAW

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

    def __init__(self, passes: DraftPasses, sizes: SpecSizes, topk: int) -> None:
        self.passes, self.sizes, self.topk = passes, sizes, topk
        self.features, self.lag = passes.model.features, passes.model.lag

    def draft(self, batch: Batch, hidden: Hidden, verify_output: VerifyOutput) -> Drafts | None:
        hidden = self.passes.joined(batch, hidden, verify_output)
        steps = min(batch.draft_depth, self.sizes.steps)
        if steps == 0:
            self.passes.skip(batch, hidden, verify_output)
            return None
        assert batch.num_draft_steps is not None
        state, req_indices = self.passes.extend(batch, hidden, verify_output)
        length = batch.req_tensors.num_tokens[req_indices]
        root = Frontier(
            length.new_zeros(len(length), 1),
            torch.zeros(len(length), 1, device=length.device),
            length.new_full((len(length), 1), -1),
            length.new_zeros(len(length), 1, 0),
            length.new_zeros(len(length), 1),
            None if state.features is None else state.features.unsqueeze(1),
        )
        frontier, pools = root, [self.candidates(batch, req_indices, length, root, state, 0)]
        for step in range(1, steps):
            frontier = self.expand(pools, frontier, state)
            frontier, state = self.feed(batch, req_indices, length, frontier, step)
            pools.append(self.candidates(batch, req_indices, length, frontier, state, step))
        return choose(pools, batch.num_draft_steps, batch.max_draft_tokens, self.sizes.num_proposed)

    def store_deferred_kv(self, batch: Batch) -> None:
        self.passes.store_deferred_kv(batch)

    def feed(
        self, batch: Batch, req_indices: Tensor, length: Tensor, frontier: Frontier, step: int
    ) -> tuple[Frontier, Hidden]:
        """Runs the layer once over the frontier's nodes. → the same nodes with their own bits set, and the
        output."""
        width = frontier.tokens.shape[1]
        first = (step - 1) * self.topk
        offsets = numbers(first, first + width, 1, length.device)
        start = length - self.passes.model.lag  # index of the first node's row
        index = (start.unsqueeze(1) + offsets).flatten()
        positions = (start + step - 1).repeat_interleave(width)
        bits = frontier.bits | bit_of(first, first + width, length.device)
        rows = self.passes.rows(batch, req_indices, frontier.tokens.flatten(), index, positions)
        rows = rows._replace(tree_bits=bits.flatten(), tree_start=start)
        state = self.passes.step(rows, None if frontier.state is None else frontier.state.flatten(0, 1), step)
        return replace(frontier, bits=bits), state

    def candidates(
        self, batch: Batch, req_indices: Tensor, length: Tensor, parents: Frontier, state: Hidden, step: int
    ) -> Pool:
        """Returns the candidates that the parents' outputs propose."""
        requests, width = parents.tokens.shape
        owners, sampler = req_indices if width == 1 else req_indices.repeat_interleave(width), batch.sampler
        path, count = parents.path.flatten(0, 1), length.new_full((len(owners),), step)
        logits, columns = self.passes.logits(state.head, step, batch, owners, (path, count))
        logits = valid(logits)
        shares = logits.softmax(-1)
        if not sampler.all_greedy:
            index = (length + step).repeat_interleave(width)
            race = sampler.race(sampler.probs(logits, owners), owners, index, DRAW)
            sampled_shares = (race / race.sum(-1, keepdim=True)).float()
            shares = torch.where(sampler.greedy(owners).unsqueeze(1), shares, sampled_shares)
        best = shares.topk(min(self.topk, shares.shape[1]), -1)
        children = best.values.shape[1]
        gained = best.values.log().nan_to_num(nan=LEAST, neginf=LEAST).view(requests, width, children)
        scores = (parents.scores.unsqueeze(2) + gained - TIE).flatten(1)
        tokens = (best.indices if columns is None else columns[best.indices]).view(requests, -1)
        return Pool(tokens, scores, parents.pool.repeat_interleave(children, 1))

    def expand(self, pools: Sequence[Pool], parents: Frontier, state: Hidden) -> Frontier:
        """The best of the last candidates, with what is known of their parents."""
        *earlier, pool = pools
        requests, width = parents.tokens.shape
        best = pool.scores.topk(min(self.topk, pool.scores.shape[1]), -1)
        parent = best.indices // (pool.tokens.shape[1] // width)
        request = numbers(0, requests, 1, parent.device).unsqueeze(1)
        tokens = pool.tokens.gather(1, best.indices)
        return Frontier(
            tokens,
            best.values,
            sum(candidates.tokens.shape[1] for candidates in earlier) + best.indices,
            torch.cat([parents.path[request, parent], tokens.unsqueeze(2)], 2),
            parents.bits.gather(1, parent),
            None
            if state.features is None
            else state.features.unflatten(0, (requests, width))[request, parent],
        )


@dataclass(frozen=True, slots=True)
class Pool:
    """The candidates of one depth."""

    tokens: Tensor  # [D, n]
    scores: Tensor  # [D, n]
    parents: Tensor  # [D, n] places in the pool of all depths, -1 for the root


def choose(pools: list[Pool], num_steps: Tensor, max_draft_tokens: Tensor | None, nodes: int) -> Drafts:
    """The best `nodes` candidates of all depths, as a tree. The best is node 1. `num_steps` [D] limits the
    depth, `max_draft_tokens` [D] the number."""
    tokens, scores, parents = (
        torch.cat([getattr(pool, name) for pool in pools], 1) for name in ("tokens", "scores", "parents")
    )
    depth = depths_of(1, tuple(pool.tokens.shape[1] for pool in pools), tokens.device)
    scores = scores.masked_fill(depth > num_steps.unsqueeze(1), LEAST)
    # A parent scores more than its children, so that it comes before them.
    best = scores.topk(min(nodes, scores.shape[1]), -1)
    selected = best.indices
    number = numbers(1, selected.shape[1] + 1, 1, selected.device)
    void = best.values <= LEAST / 2
    void = void if max_draft_tokens is None else void | (number > max_draft_tokens.unsqueeze(1))
    count = len(number) - void.sum(1)
    # place in the pool → node; the root, node 0, is at the last place
    node_of = selected.new_zeros(scores.shape[0], scores.shape[1] + 1)
    node_of = node_of.scatter(
        1, selected.masked_fill(void, scores.shape[1]), number.expand_as(selected).masked_fill(void, 0)
    )
    above = parents.gather(1, selected)
    above = node_of.gather(1, above.masked_fill(above < 0, scores.shape[1])).masked_fill(void, 0)
    return Drafts(tokens.gather(1, selected), count, tree=tree_of(above, len(pools)))


def tree_of(parents: Tensor, depth: int) -> Tree:
    """parents [D, K] → the tree; no node is deeper than `depth`."""
    nodes, device = parents.shape[1] + 1, parents.device
    bits, deeper = bit_of(0, nodes, device), depths_of(0, (1, nodes - 1), device)
    ancestors, depths = bits.expand(len(parents), -1), deeper.expand(len(parents), -1)
    above = pad(parents, (1, 0))
    for _ in range(depth):
        ancestors = bits | ancestors.gather(1, above)
    for _ in range(depth - 1):
        depths = deeper + depths.gather(1, above)
    return Tree(parents, ancestors, depths)


@cache
def bit_of(first: int, end: int, device: torch.device) -> Tensor:
    """Returns 1 << i for each node i, made once, as `numbers` is."""
    return 1 << numbers(first, end, 1, device)


@cache
def depths_of(first: int, sizes: tuple[int, ...], device: torch.device) -> Tensor:
    """Returns the depth of each node: `sizes` nodes at each depth from `first` on. Made once, as `numbers`
    is."""
    return torch.cat([torch.full((size,), depth, device=device) for depth, size in enumerate(sizes, first)])
