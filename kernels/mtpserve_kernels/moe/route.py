"""The router: scores of all experts and the choice among them in one launch.

A program multiplies 16 rows with some experts over a part of the hidden numbers: a split, or several among many rows, where the others'
programs keep the processors busy. The one that arrives last (arrivals.py) adds the splits' parts in their order and chooses for 16 rows
at once, or for 8 among many experts. How the sum is cut depends on the matrix alone: a row's scores do not depend on who shares the launch.

    scores    | E 0-31, H 0-127 | E 0-31, H 128-255 | …        each [16 rows, 32 experts] float32
    choice    [rows, experts]: the groups by their two best, then TOP times the best of what is left

Choices depend on small differences: the weights are float32. For bfloat16 rows they are cut into three bfloat16 numbers, whose sum is the
weight and whose products are exact in float32, so that the matrix unit multiplies them. Moves E H numbers once per 16 rows, 2 T E H FLOPs.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpserve_kernels import tuned
from mtpserve_kernels.arrivals import arrival_counters
from mtpserve_kernels.tiling import processors_of, type_name

ROWS = 16
NO_KEY = tl.constexpr(-(1 << 63))
RESIDENT_WARPS = 16  # of a processor: a thread has up to 128 registers
MAX_SPLITS = 8  # of the sum over H: the last program reads so many parts
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # the interpreter multiplies bfloat16 wrongly


@triton.jit
def _high_bits(b_w):
    """The upper half of float32 numbers, cut off and not rounded: as bfloat16, and as float32."""
    b_bits = b_w.to(tl.int32, bitcast=True)
    return (b_bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True), (b_bits & -65536).to(tl.float32, bitcast=True)


@triton.jit
def _product(b_w, b_x, b_acc, THIRDS: tl.constexpr):
    """b_acc + b_x [T, H] times b_w [H, E] float32, as precise as float32. Rows first: each warp has experts of its own, and cuts their
    weights alone."""
    if THIRDS:
        b_high, b_exact = _high_bits(b_w)
        b_rest = b_w - b_exact
        b_middle, b_exact = _high_bits(b_rest)
        b_low, b_exact = _high_bits(b_rest - b_exact)
        if INTERPRETED:
            b_x, b_high, b_middle, b_low = b_x.to(tl.float32), b_high.to(tl.float32), b_middle.to(tl.float32), b_low.to(tl.float32)
        b_acc = tl.dot(b_x, b_low, b_acc, input_precision="ieee")
        b_acc = tl.dot(b_x, b_middle, b_acc, input_precision="ieee")
        b_acc = tl.dot(b_x, b_high, b_acc, input_precision="ieee")
    else:
        b_acc = tl.dot(b_x.to(tl.float32), b_w, b_acc, input_precision="ieee")
    return b_acc


@triton.jit
def _keys(b_values, b_expert, m, E: tl.constexpr):
    """Integers [.., T, ..] that are ordered as the numbers, and among equal ones have the first expert first; all differ."""
    b_bits = b_values.to(tl.int32, bitcast=True)
    b_order = b_bits ^ ((b_bits >> 31) & 0x7FFFFFFF)
    return tl.where(m, (b_order.to(tl.int64) << 32) + (E - 1 - b_expert), NO_KEY)


@triton.jit
def _values(b_keys):
    b_order = (b_keys >> 32).to(tl.int32)
    return (b_order ^ ((b_order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _best_groups(b_keys, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr):
    """b_keys [groups, T, experts of a group], padded → the same, without those outside the groups whose two best sum up to the most."""
    o_g = tl.arange(0, b_keys.shape[0])[:, None]
    b_first = tl.max(b_keys, 2)
    b_second = tl.max(tl.where(b_keys == b_first[:, :, None], NO_KEY, b_keys), 2)
    b_sums = tl.where(o_g < GROUPS, _values(b_first) + _values(b_second), float("-inf"))
    b_sums = _keys(b_sums, o_g, o_g < GROUPS, GROUPS)
    b_left_out = b_sums
    for _ in tl.static_range(TOP_GROUPS):
        b_left_out = tl.where(b_left_out == tl.max(b_left_out, 0)[None, :], NO_KEY, b_left_out)
    return tl.where((b_left_out == NO_KEY)[:, :, None], b_keys, NO_KEY)


@triton.jit
def _logits(p_parts, p_logit_bias, b_place, b_expert, m, stride_split, SPLITS: tl.constexpr):
    """The sum of the splits' parts at b_place, in their order."""
    b_sum = tl.zeros(b_place.shape, tl.float32)
    for split in tl.static_range(SPLITS):
        # Not from the L1 cache: other processors have written them.
        b_sum += tl.load(p_parts + split * stride_split + b_place, mask=m, other=0.0, volatile=True)
    if p_logit_bias is not None:
        b_sum += tl.load(p_logit_bias + b_expert, mask=m, other=0.0)
    return b_sum


