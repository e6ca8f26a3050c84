"""What the expert kernels compute, in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mtpserve_kernels.quant.reference import widen, widen_rows

Clamped = tuple[float, float, float, float]  # alpha, most, limit and plus of a `clamped_gate`


def route(
    x: Tensor, weight: Tensor, bias: Tensor | None, top_k: int, groups: int, top_groups: int, renormalise: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """x [T, H], weight [E, H], bias [E] float32 → weights [T, top_k] float32, experts [T, top_k] int64.

    Sigmoid scores; score + bias chooses, first the groups by their two best, then the experts; the weights are the scores without it
    (DeepSeek-V3, https://arxiv.org/abs/2412.19437 §2.1.2). Without a bias, and in one group: the best of a softmax over all experts
    (Mixtral, https://arxiv.org/abs/2401.04088 §2.1; Qwen renormalises after the choice).
    """
    logits = F.linear(x.float(), weight.float())
    scores = logits.softmax(-1) if bias is None else logits.sigmoid()
    choice = scores if bias is None else scores + bias
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


def route_softmax(
    x: Tensor, weight: Tensor, choice_bias: Tensor | None, bias: Tensor | None, top_k: int, renormalise: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """x [T, H], weight [E, H] → weights [T, top_k] float32, experts [T, top_k] int64: the best of a softmax over all experts
    (Mixtral, https://arxiv.org/abs/2401.04088 §2.1; Qwen renormalises after the choice, which is a softmax over the chosen).

    choice_bias [E] is added for the choice alone (Ernie 4.5), bias [E] to the logits (gpt-oss).
    """
    scores = F.linear(x.float(), weight.float(), bias).softmax(-1)
    experts = (scores if choice_bias is None else scores + choice_bias).topk(top_k, -1).indices
    weights = scores.gather(1, experts)
    return (weights / weights.sum(-1, keepdim=True).clamp(min=1e-12) if renormalise else weights) * scale, experts


def clamped_gate(gate_up: Tensor, alpha: float, most: float, limit: float, plus: float) -> Tensor:
    """[…, 2 size] → […, size]: gate * sigmoid(alpha * gate) * (up + plus), with gate at most `most` and up between -limit and limit
    (gpt-oss, where most is limit and plus 1, https://arxiv.org/abs/2508.10925 §2)."""
    gate, up = gate_up.chunk(2, -1)
    gate, up = gate.clamp(max=most), up.clamp(-limit, limit)
    return gate * (alpha * gate).sigmoid() * (up + plus)


def align(chosen: Tensor, number: int, shared: int, first: int | None, BT: int) -> Tensor:
    """chosen [T, K] int64 → tiles [T * K // BT + E + shared * ceil(T / BT), 1 + BT] int32, see align.py. E is `number`, numbers of experts
    begin with `first`; what is nobody's number here has no tile. A tile without an expert begins with -1, and the rest of it means nothing.
    """
    rows, top = chosen.shape
    shared_tiles = -(-rows // BT)
    tiles = torch.full((rows * top // BT + number + shared * shared_tiles, 1 + BT), -1, dtype=torch.int32)
    before, places = 0, (chosen - (first or 0)).cpu()
    for expert in range(number + shared):
        row, place = (places == expert).nonzero(as_tuple=True)
        start = shared * shared_tiles + before // BT + expert
        if expert >= number:
            row, place = torch.arange(rows), torch.tensor(top + expert - number)
            start = (expert - number) * shared_tiles
        else:
            before += len(row)
        for i, parts in enumerate((row * (top + shared) + place).split(BT) if len(row) else ()):
            tiles[start + i, 0], tiles[start + i, 1 : 1 + len(parts)] = expert, parts.int()
    return tiles.to(chosen.device)


def experts(
    x: Tensor, weights: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor, shared_gate_up: Tensor | None, shared_down: Tensor | None,
    gate_up_scale: Tensor | None = None, down_scale: Tensor | None = None,
    shared_gate_up_scale: Tensor | None = None, shared_down_scale: Tensor | None = None,
    gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None, clamped: Clamped | None = None,
    squared: bool = False, first: int | None = None,
) -> Tensor:  # fmt: skip
    """x [T, H], weights and chosen [T, K], gate_up [E, 2 S, H], down [E, H, S], the shared expert's [2 P, H] and [H, P] → [T, H]

    Scales are those of float8 weights, per block of 128 x 128 and rounded up: [E, 2 blocks of S, blocks of H], [E, blocks of H, blocks
    of S] and without E for the shared expert; gate and up begin blocks of their own. Biases [E, 2 S] and [E, H]; `clamped`: of
    their gates. Experts with either have no shared one beside them. `squared`: there is no gate, gate_up is up alone [E, S, H], and
    an expert is down(relu(up)^2) (https://arxiv.org/abs/2109.08668). `first`: the number of the first expert where others, with numbers
    below and above, are elsewhere and add nothing here.
    """
    halves = 1 if squared else 2

    def wide(matrix: Tensor, scale: Tensor | None) -> Tensor:
        return matrix.float() if scale is None else widen(matrix, scale)

    def block(
        rows: Tensor, fused: Tensor, fused_scale: Tensor | None, back: Tensor, back_scale: Tensor | None,
        fused_bias: Tensor | None = None, back_bias: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        scales = (None,) * halves if fused_scale is None else fused_scale.chunk(halves)
        both = torch.cat([rows.float() @ wide(half, scale).T for half, scale in zip(fused.chunk(halves), scales, strict=True)], -1)
        if fused_bias is not None:
            both += fused_bias.float()
        if squared:
            inner = F.relu(both).square()
        else:
            gate, up = both.chunk(2, -1)
            inner = F.silu(gate) * up if clamped is None else clamped_gate(both, *clamped)
        out = inner.to(x.dtype).float() @ wide(back, back_scale).T
        return out if back_bias is None else out + back_bias.float()

    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    start = first or 0
    for expert in range(len(gate_up)):
        rows, place = (chosen == start + expert).nonzero(as_tuple=True)
        if not len(rows):
            continue
        scales = [None if scale is None else scale[expert] for scale in (gate_up_scale, down_scale)]
        biases = [None if bias is None else bias[expert] for bias in (gate_up_bias, down_bias)]
        part = block(x[rows], gate_up[expert], scales[0], down[expert], scales[1], *biases)
        out.index_add_(0, rows, part * weights[rows, place, None])
    if shared_gate_up is not None and shared_down is not None:
        out += block(x, shared_gate_up, shared_gate_up_scale, shared_down, shared_down_scale)
    return out.to(x.dtype)


def experts_rows(
    x: Tensor, weights: Tensor, chosen: Tensor, gate_up: Tensor, gate_up_scale: Tensor | None, gate_up_zeros: Tensor | None,
    gate_up_global_scale: Tensor | None, down: Tensor, down_scale: Tensor | None, down_zeros: Tensor | None,
    down_global_scale: Tensor | None,
    gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None, clamped: Clamped | None = None,
    squared: bool = False, first: int | None = None,
) -> Tensor:  # fmt: skip
    """As `experts` without a shared one. Scales and zeros are those of rows, see quant.reference.widen_rows; None: the matrix has none."""
    wide, back = (
        matrix if scale is None else widen_rows(matrix, scale, *more)
        for matrix, scale, *more in (
            (gate_up, gate_up_scale, gate_up_zeros, gate_up_global_scale), (down, down_scale, down_zeros, down_global_scale)
        )
    )  # fmt: skip
    biases = {"gate_up_bias": gate_up_bias, "down_bias": down_bias}
    return experts(x, weights, chosen, wide, back, None, None, **biases, clamped=clamped, squared=squared, first=first)
