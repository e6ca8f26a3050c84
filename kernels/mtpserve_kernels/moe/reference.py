"""What the expert kernels compute, in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def route(
    x: Tensor, weight: Tensor, bias: Tensor, top_k: int, groups: int, top_groups: int, renormalise: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """x [T, H], weight [E, H], bias [E] float32 → weights [T, top_k] float32, experts [T, top_k] int64.

    Sigmoid scores; score + bias chooses, first the groups by their two best, then the experts; the weights are the scores without it
    (DeepSeek-V3, https://arxiv.org/abs/2412.19437 §2.1.2).
    """
    scores = F.linear(x.float(), weight.float()).sigmoid()
    choice = scores + bias
    if top_groups < groups:
        grouped = choice.unflatten(-1, (groups, -1))
        best = grouped.topk(2, -1).values.sum(-1).topk(top_groups, -1).indices
        left_out = torch.ones_like(choice[:, :groups], dtype=torch.bool).scatter_(1, best, False)
        choice = grouped.masked_fill(left_out.unsqueeze(-1), -torch.inf).flatten(1)
    experts = choice.topk(top_k, -1).indices
    weights = scores.gather(1, experts)
    if renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scale, experts


def experts(
    x: Tensor, weights: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor, shared_gate_up: Tensor | None, shared_down: Tensor | None
) -> Tensor:
    """x [T, H], weights and chosen [T, K], gate_up [E, 2 S, H], down [E, H, S], the shared expert's [2 P, H] and [H, P] → [T, H]"""
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in chosen.unique().tolist():
        rows, place = (chosen == expert).nonzero(as_tuple=True)
        gate, up = (x[rows].float() @ gate_up[expert].float().T).chunk(2, -1)
        inner = (F.silu(gate) * up).to(x.dtype).float()
        out.index_add_(0, rows, inner @ down[expert].float().T * weights[rows, place, None])
    if shared_gate_up is not None and shared_down is not None:
        gate, up = (x.float() @ shared_gate_up.float().T).chunk(2, -1)
        out += (F.silu(gate) * up).to(x.dtype).float() @ shared_down.float().T
    return out.to(x.dtype)
