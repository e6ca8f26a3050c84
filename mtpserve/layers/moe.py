"""Mixture of experts as DeepSeek-V3 routes it (https://arxiv.org/abs/2412.19437 §2.1.2), in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtpserve.core.arch import MoEArch
from mtpserve.core.protocols import LinearMethod
from mtpserve.layers.kernels import Kernels
from mtpserve.layers.mlp import MLP, silu_mul

# A few small experts over a few rows: multiplying all of them is one call and cheaper than finding out which ones are hit.
ALL_EXPERTS, ALL_ROWS = 16, 64


class Router(nn.Module):
    """`bias` steers the choice towards even load; the weights of the chosen come from the scores without it."""

    def __init__(self, hidden: int, arch: MoEArch) -> None:
        super().__init__()
        self.arch = arch
        self.weight = nn.Parameter(torch.empty(arch.experts, hidden, dtype=torch.float32), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(arch.experts, dtype=torch.float32), requires_grad=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[T, hidden] → weights [T, top_k] float32, experts [T, top_k]"""
        arch = self.arch
        scores = F.linear(x.float(), self.weight).sigmoid_()
        choice = scores + self.bias
        if arch.top_groups < arch.groups:
            grouped = choice.unflatten(-1, (arch.groups, -1))
            best = grouped.topk(2, -1).values.sum(-1).topk(arch.top_groups, -1).indices
            left_out = torch.ones_like(choice[:, : arch.groups], dtype=torch.bool).scatter_(1, best, False)
            choice = grouped.masked_fill(left_out.unsqueeze(-1), -torch.inf).flatten(1)
        experts = choice.topk(arch.top_k, -1).indices
        weights = scores.gather(1, experts)
        if arch.renormalise:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * arch.scale, experts


class Experts(nn.Module):
    """All experts' weights in two tensors. As loaded: gate_up [experts, 2 size, hidden], down [experts, hidden, size]."""

    def __init__(self, hidden: int, arch: MoEArch) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(arch.experts, 2 * arch.size, hidden), requires_grad=False)
        self.down = nn.Parameter(torch.empty(arch.experts, hidden, arch.size), requires_grad=False)
        self.parts = {"gate_up": (arch.size, arch.size), "down": (hidden,)}
        self.row_by_row = False  # every product has one row: what shares the pass cannot change how it is added up

    def forward(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        if len(self.gate_up) <= ALL_EXPERTS and len(x) <= ALL_ROWS:
            return self.all_experts(x, weights, experts)
        if self.row_by_row:
            order = experts.argsort(-1)
            alone = zip(x.split(1), weights.gather(1, order).split(1), experts.gather(1, order).split(1), strict=True)
            return torch.cat([self.hit_experts(*row) for row in alone])
        return self.hit_experts(x, weights, experts)

    def all_experts(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        """Every expert over every row; what was not chosen is multiplied with zero."""
        dense = weights.new_zeros(len(x), len(self.gate_up)).scatter_(1, experts, weights).to(x.dtype)  # [T, experts]
        inner = silu_mul(torch.matmul(x, self.gate_up.mT)) * dense.T.unsqueeze(-1)  # [experts, T, size]
        return torch.bmm(inner, self.down.mT).sum(0)

    def hit_experts(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for expert in experts.unique().tolist():
            rows, place = (experts == expert).nonzero(as_tuple=True)
            inner = silu_mul(F.linear(x[rows], self.gate_up[expert]))
            out.index_add_(0, rows, F.linear(inner, self.down[expert]) * weights[rows, place, None].to(x.dtype))
        return out


class MoE(nn.Module):
    kernels: Kernels | None = None

    def __init__(self, hidden: int, arch: MoEArch, method: LinearMethod) -> None:
        super().__init__()
        self.router, self.experts = Router(hidden, arch), Experts(hidden, arch)
        self.shared = MLP(hidden, arch.size * arch.shared, method) if arch.shared else None

    def forward(self, x: Tensor) -> Tensor:
        if self.kernels is not None:
            return self.with_kernels(x, self.kernels)
        weights, experts = self.router(x)
        out: Tensor = self.experts(x, weights, experts)
        return out if self.shared is None else out + self.shared(x)

    def with_kernels(self, x: Tensor, kernels: Kernels) -> Tensor:
        router, experts, shared = self.router, self.experts, self.shared
        arch = router.arch
        weights, chosen = kernels.route(
            x, router.weight, router.bias, arch.top_k, arch.groups, arch.top_groups, arch.renormalise, arch.scale
        )
        beside = (None, None) if shared is None else (shared.gate_up.weight, shared.down.weight)
        return kernels.experts(x, weights, chosen, experts.gate_up, experts.down, *beside)
