"""Several sources of drafts in one tree: a base (an MTP chain or tree, or nothing), and chains that need no
pass of a model.

Equal beginnings share their nodes, so a chain that begins like the base's only extends it:

    base    x → a → b        grammar   x → a → c → d        together   x → a → b
                                                                           └→ c → d

If no request of the batch has such a chain, the base's drafts are returned unchanged, and a sampled chain
keeps its q.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mtpserve.core.batch import Batch, Drafts, Hidden, Source, VerifyOutput
from mtpserve.core.protocols.models import Drafter
from mtpserve.core.spec_sizes import SpecSizes
from mtpserve.spec.draft.ngram import continued, predicted
from mtpserve.spec.draft.tree import tree_of

Chain = tuple[Tensor, Tensor, Source]  # tokens [D, n], how many [D]


class CombinedDrafter:
    """`sizes.free` nodes per request for chains, in addition to the base's. With `always_free`, n-grams are
    looked up for every request."""

    def __init__(self, base: Drafter) -> None:
        self.base, self.sizes, self.coupled = base, base.sizes, base.coupled
        self.features, self.lag = base.features, base.lag
        self.graph_safe = base.graph_safe and not self.sizes.always_free

    def draft(self, batch: Batch, hidden: Hidden, verify_output: VerifyOutput) -> Drafts | None:
        drafts = self.base.draft(batch, hidden, verify_output)
        if batch.draft_depth == 0 or self.sizes.free == 0:
            return drafts
        assert batch.num_draft_steps is not None
        req_indices = batch.drafted(batch.req_indices)
        chains = self.chains(batch, req_indices)
        if not chains:
            return drafts
        # A request that limits the depth to less than the base's limits its free drafts too.
        allowed = torch.where(
            batch.num_draft_steps >= self.sizes.steps, self.sizes.free, batch.num_draft_steps
        )
        limited = [(tokens, torch.minimum(count, allowed), source) for tokens, count, source in chains]
        return merge(drafts, len(req_indices), limited, self.sizes)

    def store_deferred_kv(self, batch: Batch) -> None:
        self.base.store_deferred_kv(batch)

    def chains(self, batch: Batch, req_indices: Tensor) -> list[Chain]:
        """The likeliest first: nodes may run out."""
        chains: list[Chain] = []
        forced = batch.sampler.forced(self.sizes.free, req_indices)
        if forced is not None:
            chains.append((*forced, Source.GRAMMAR))
        if batch.predictions is None and not self.sizes.always_free:
            return chains
        req_tensors = batch.req_tensors
        length = req_tensors.num_tokens[req_indices]
        if batch.predictions is not None:
            prediction, size = map(batch.drafted, batch.predictions)
            tokens, prompt = (
                req_tensors.tokens[req_indices, : int(length.max())],
                req_tensors.num_prompt_tokens(req_indices),
            )
            chains.append(
                (*predicted(prediction, size, tokens, length, prompt, self.sizes.free), Source.PREDICTION)
            )
        if self.sizes.always_free:
            chains.append(
                (*continued(req_tensors.tokens, req_indices, length, self.sizes.free), Source.NGRAM)
            )
        return chains


def merge(drafts: Drafts | None, requests: int, chains: list[Chain], sizes: SpecSizes) -> Drafts:
    """Walks each chain from the root, and adds a node where the tree has no such child."""
    device, room = chains[0][0].device, sizes.nodes
    tokens = torch.zeros(requests, room, dtype=torch.int64, device=device)
    parents, sources, count = tokens.clone(), tokens.clone(), tokens[:, 0].clone()
    if drafts is not None:
        number, count = drafts.tokens.shape[1], drafts.num_draft_tokens.clone()
        tokens[:, :number] = drafts.tokens
        parents[:, :number] = (
            torch.arange(number, device=device) if drafts.tree is None else drafts.tree.parents
        )
        sources[:, :number] = 0 if drafts.sources is None else drafts.sources
    batch_idx, columns = torch.arange(requests, device=device), torch.arange(room, device=device)
    for chain, size, source in chains:
        node = torch.zeros_like(count)
        for step in range(chain.shape[1]):
            token, in_chain = chain[:, step], step < size
            child = (
                (parents == node.unsqueeze(1))
                & (tokens == token.unsqueeze(1))
                & (columns < count.unsqueeze(1))
            )
            is_duplicate = child.any(1)
            added = in_chain & ~is_duplicate & (count < room)
            at = torch.where(added, count, room - 1)
            for table, value in ((tokens, token), (parents, node), (sources, torch.full_like(token, source))):
                table[batch_idx, at] = torch.where(added, value, table[batch_idx, at])
            count = count + added
            # A chain ends when there is no room for its next node.
            size = torch.where(is_duplicate | added, size, 0)
            if source is Source.GRAMMAR:
                # A forced token's source is the grammar, even if the base proposed it too.
                sources = torch.where(child & in_chain.unsqueeze(1), int(source), sources)
            node = torch.where(is_duplicate, child.long().argmax(1) + 1, torch.where(added, count, node))
    depth = min(sizes.depth, room)
    return Drafts(tokens, count, None if drafts is None else drafts.probs, tree_of(parents, depth), sources)
