"""As experts.py, for weights whose rows have scales of their own: see quant/rows.py. Either matrix may also be without scales.

Moves the hit experts' 3 S H numbers, 6 S H FLOPs per row and expert.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpserve_kernels.moe.align import MAX_ROWS, expert_tiles, tile_rows, tile_size
from mtpserve_kernels.moe.experts import activated, add_parts, tiling
from mtpserve_kernels.moe.reference import Clamped
from mtpserve_kernels.quant.rows import FLOAT8, as_bytes, check_rows, form_of, row_scaled_tile, second_of, step_of


@triton.jit(do_not_specialize=["rows"])
def gate_up_rows_kernel(
    p_x, p_chosen, p_tiles, p_w, p_scale, p_second, p_bias, p_inner, rows, stride_x, H: tl.constexpr, S: tl.constexpr,
    E: tl.constexpr, K: tl.constexpr, GROUPS: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, BH: tl.constexpr, FORM: tl.constexpr,
    ALPHA: tl.constexpr, MOST: tl.constexpr, LIMIT: tl.constexpr, PLUS: tl.constexpr, HALVES: tl.constexpr,
    FIRST: tl.constexpr,
):  # fmt: skip
    """HALVES: see `activated`."""
    expert, i_n, o_t, b_place, b_hit, is_hit = tile_rows(p_chosen, p_tiles, rows, E, 0, FIRST, K, BT)
    o_n = i_n * BN + tl.arange(0, BN)
    if is_hit:
        m_n = o_n < S
        o_gate = expert * HALVES * S + o_n
        b_gate, b_up = tl.zeros([BN, BT], tl.float32), tl.zeros([BN, BT], tl.float32)
        for i in range(tl.cdiv(H, BH)):
            b_gate += row_scaled_tile(
                p_x + o_t * stride_x, p_w, p_scale, p_second, b_hit, m_n, o_gate, i * BH, K=H, GROUPS=GROUPS, BK=BH,
                FORM=FORM, ZEROS=p_second is not None,
            )  # fmt: skip
            if HALVES == 2:
                b_up += row_scaled_tile(
                    p_x + o_t * stride_x, p_w, p_scale, p_second, b_hit, m_n, o_gate + S, i * BH, K=H, GROUPS=GROUPS, BK=BH,
                    FORM=FORM, ZEROS=p_second is not None,
                )  # fmt: skip
        if p_bias is not None:
            b_gate += tl.load(p_bias + o_gate, mask=m_n, other=0.0).to(tl.float32)[:, None]
            if HALVES == 2:
                b_up += tl.load(p_bias + o_gate + S, mask=m_n, other=0.0).to(tl.float32)[:, None]
        b_inner = activated(b_gate, b_up, ALPHA, MOST, LIMIT, PLUS, HALVES)
        o_out = (o_t * K + b_place).to(tl.int64)[None, :] * S + o_n[:, None]
        tl.store(p_inner + o_out, b_inner.to(p_inner.dtype.element_ty), mask=m_n[:, None] & b_hit[None, :])


@triton.jit(do_not_specialize=["rows"])
def down_rows_kernel(
    p_inner, p_chosen, p_tiles, p_weights, p_w, p_scale, p_second, p_bias, p_parts, p_out, p_arrivals, rows, H: tl.constexpr,
    S: tl.constexpr, E: tl.constexpr, K: tl.constexpr, GROUPS: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, BS: tl.constexpr,
    FORM: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    expert, i_n, o_t, b_place, b_hit, is_hit = tile_rows(p_chosen, p_tiles, rows, E, 0, FIRST, K, BT)
    o_n = i_n * BN + tl.arange(0, BN)
    if is_hit:
        m_n = o_n < H
        o_row = (o_t * K + b_place).to(tl.int64)
        b_acc = tl.zeros([BN, BT], tl.float32)
        for i in range(tl.cdiv(S, BS)):
            b_acc += row_scaled_tile(
                p_inner + o_row * S, p_w, p_scale, p_second, b_hit, m_n, expert * H + o_n, i * BS, K=S, GROUPS=GROUPS, BK=BS,
                FORM=FORM, ZEROS=p_second is not None,
            )  # fmt: skip
        if p_bias is not None:
            b_acc += tl.load(p_bias + expert * H + o_n, mask=m_n, other=0.0).to(tl.float32)[:, None]
        b_weight = tl.load(p_weights + o_t * K + b_place, mask=b_hit, other=1.0)
        tl.store(p_parts + o_row[None, :] * H + o_n[:, None], b_acc * b_weight[None, :], mask=m_n[:, None] & b_hit[None, :])
    if p_tiles is None:
        if is_hit | (expert == 0):
            i_arrival = i_n * tl.num_programs(0) + tl.program_id(0)
            add_parts(p_parts, p_chosen, p_out, p_arrivals, o_t, o_n, i_arrival, expert, rows, H, E, 0, FIRST, K)


def experts_rows(
    x: Tensor, weights: Tensor, chosen: Tensor, gate_up: Tensor, gate_up_scale: Tensor | None, gate_up_zeros: Tensor | None,
    gate_up_global_scale: Tensor | None, down: Tensor, down_scale: Tensor | None, down_zeros: Tensor | None,
    down_global_scale: Tensor | None,
    gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None, clamped: Clamped | None = None,
    squared: bool = False, first: int | None = None,
) -> Tensor:  # fmt: skip
    """See reference.experts_rows."""
    (rows, hidden), (number, both), top = x.shape, gate_up.shape[:2], chosen.shape[1]
    halves = 1 if squared else 2
    size = both // halves
    assert down.shape[:2] == (number, hidden) and x.stride(1) == 1 and chosen.is_contiguous() and weights.is_contiguous(), (
        x.shape,
        down.shape,
    )
    groups = check_rows(gate_up, gate_up_scale, gate_up_zeros, gate_up_global_scale, hidden)
    down_groups = check_rows(down, down_scale, down_zeros, down_global_scale, size)
    assert gate_up_bias is None or (gate_up_bias.shape == (number, both) and gate_up_bias.is_contiguous()), gate_up_bias.shape
    assert down_bias is None or (down_bias.shape == (number, hidden) and down_bias.is_contiguous()), down_bias.shape
    alpha, most, limit, plus = clamped or (1.0, None, None, None)
    inner = torch.empty(rows, top, size, dtype=x.dtype, device=x.device)
    parts = torch.empty(rows, top, hidden, dtype=torch.float32, device=x.device)
    out = torch.empty(rows, hidden, dtype=x.dtype, device=x.device)
    if not rows:
        return out
    cut = tiling(rows, x.element_size(), torch.version.hip is not None)
    BT = tile_size(rows, top, number, cut.BT) if rows > MAX_ROWS else cut.BT
    warps = 8 if rows > MAX_ROWS and BT == 64 else 4  # with fewer MXFP4's tiles of one expert's rows spill on sm_80
    tiles = expert_tiles(chosen, number, 0, first, BT)
    form, down_form = form_of(gate_up, gate_up_scale), form_of(down, down_scale)
    gate_up_scale, down_scale = as_bytes(gate_up_scale), as_bytes(down_scale)
    gate_up_second, down_second = second_of(gate_up_zeros, gate_up_global_scale), second_of(down_zeros, down_global_scale)
    BN = min(cut.BN, 32) if form == FLOAT8 and gate_up_bias is not None else cut.BN  # wider ones spill
    gate_up_rows_kernel[tiles.grid(size, BN)](
        x, chosen, tiles.table, gate_up, gate_up_scale, gate_up_second, gate_up_bias, inner, rows, x.stride(0),
        H=hidden, S=size, E=number, K=top, GROUPS=groups, BT=BT, BN=BN, BH=step_of(cut.BK, hidden, groups, form), FORM=form,
        ALPHA=alpha, MOST=most, LIMIT=limit, PLUS=plus, HALVES=halves, FIRST=first, num_warps=warps, num_stages=cut.stages,
    )  # fmt: skip
    down_rows_kernel[tiles.grid(hidden, cut.BN)](
        inner, chosen, tiles.table, weights, down, down_scale, down_second, down_bias, parts, out,
        tiles.counters(hidden, cut.BN), rows, H=hidden, S=size, E=number, K=top, GROUPS=down_groups, BT=BT, BN=cut.BN,
        BS=step_of(cut.BK, size, down_groups, down_form), FORM=down_form, FIRST=first, num_warps=warps, num_stages=cut.stages,
    )  # fmt: skip
    tiles.sum_parts(parts, out)
    return out
