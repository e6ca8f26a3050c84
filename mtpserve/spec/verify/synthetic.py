"""Synthetic acceptance by a given curve: for measurements with weights or prompts whose acceptance is not
that of real ones.

Drafting and verification run as usual; then the number of accepted drafts is sampled for each request, and
these drafts and the target's choice after them are committed. In a tree, the path of first children from the
root is followed. The text is meaningless, but rules apply: a token that the request forbids is never
accepted. Nothing is read on the host, so it can be part of a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import torch
from torch import Tensor

from mtpserve.core.batch import Batch, VerifyOutput
from mtpserve.spec.verify.accept import Verify
from mtpserve.spec.verify.streams import DRAW, LOT
from mtpserve.spec.verify.thresholds import Thresholds


class SyntheticAcceptance:
    """spec.verify.accept.Verify, wrapping another. `rates` [depth]: the probability of each draft if all
    before it were accepted."""

    def __init__(self, verify: Verify, rates: Seq[float], device: torch.device) -> None:
        self.verify, self.rates = verify, torch.tensor(rates, dtype=torch.float64, device=device)

    def __call__(self, logits: Tensor, batch: Batch, depth: int, thresholds: Thresholds) -> VerifyOutput:
        return by_lot(self.verify(logits, batch, depth, thresholds), logits, batch, self.rates)


def by_lot(output: VerifyOutput, logits: Tensor, batch: Batch, rates: Tensor) -> VerifyOutput:
    """logits [R, K+1, vocabulary], processed; rates [D or more]."""
    depth = output.tokens.shape[1] - 1
    if depth == 0:
        return output
    sampler, ids, length = batch.sampler, batch.req_indices, batch.req_tensors.num_tokens[batch.req_indices]
    batch_idx, offsets = torch.arange(len(ids), device=ids.device), torch.arange(depth, device=ids.device)
    path, exists = first_children(batch, depth)
    drafts = batch.drafts.gather(1, path[:, 1:] - 1)
    lots = sampler.uniform(ids, length.unsqueeze(1) + offsets, LOT)
    allowed = logits[batch_idx.unsqueeze(1), path[:, :-1], drafts] > -torch.inf
    accepted = (exists & allowed & (lots < rates[:depth])).long().cumprod(1).sum(1)
    row = logits[batch_idx, path[batch_idx, accepted]]
    next_tokens = (
        row.argmax(-1)
        if sampler.all_greedy
        else sampler.choose(sampler.probs(row, ids), ids, length + accepted, DRAW)
    )
    tokens = torch.cat([drafts, next_tokens.unsqueeze(1)], 1).index_put((batch_idx, accepted), next_tokens)
    if output.path is not None:
        path = path.gather(
            1, torch.minimum(torch.arange(depth + 1, device=ids.device), accepted.unsqueeze(1))
        )
    return replace(
        output,
        tokens=tokens,
        num_accepted_tokens=accepted,
        path=None if output.path is None else path,
        failed=output.failed | ~torch.isfinite(row.amax(-1)),
    )


def first_children(batch: Batch, depth: int) -> tuple[Tensor, Tensor]:
    """→ the nodes from the root down [R, depth+1], and which of those after the root exist [R, depth]; the
    others are arbitrary."""
    count = batch.num_draft_tokens.unsqueeze(1)
    number = torch.arange(depth, device=count.device)
    if batch.tree is None:
        return torch.arange(depth + 1, device=count.device).expand(len(count), -1), number < count
    real = torch.arange(batch.tree.parents.shape[1], device=count.device) < count
    nodes, exists = [torch.zeros_like(count)], list[Tensor]()
    for _ in range(depth):
        child = real & (batch.tree.parents == nodes[-1])
        if exists:
            child = child & exists[-1]
        exists.append(child.any(1, keepdim=True))
        nodes.append(child.long().argmax(1, keepdim=True) + 1)  # argmax gives the first of equal ones
    return torch.cat(nodes, 1), torch.cat(exists, 1)
