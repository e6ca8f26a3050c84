"""Verification of drafts, chain or tree. Without drafts it is sampling: there is no second sampler.

Two rules, both lossless, depending on the request's drafts:

    point masses      At every node the target chooses a token, as plain decoding does with the same seed.
    (coupled)         A draft is accepted if it is the token chosen at its parent. For any tree and any
                      source of drafts; the text is identical to plain decoding's.
    sampled from q    A chain of drafts that were each sampled from a known distribution q: reject.py. It
                      accepts more drafts of the same chain; the text has the same distribution as plain
                      decoding's, but is another one.

A greedy request's choice is its argmax under both rules.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mtpserve.core.batch import Batch, Tree, VerifyOutput
from mtpserve.spec.verify.logprobs import logprobs_of
from mtpserve.spec.verify.reject import reject
from mtpserve.spec.verify.streams import DRAW
from mtpserve.spec.verify.thresholds import Thresholds, lenient

LOSSLESS = Thresholds()


Verify = Callable[[Tensor, Batch, int, Thresholds], VerifyOutput]


def accept(
    logits: Tensor,
    batch: Batch,
    depth: int,
    thresholds: Thresholds = LOSSLESS,
    processed_logprobs: bool = False,
    kernel: Verify | None = None,
) -> VerifyOutput:
    """logits [R, K+1, vocabulary] of the rows `batch.sample_rows`; no draft is deeper than `depth`. `kernel`
    replaces `verify` unless the thresholds are lossy."""
    sampler, nodes = batch.sampler, logits.shape[1]
    depth = min(depth, nodes - 1)
    raw = logits
    if sampler.has_rules:
        ids = batch.req_indices.repeat_interleave(nodes)
        path, count = node_paths(batch.drafts, batch.tree)
        logits = sampler.processed(logits.flatten(0, 1), ids, path.flatten(0, 1), count.flatten()).view_as(
            logits
        )
    output = (kernel if kernel is not None and thresholds.lossless else verify)(
        logits, batch, depth, thresholds
    )
    if sampler.top_logprobs is None:
        return output
    rows = path_rows(output.path, output.tokens, output.num_accepted_tokens)
    p = None
    if processed_logprobs and not sampler.all_greedy:
        ids = batch.req_indices.repeat_interleave(nodes)
        p = sampler.probs(logits.flatten(0, 1), ids).view_as(logits)
    logprobs = logprobs_of(p, logits if processed_logprobs else raw, batch, rows, output.tokens)
    return replace(output, logprobs=logprobs)


def path_rows(path: Tensor | None, tokens: Tensor, accepted: Tensor) -> Tensor:
    """[R, D+1], the nodes at which the tokens were chosen."""
    return (
        torch.minimum(torch.arange(tokens.shape[1], device=tokens.device), accepted.unsqueeze(1))
        if path is None
        else path
    )


def verify(logits: Tensor, batch: Batch, depth: int, thresholds: Thresholds) -> VerifyOutput:
    """Takes processed logits [R, K+1, vocabulary]. Returns no log-probabilities."""
    sampler, nodes = batch.sampler, logits.shape[1]
    best = logits.max(-1)
    p: Tensor | None = None
    is_sampled: Tensor | None = None  # [R], requests whose drafts were sampled from q
    target_tokens = best.indices
    if not sampler.all_greedy:
        ids = batch.req_indices.repeat_interleave(nodes)
        p = sampler.probs(logits.flatten(0, 1), ids).view_as(logits)
        coupled = sampler.coupled(batch.req_indices)
        if not thresholds.lossless:
            p = lenient(p, batch, thresholds)
            coupled = torch.ones_like(batch.samples, dtype=torch.bool)
        is_sampled = ~sampler.greedy(batch.req_indices)
        if coupled is not None:
            depths = torch.arange(nodes, device=logits.device) if batch.tree is None else batch.tree.depths
            index = batch.req_tensors.num_tokens[batch.req_indices].unsqueeze(1) + depths
            target_tokens = sampler.choose(
                p.flatten(0, 1), ids, index.expand(-1, nodes).flatten(), DRAW
            ).view(-1, nodes)
            is_sampled = is_sampled & ~coupled
    tokens, accepted, surviving = walk(target_tokens, batch, depth)
    if is_sampled is not None and p is not None and not sampler.all_coupled:
        own_tokens, own_accepted = reject(p, batch, depth)
        tokens = torch.where(is_sampled.unsqueeze(1), own_tokens, tokens)
        accepted = torch.where(is_sampled, own_accepted, accepted)
        if surviving is not None:
            chain = torch.minimum(torch.arange(depth + 1, device=logits.device), accepted.unsqueeze(1))
            surviving = torch.where(is_sampled.unsqueeze(1), chain, surviving)
    # NaN and infinity show in a row's maximum. Only rows of accepted nodes matter: the others decided
    # nothing.
    broken = ~torch.isfinite(best.values if surviving is None else best.values.gather(1, surviving))
    if nodes == 1:
        return VerifyOutput(tokens, accepted, surviving, broken.squeeze(1))
    along = torch.arange(broken.shape[1], device=logits.device)
    return VerifyOutput(tokens, accepted, surviving, (broken & (along <= accepted.unsqueeze(1))).any(1))


def kernel_inputs(logits: Tensor, batch: Batch, drafts: Tensor, depth: int) -> tuple[Any, ...]:
    """The arguments of every device's `accept` kernel (mtpserve_kernels.spec.accept) for processed logits [R,
    K+1, vocabulary]. `drafts`: those of the batch, or what the kernel reads them from."""
    req_tensors, sampler, tree = batch.req_tensors, batch.sampler, batch.tree
    cuts = sampler.parameters
    return (
        logits.contiguous(), drafts, batch.num_draft_tokens, None if tree is None else tree.parents,
        None if tree is None else tree.depths,
        batch.req_indices, req_tensors.num_tokens, cuts.temperature, cuts.top_k, cuts.top_p, cuts.min_p,
        cuts.seed, cuts.coupled,
        None if sampler.all_coupled or sampler.all_greedy else req_tensors.draft_probs, depth,
    )  # fmt: skip


def walk(target_tokens: Tensor, batch: Batch, depth: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """target_tokens [R, K+1], the target's token at every node → tokens [R, D+1], accepted [R], path [R, D+1]
    (None: a chain's)."""
    if target_tokens.shape[1] == 1:  # no drafts: every number below would be 0
        return target_tokens, torch.zeros_like(batch.num_draft_tokens), None
    drafts, tree = batch.drafts, batch.tree
    number = torch.arange(drafts.shape[1], device=drafts.device)
    valid = number < batch.num_draft_tokens.unsqueeze(1)
    if tree is None:
        accepted = (valid & (drafts == target_tokens[:, :-1])).long().cumprod(1).sum(1)
        return target_tokens[:, : depth + 1], accepted, None
    matched = valid & (drafts == target_tokens.gather(1, tree.parents))
    refused = (~matched).long().mul(2 << number).sum(1, keepdim=True)  # as a set of nodes
    alive = (tree.ancestors & refused) == 0
    # Siblings have different tokens, so the accepted nodes form one path, and the deepest is its end.
    reached = torch.where(alive, tree.depths, -1)
    last = reached.argmax(1, keepdim=True)
    accepted = reached.gather(1, last).squeeze(1)
    path = path_to(tree, last, depth)
    return target_tokens.gather(1, path), accepted, path


def path_to(tree: Tree, node: Tensor, depth: int) -> Tensor:
    """node [R, 1] → [R, depth+1], the nodes from the root to it; the rest repeats it."""
    number = torch.arange(tree.ancestors.shape[1], device=node.device)
    member = (tree.ancestors.gather(1, node) >> number & 1).bool()
    columns = torch.where(member, tree.depths, depth + 1)  # nodes off the path go to a column that is cut off
    path = node.expand(-1, depth + 2).scatter(1, columns, number.expand_as(columns))
    return path[:, : depth + 1]


def node_paths(drafts: Tensor, tree: Tree | None) -> tuple[Tensor, Tensor]:
    """drafts [R, K] → the drafts on the path to each node, itself included [R, K+1, K], and their number [R,
    K+1]: the earlier tokens to which that node's rules apply."""
    spans, number = drafts.shape
    nodes = torch.arange(number + 1, device=drafts.device)
    if tree is None:
        return drafts.unsqueeze(1).expand(spans, number + 1, number), nodes.expand(spans, -1)
    member = (tree.ancestors.unsqueeze(2) >> nodes[1:] & 1).bool()  # [R, K+1, K]
    # the others go to a column that is cut off
    columns = torch.where(member, member.long().cumsum(2) - 1, number)
    path = drafts.new_zeros(spans, number + 1, number + 1).scatter(
        2, columns, drafts.unsqueeze(1).expand_as(columns)
    )
    return path[..., :number], tree.depths
