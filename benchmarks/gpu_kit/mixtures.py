"""The router and the experts as models call them, on random data: see workloads.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_kit.calls import Call
from gpu_kit.models import DeviceConfig
from gpu_kit.timing import rotation


def router(device_config: DeviceConfig, rows: int, experts: int, hidden: int, top: int, groups: int, top_groups: int, softmax: int) -> Call:
    from mtpserve_kernels.moe.route import route

    copies = 1 if device_config.toy else rotation(experts * hidden * 4)
    weights = torch.randn(copies, experts, hidden, device=device_config.device) * hidden**-0.5
    x = torch.randn(rows, hidden, device=device_config.device, dtype=device_config.dtype)
    bias = None if softmax else torch.zeros(experts, device=device_config.device)

    def dense(expert_ids: Tensor, numbers: Tensor) -> Tensor:
        return torch.zeros(rows, experts, dtype=torch.float64, device=device_config.device).scatter_(1, expert_ids, numbers.double())

    def exact(i: int) -> Tensor:
        logits = x.double() @ weights[i % copies].double().T
        scores = logits.softmax(-1) if softmax else logits.sigmoid()
        choice = scores
        if top_groups < groups:
            group_scores = scores.unflatten(-1, (groups, -1))
            best = group_scores.topk(2, -1).values.sum(-1).topk(top_groups, -1).indices
            mask = torch.ones_like(scores[:, :groups], dtype=torch.bool).scatter_(1, best, False)
            choice = group_scores.masked_fill(mask.unsqueeze(-1), -torch.inf).flatten(1)
        expert_ids = choice.topk(top, -1).indices
        top_scores = scores.gather(1, expert_ids)
        return dense(expert_ids, top_scores / top_scores.sum(-1, keepdim=True))

    def launch(i: int) -> tuple[Tensor, Tensor]:
        return route(x, weights[i % copies], bias, top, groups, top_groups, True, 1.0, bool(softmax))

    def run(i: int) -> Tensor:
        numbers, expert_ids = launch(i)
        return dense(expert_ids, numbers)

    return Call(run, exact, experts * hidden * 4 + x.nbytes, {"launch": launch})


def mixture(device_config: DeviceConfig, rows: int, experts: int, top: int, hidden: int, size: int, shared: int) -> Call:
    from mtpserve_kernels.moe.experts import experts as kernel

    device, dtype = device_config.device, device_config.dtype
    copies = 1 if device_config.toy else rotation(experts * 3 * size * hidden * 2, most=16)
    gate_up = torch.randn(copies, experts, 2 * size, hidden, device=device, dtype=dtype) * hidden**-0.5
    down = torch.randn(copies, experts, hidden, size, device=device, dtype=dtype) * size**-0.5
    shared_expert: tuple[Tensor | None, Tensor | None] = (None, None)
    if shared:
        shared_expert = (
            torch.randn(2 * size * shared, hidden, device=device, dtype=dtype) * hidden**-0.5,
            torch.randn(hidden, size * shared, device=device, dtype=dtype) * (size * shared) ** -0.5,
        )
    x = torch.randn(rows, hidden, device=device, dtype=dtype)
    expert_ids = torch.rand(8, rows, experts, device=device).topk(top, -1).indices
    weights = torch.rand(rows, top, device=device)

    def block(rows_in: Tensor, both: Any, back: Any) -> Tensor:
        gate, up = (rows_in @ both.double().T).chunk(2, -1)
        out: Tensor = (F.silu(gate) * up) @ back.double().T
        return out

    def exact(i: int) -> Tensor:
        total = torch.zeros(rows, hidden, dtype=torch.float64, device=device)
        if shared:
            total += block(x.double(), *shared_expert)
        for expert in range(experts):
            row_ids, positions = (expert_ids[i % 8] == expert).nonzero(as_tuple=True)
            if len(row_ids):
                out = block(x[row_ids].double(), gate_up[i % copies, expert], down[i % copies, expert])
                total.index_add_(0, row_ids, out * weights[row_ids, positions].double().unsqueeze(1))
        return total

    share = 1 - (1 - top / experts) ** rows
    return Call(
        lambda i: kernel(x, weights, expert_ids[i % 8], gate_up[i % copies], down[i % copies], *shared_expert),
        exact,
        (experts * share + shared) * 3 * size * hidden * dtype.itemsize,
    )