@triton.jit
def _choose(
    p_parts, p_bias, p_logit_bias, p_weights, p_experts, o_t, rows, scale, stride_split, E: tl.constexpr, TOP: tl.constexpr,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, RENORMALISE: tl.constexpr, SOFTMAX: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """For the rows o_t [T]."""
    SIZE: tl.constexpr = E // GROUPS if GROUPS > 1 else min(triton.next_power_of_2(E), 32)
    BG: tl.constexpr = triton.next_power_of_2((E + SIZE - 1) // SIZE)
    BM: tl.constexpr = triton.next_power_of_2(SIZE)
    BTOP: tl.constexpr = triton.next_power_of_2(TOP)
    o_m = tl.arange(0, BM)[None, None, :]
    b_expert = tl.arange(0, BG)[:, None, None] * SIZE + o_m
    m_e = (o_m < SIZE) & (b_expert < E)
    b_row, m_t = o_t[None, :, None] * E, (o_t < rows)[None, :, None]
    b_scores = _logits(p_parts, p_logit_bias, b_row + b_expert, b_expert + b_row * 0, m_t & m_e, stride_split, SPLITS)
    # With NaN the choice must still be an expert that exists.
    b_known = tl.where(b_scores == b_scores, b_scores, -1e30)
    b_most, b_total = tl.zeros([o_t.shape[0]], tl.float32), tl.full([o_t.shape[0]], 1.0, tl.float32)
    if SOFTMAX:
        b_most = tl.max(tl.max(tl.where(m_e, b_known, float("-inf")), 2), 0)
        b_total = tl.sum(tl.sum(tl.where(m_e, tl.exp(b_scores - b_most[None, :, None]), 0.0), 2), 0)
    if p_bias is not None:
        b_bias = tl.load(p_bias + b_expert, mask=m_e, other=0.0)
        if SOFTMAX:
            b_known = tl.exp(b_scores - b_most[None, :, None]) / b_total[None, :, None] + b_bias
        else:
            b_known = 1.0 / (1.0 + tl.exp(-b_scores)) + b_bias
        b_known = tl.where(b_known == b_known, b_known, -1e30)
    b_keys = _keys(b_known, b_expert, m_e, E)
    if TOP_GROUPS < GROUPS:
        b_keys = _best_groups(b_keys, GROUPS, TOP_GROUPS)
    o_k = tl.arange(0, BTOP)[None, :]
    b_experts = tl.zeros([o_t.shape[0], BTOP], tl.int64)
    for k in tl.static_range(TOP):
        b_best = tl.max(tl.max(b_keys, 2), 0)
        b_experts = tl.where(o_k == k, E - 1 - (b_best & 0xFFFFFFFF)[:, None], b_experts)
        b_keys = tl.where(b_keys == b_best[None, :, None], NO_KEY, b_keys)
    # The scores of the chosen are read again: a few loads instead of a sum over all experts for each.
    m_k = (o_t < rows)[:, None] & (o_k < TOP)
    b_scores = _logits(p_parts, p_logit_bias, o_t[:, None] * E + b_experts, b_experts, m_k, stride_split, SPLITS)
    b_weights = tl.exp(b_scores - b_most[:, None]) / b_total[:, None] if SOFTMAX else 1.0 / (1.0 + tl.exp(-b_scores))
    if RENORMALISE:
        b_weights = b_weights / (tl.sum(tl.where(m_k, b_weights, 0.0), 1)[:, None] + 1e-20)
    tl.store(p_weights + o_t[:, None] * TOP + o_k, b_weights * scale, mask=m_k)
    tl.store(p_experts + o_t[:, None] * TOP + o_k, b_experts, mask=m_k)


@triton.jit(do_not_specialize=["rows"])
def route_kernel(
    p_x, p_w, p_bias, p_logit_bias, p_parts, p_arrivals, p_weights, p_experts, rows, stride_x, scale,
    H: tl.constexpr, E: tl.constexpr, BE: tl.constexpr, BT: tl.constexpr, BH: tl.constexpr, SPLITS: tl.constexpr,
    PROGRAM_SPLITS: tl.constexpr, CHOICE_ROWS: tl.constexpr, TOP: tl.constexpr, GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr, RENORMALISE: tl.constexpr, SOFTMAX: tl.constexpr,
):  # fmt: skip
    i_t, i_e, first_split = tl.program_id(0), tl.program_id(1), tl.program_id(2) * PROGRAM_SPLITS
    o_t, o_e, o_h = i_t * BT + tl.arange(0, BT), i_e * BE + tl.arange(0, BE), tl.arange(0, BH)
    m_t, m_e = o_t < rows, o_e < E
    b_acc = tl.zeros([BT, BE], tl.float32)
    stride_split = tl.num_programs(0) * BT * E
    p_own, m_own = p_parts + o_t[:, None] * E + o_e[None, :], m_t[:, None] & m_e[None, :]
    PER: tl.constexpr = (H + BH * SPLITS - 1) // (BH * SPLITS)  # blocks of a split; the last splits may have less
    for i in range(PER * PROGRAM_SPLITS):
        o = (first_split * PER + i) * BH + o_h
        b_x = tl.load(p_x + o_t[:, None] * stride_x + o[None, :], mask=m_t[:, None] & (o < H)[None, :], other=0.0)
        b_w = tl.load(p_w + o_e[:, None] * H + o[None, :], mask=m_e[:, None] & (o < H)[None, :], other=0.0)
        b_acc = _product(tl.trans(b_w.to(tl.float32)), b_x, b_acc, p_x.dtype.element_ty == tl.bfloat16)
        if PROGRAM_SPLITS > 1:  # no branch, so that the loop is pipelined
            split, is_last = first_split + i // PER, i % PER == PER - 1
            tl.store(p_own + split * stride_split, b_acc, mask=m_own & (is_last & (split < SPLITS)))
            b_acc = tl.where(is_last, 0.0, b_acc)
    if PROGRAM_SPLITS == 1:
        tl.store(p_own + first_split * stride_split, b_acc, mask=m_own)
    tl.debug_barrier()  # all of this program's scores are written before it is counted
    arrived = tl.atomic_add(p_arrivals + i_t, 1, sem="acq_rel")
    if arrived == tl.num_programs(1) * tl.num_programs(2) - 1:
        tl.store(p_arrivals + i_t, 0)
        for row in range(i_t * BT, tl.minimum(i_t * BT + BT, rows), CHOICE_ROWS):
            _choose(
                p_parts, p_bias, p_logit_bias, p_weights, p_experts, row + tl.arange(0, CHOICE_ROWS), rows, scale, stride_split, E, TOP,
                GROUPS, TOP_GROUPS, RENORMALISE, SOFTMAX, SPLITS,
            )  # fmt: skip


def tiling(number: int, hidden: int, x_type: torch.dtype, device: torch.device) -> Mapping[str, int]:
    """BE experts and BH hidden numbers at a time, SPLITS of the latter, CHOICE_ROWS rows whose experts are chosen together, warps.
    float32 has no matrix unit of its own precision: small tiles."""
    BE, BH = (32, 128) if x_type == torch.bfloat16 else (16, 64)
    CHOICE_ROWS, warps = (16, 4) if number <= 64 else (16 if number <= 128 else 8, 8)
    rule = {"BE": BE, "BH": BH, "SPLITS": min(MAX_SPLITS, triton.cdiv(hidden, BH)), "CHOICE_ROWS": CHOICE_ROWS, "warps": warps}
    # One tiling for all numbers of rows: see above.
    shape = f"{type_name(x_type)} E{number} H{hidden}"
    return tuned.tiling("route", shape, 1, device, invariant=True) or rule


def launch_cut(cut: Mapping[str, int], rows: int, number: int, device: torch.device) -> tuple[int, int, int]:
    """BE, splits of one program and rows that choose together, for so many rows. No score and no choice depends on them.

    Few splits of many rows fill the processors: a program has as many as let all programs run at once, and twice as many experts where
    half of its warps would multiply what the others do. AMD's registers have no room for those.
    """
    BE, splits = cut["BE"], cut["SPLITS"]
    tiles, resident = triton.cdiv(rows, ROWS), processors_of(device) * max(RESIDENT_WARPS // cut["warps"], 1)
    if cut["warps"] == 8 and torch.version.hip is None and BE == 32 < number and tiles * triton.cdiv(number, BE) * splits > resident:
        BE = 64
    together = int(triton.next_power_of_2(triton.cdiv(tiles * triton.cdiv(number, BE) * splits, resident)))
    return BE, min(splits, together), min(cut["CHOICE_ROWS"], 8 if rows <= 8 else ROWS)


def route(
    x: Tensor, weight: Tensor, bias: Tensor | None, top_k: int, groups: int, top_groups: int, renormalise: bool, scale: float,
    softmax: bool = False, logit_bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See reference.route; with `softmax`, reference.route_softmax: there `bias` is for the choice, and logit_bias [E] for the logits."""
    (rows, hidden), number = x.shape, weight.shape[0]
    assert weight.shape == (number, hidden) and weight.is_contiguous() and x.stride(1) == 1, (x.shape, x.stride(), weight.shape)
    softmax = softmax or bias is None
    assert groups == 1 or (not softmax and groups <= 64)
    assert all(each is None or (each.shape == (number,) and each.dtype == torch.float32) for each in (bias, logit_bias))
    assert number % groups == 0 and top_groups <= groups and top_k <= number // groups * top_groups, (number, top_k, groups, top_groups)
    weights = torch.empty(rows, top_k, dtype=torch.float32, device=x.device)
    experts = torch.empty(rows, top_k, dtype=torch.int64, device=x.device)
    if not rows:
        return weights, experts
    tiles, cut = triton.cdiv(rows, ROWS), tiling(number, hidden, x.dtype, x.device)
    BE, program_splits, choice_rows = launch_cut(cut, rows, number, x.device)
    parts = torch.empty(cut["SPLITS"], tiles * ROWS, number, dtype=torch.float32, device=x.device)
    route_kernel[(tiles, triton.cdiv(number, BE), triton.cdiv(cut["SPLITS"], program_splits))](
        x, weight, bias, logit_bias, parts, arrival_counters("route", tiles, x.device), weights, experts, rows, x.stride(0), scale,
        H=hidden, E=number, BE=BE, BT=ROWS, BH=cut["BH"], SPLITS=cut["SPLITS"], PROGRAM_SPLITS=program_splits, CHOICE_ROWS=choice_rows,
        TOP=top_k, GROUPS=groups, TOP_GROUPS=top_groups, RENORMALISE=renormalise, SOFTMAX=softmax, num_warps=cut["warps"],
        num_stages=3 if torch.version.hip is None else 1,
    )  # fmt: skip
    return weights, experts
