"""The router: scores of all experts and the choice among them in one launch.

Every program computes the scores of some experts for 16 rows; the one that finishes last, by a counter in memory, chooses. Moves
E H numbers once per 16 rows, 2 T E H FLOPs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 16


@triton.jit(do_not_specialize=["rows"])
def route_kernel(
    p_x, p_w, p_bias, p_logit_bias, p_scores, p_done, p_weights, p_experts, rows, stride_x, scale,
    H: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, ALL: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr, TOP: tl.constexpr,
    GROUPS: tl.constexpr, BG: tl.constexpr, TOP_GROUPS: tl.constexpr, RENORMALISE: tl.constexpr, SOFTMAX: tl.constexpr,
):  # fmt: skip
    i_t, i_e = tl.program_id(0), tl.program_id(1)
    o_t, o_e, o_h = i_t * BT + tl.arange(0, BT), i_e * BE + tl.arange(0, BE), tl.arange(0, BH)
    m_t, m_e = o_t < rows, o_e < E
    b_acc = tl.zeros([BE, BT], tl.float32)
    for i in range(tl.cdiv(H, BH)):
        m_h = i * BH + o_h < H
        b_x = tl.load(p_x + o_t[:, None] * stride_x + i * BH + o_h[None, :], mask=m_t[:, None] & m_h[None, :], other=0.0)
        b_w = tl.load(p_w + o_e[:, None] * H + i * BH + o_h[None, :], mask=m_e[:, None] & m_h[None, :], other=0.0)
        # Choices depend on small differences: float32, no tf32.
        b_acc = tl.dot(b_w.to(tl.float32), tl.trans(b_x.to(tl.float32)), b_acc, input_precision="ieee")
    if p_logit_bias is not None:
        b_acc += tl.load(p_logit_bias + o_e, mask=m_e, other=0.0)[:, None]
    if not SOFTMAX:
        b_acc = 1.0 / (1.0 + tl.exp(-b_acc))
    tl.store(p_scores + o_t[None, :] * E + o_e[:, None], b_acc, mask=m_e[:, None] & m_t[None, :])
    tl.debug_barrier()  # all of this program's scores are written before it is counted
    done = tl.atomic_add(p_done + i_t, 1, sem="acq_rel")
    if done == tl.num_programs(1) - 1:
        tl.store(p_done + i_t, 0)  # for the next launch
        o = tl.arange(0, ALL)
        b_bias = tl.zeros([ALL], tl.float32)
        if p_bias is not None:
            b_bias = tl.load(p_bias + o, mask=o < E, other=0.0)
        for row in range(i_t * BT, tl.minimum(i_t * BT + BT, rows)):
            # Not from the L1 cache: other processors have written them.
            b_all = tl.load(p_scores + row * E + o, mask=o < E, other=0.0, volatile=True)
            # With NaN the choice must still be an expert that exists.
            b_choice = tl.where(o < E, tl.where(b_all == b_all, b_all, -1e30), float("-inf"))
            if SOFTMAX:
                b_all = tl.where(o < E, tl.exp(b_all - tl.max(b_choice, 0)), 0.0)
                b_all = b_all / tl.sum(b_all, 0)
            if p_bias is not None:
                b_choice = tl.where(o < E, tl.where(b_all == b_all, b_all + b_bias, -1e30), float("-inf"))
            if TOP_GROUPS < GROUPS:
                o_g = tl.arange(0, BG)
                b_member = (o[None, :] // (E // GROUPS) == o_g[:, None]) & (o < E)[None, :]
                b_grouped = tl.where(b_member, b_choice[None, :], float("-inf"))
                b_first = tl.argmax(b_grouped, 1)
                b_rest = tl.where(o[None, :] == b_first[:, None], float("-inf"), b_grouped)
                b_best = tl.where(o_g < GROUPS, tl.max(b_grouped, 1) + tl.max(b_rest, 1), float("-inf"))
                b_kept = tl.zeros([BG], tl.int32)
                for _ in tl.static_range(TOP_GROUPS):
                    group = tl.argmax(b_best, 0)
                    b_kept = tl.where(o_g == group, 1, b_kept)
                    b_best = tl.where(o_g == group, float("-inf"), b_best)
                b_in = tl.sum(tl.where(b_member, b_kept[:, None], 0), 0) > 0
                b_choice = tl.where(b_in, b_choice, float("-inf"))
            total = 0.0
            for k in tl.static_range(TOP):
                expert = tl.argmax(b_choice, 0)
                weight = tl.sum(tl.where(o == expert, b_all, 0.0))
                total += weight
                b_choice = tl.where(o == expert, float("-inf"), b_choice)
                tl.store(p_experts + row * TOP + k, expert.to(tl.int64))
                tl.store(p_weights + row * TOP + k, weight * scale)
            if RENORMALISE:
                tl.debug_barrier()
                for k in tl.static_range(TOP):
                    weight = tl.load(p_weights + row * TOP + k)
                    tl.store(p_weights + row * TOP + k, weight / (total + 1e-20))


def route(
    x: Tensor, weight: Tensor, bias: Tensor | None, top_k: int, groups: int, top_groups: int, renormalise: bool, scale: float,
    softmax: bool = False, logit_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See reference.route; with `softmax`, reference.route_softmax: there `bias` is for the choice, and logit_bias [E] for the logits."""
    (rows, hidden), number = x.shape, weight.shape[0]
    assert weight.shape == (number, hidden) and weight.is_contiguous() and x.stride(1) == 1, (x.shape, x.stride(), weight.shape)
    softmax = softmax or bias is None
    assert groups == 1 or not softmax
    assert all(each is None or (each.shape == (number,) and each.dtype == torch.float32) for each in (bias, logit_bias))
    assert top_k <= number and number % groups == 0 and top_groups <= groups, (number, top_k, groups, top_groups)
    scores = torch.empty(rows, number, dtype=torch.float32, device=x.device)
    weights = torch.empty(rows, top_k, dtype=torch.float32, device=x.device)
    experts = torch.empty(rows, top_k, dtype=torch.int64, device=x.device)
    tiles, block = triton.cdiv(rows, ROWS), 16
    done = torch.zeros(max(tiles, 1), dtype=torch.int32, device=x.device)
    if rows:
        route_kernel[(tiles, triton.cdiv(number, block))](
            x, weight, bias, logit_bias, scores, done, weights, experts, rows, x.stride(0), scale, H=hidden, E=number, BE=block,
            ALL=max(triton.next_power_of_2(number), 16), BT=ROWS, BH=64, TOP=top_k, GROUPS=groups, BG=triton.next_power_of_2(groups),
            TOP_GROUPS=top_groups, RENORMALISE=renormalise, SOFTMAX=softmax, num_warps=4, num_stages=3 if torch.version.hip is None else 1,
        )  # fmt: skip
    return weights, experts
