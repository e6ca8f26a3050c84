"""What the kernels beside it compute, in plain torch, one node after the other: the laws of acceptance written down plainly."""

from __future__ import annotations

import torch
from torch import Tensor

from mtpserve_kernels.noise import finalise, keyed, noise, unit

DRAFT, COIN, DRAW = 0, 1, 2  # streams


def argmax(logits: Tensor) -> Tensor:
    """See argmax.argmax."""
    return logits.argmax(-1)


def law(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """logits [V] → float32 [V]: temperature, then the top_k, of those the top_p, of those what has min_p of the largest."""
    scaled = (logits - logits.max()) / temperature
    if top_k > 0:
        scaled = scaled.masked_fill(scaled < scaled.topk(min(top_k, len(scaled))).values[-1], -torch.inf)
    p = scaled.softmax(-1)
    if top_p < 1:
        ordered = p.sort(descending=True).values
        least = ordered[ordered.cumsum(-1) - ordered < top_p][-1]
        p = p.masked_fill(p < least, 0)
        p = p / p.sum()
    if min_p > 0:
        p = p.masked_fill(p < min_p * p.max(), 0)
        p = p / p.sum()
    return p


def race(weights: Tensor, key: Tensor) -> int:
    """The token with the largest weight over exponential noise: drawn in proportion to the weights (Gumbel's trick)."""
    return int((weights.double() / noise(key, len(weights))).argmax())


def accept(
    logits: Tensor, drafts: Tensor, num_draft_tokens: Tensor, parents: Tensor | None, depths: Tensor | None, seats: Tensor, length: Tensor,
    temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seed: Tensor, coupled: Tensor, draft_probs: Tensor | None,
    depth: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """See accept.accept."""
    requests, nodes, _ = logits.shape
    tokens = torch.zeros(requests, depth + 1, dtype=torch.int64, device=logits.device)
    path = torch.zeros_like(tokens)
    accepted, failed = torch.zeros_like(num_draft_tokens), torch.zeros(requests, dtype=torch.bool, device=logits.device)
    for r, req_idx in enumerate(seats.tolist()):
        warm = float(temperature[req_idx]) > 0
        drawn = warm and not bool(coupled[req_idx]) and draft_probs is not None
        node, at = 0, 0
        while True:
            row = logits[r, node]
            path[r, at] = node
            finite = bool(row.max().isfinite()) and not bool(row.isnan().any())
            if not finite:
                failed[r] = True
                break
            index = length[req_idx] + at
            p = law(row, float(temperature[req_idx]), int(top_k[req_idx]), float(top_p[req_idx]), float(min_p[req_idx])) if warm else None
            chosen = int(row.argmax()) if p is None else race(p, keyed(seed[req_idx], index, DRAW))
            count = min(int(num_draft_tokens[r]), nodes - 1)
            children = [c for c in range(count) if (c if parents is None else int(parents[r, c])) == node]
            kept = [c for c in children if int(drafts[r, c]) == chosen]
            if drawn and p is not None and draft_probs is not None:
                kept = []
                if children and at < depth:
                    draft, q = int(drafts[r, node]), draft_probs[req_idx, node]
                    if unit(finalise(keyed(seed[req_idx], index, COIN))) * q[draft].double() < p[draft].double():
                        kept, chosen = [node], draft
                    else:
                        rest = (p - q).clamp(min=0)
                        chosen = race(rest if rest.sum() > 0 else p, keyed(seed[req_idx], index, DRAW))
            tokens[r, at] = chosen
            if not kept or at == depth:
                break
            node, at = kept[0] + 1, at + 1
        accepted[r] = at
        path[r, at:] = node
    return tokens, accepted, path, failed


def draw(
    logits: Tensor, seats: Tensor, index: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seed: Tensor,
    coupled: Tensor | None, q: Tensor | None,
) -> Tensor:  # fmt: skip
    """See draw.draw."""
    tokens = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    for r, req_idx in enumerate(seats.tolist()):
        row = logits[r]
        p = torch.zeros_like(row).index_fill_(0, row.argmax(), 1.0)
        tokens[r] = row.argmax()
        if float(temperature[req_idx]) > 0 and bool(row.max().isfinite()):
            p = law(row, float(temperature[req_idx]), int(top_k[req_idx]), float(top_p[req_idx]), float(min_p[req_idx]))
            stream = DRAW if coupled is None or bool(coupled[req_idx]) else DRAFT
            tokens[r] = race(p, keyed(seed[req_idx], index[r], stream))
        if q is not None:
            q[r] = p
    return tokens
