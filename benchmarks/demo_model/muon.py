"""Muon: momentum, orthogonalised by Newton-Schulz iterations (Jordan et al., 2024, https://kellerjordan.github.io/posts/muon/).

In float32 and over stacks of equally shaped matrices: torch.optim.Muon iterates in bfloat16 and one matrix at a time, which
is several times slower on a CPU without bfloat16 units. With them, `dtype` is bfloat16.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer


def orthogonalise(stack: Tensor, steps: int = 5) -> Tensor:
    """stack [n, rows, columns] -> the nearest semi-orthogonal matrices, roughly."""
    x = stack.mT if stack.shape[1] > stack.shape[2] else stack
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if stack.shape[1] > stack.shape[2] else x


class Muon(Optimizer):
    """Parameters are [rows, columns]. Tall ones are orthogonalised in blocks of `block` rows, which costs less and keeps heads apart."""

    def __init__(
        self, params: list[Tensor], lr: float = 0.02, momentum: float = 0.95, block: int = 128, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "block": block})
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            stacks: dict[torch.Size, list[tuple[Tensor, Tensor]]] = {}
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.lerp_(p.grad, 1 - group["momentum"])
                update = p.grad.lerp(momentum, group["momentum"])
                for part, target in zip(update.split(group["block"]), p.split(group["block"]), strict=True):
                    stacks.setdefault(part.shape, []).append((part, target))
            for shape, pairs in stacks.items():
                updates = orthogonalise(torch.stack([update for update, _ in pairs]).to(self.dtype)).float()
                scale = group["lr"] * max(1.0, shape[0] / shape[1]) ** 0.5
                for update, (_, target) in zip(updates, pairs, strict=True):
                    target.add_(update, alpha=-scale)
