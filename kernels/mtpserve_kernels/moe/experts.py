"""The experts' products: gate and up with silu, then down and the sum over a row's experts.

A program has one expert, some of its output columns and a tile of rows. Up to 64 rows are one tile: a program looks up itself which of the
rows chose its expert, and returns at once if none did, so that only the weights of experts that were chosen are read; two launches. More
rows are grouped by expert (align.py), since each tile of rows as they are would meet every expert again: four launches, for rows by index.
The shared expert counts as further experts that every row has chosen.

    inner [T, K + shared, S]     silu(gate) * up of row t's k-th expert, or gpt-oss's clamped gate; biases are added to what is multiplied;
                                 without a gate relu(up)^2, and gate_up [E, S, H] is up alone
    parts [T, K + shared, H]     its output, float32, weighted; always summed over k in this order, by the program that is the last one
                                 to write parts of these rows and columns (arrivals.py), or in a launch of its own for grouped rows

float8 weights (e4m3) have one float32 scale per 128 x 128 block and are widened in registers. Gate and up each begin a block of their own,

    gate_up [E, 2 S, H]          scales [E, 2 ceil(S / 128), ceil(H / 128)]
    down    [E, H, S]            scales [E, ceil(H / 128), ceil(S / 128)]

and a tile never leaves its block: 64 outputs wide, 64 inputs deep. Each tile's product is scaled on its own, then added in float32.

Moves the hit experts' 3 S H numbers, 6 S H FLOPs per row and expert.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpserve_kernels.moe.align import MAX_ROWS, expert_tiles, tile_rows, tile_size
from mtpserve_kernels.moe.reference import Clamped
from mtpserve_kernels.tiling import Tiling, type_name, with_table

BLOCK = 128  # of float8 scales
CHUNK = tl.constexpr(16)  # rows whose parts are added at a time


@triton.jit
def add_parts(
    p_parts, p_chosen, p_out, p_arrivals, o_t, o_n, i_arrival, expert, rows, H: tl.constexpr, E: tl.constexpr, SHARED: tl.constexpr,
    FIRST: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Called by every program that has written parts of the rows o_t and columns o_n, and by the first expert's. What is counted are
    parts, so that experts without a row need not arrive; the first expert counts once more, since somebody must."""
    BK: tl.constexpr = triton.next_power_of_2(K)
    o_k = tl.arange(0, BK)
    b_number = tl.load(p_chosen + o_t[:, None] * K + o_k[None, :], mask=(o_t < rows)[:, None] & (o_k < K)[None, :], other=-1)
    if FIRST is not None:
        b_number -= FIRST
    number_of_rows = tl.sum((o_t < rows).to(tl.int32))
    expected = tl.sum(tl.sum(((b_number >= 0) & (b_number < E)).to(tl.int32), 1)) + SHARED * number_of_rows + 1
    hits = tl.sum(tl.sum((b_number == expert).to(tl.int32), 1))
    count = tl.where(expert < E, hits, number_of_rows) + tl.where(expert == 0, 1, 0)
    tl.debug_barrier()  # all of this program's parts are written before they are counted
    arrived = tl.atomic_add(p_arrivals + i_arrival, count, sem="acq_rel")
    if arrived + count == expected:
        tl.store(p_arrivals + i_arrival, 0)
        # Few rows at a time, so that the parts of all experts are on their way together and still fit the registers.
        for chunk in range(o_t.shape[0] // CHUNK):
            o_c = tl.min(o_t) + chunk * CHUNK + tl.arange(0, CHUNK)
            b_sum, m = tl.zeros([CHUNK, o_n.shape[0]], tl.float32), (o_c < rows)[:, None] & (o_n < H)[None, :]
            for k in tl.static_range(K + SHARED):
                m_k = m
                if FIRST is not None:
                    if k < K:  # nobody has written the parts of experts that are elsewhere
                        b_local = tl.load(p_chosen + o_c * K + k, mask=o_c < rows, other=-1) - FIRST
                        m_k = m & ((b_local >= 0) & (b_local < E))[:, None]
                o_part = (o_c * (K + SHARED) + k).to(tl.int64)[:, None] * H + o_n[None, :]
                # Not from the L1 cache: other processors have written them.
                b_sum += tl.load(p_parts + o_part, mask=m_k, other=0.0, volatile=True)
            tl.store(p_out + o_c.to(tl.int64)[:, None] * H + o_n[None, :], b_sum.to(p_out.dtype.element_ty), mask=m)


@triton.jit
def activated(
    b_gate, b_up, ALPHA: tl.constexpr, MOST: tl.constexpr, LIMIT: tl.constexpr, PLUS: tl.constexpr, HALVES: tl.constexpr
):  # fmt: skip
    """HALVES 1: there is no up beside what is called gate here, and it becomes relu(gate)^2."""
    if LIMIT is not None:
        # Comparisons let NaN through.
        b_gate = tl.where(b_gate > MOST, MOST, b_gate)
        b_up = tl.where(b_up > LIMIT, LIMIT, tl.where(b_up < -LIMIT, -LIMIT, b_up)) + PLUS
    if HALVES == 2:
        b_inner = b_gate / (1.0 + tl.exp(-ALPHA * b_gate)) * b_up
    else:
        b_inner = tl.where(b_gate < 0, 0.0, b_gate * b_gate)
    return b_inner


@triton.jit(do_not_specialize=["rows"])
def gate_up_kernel(
    p_x, p_chosen, p_tiles, p_w, p_shared, p_scale, p_shared_scale, p_bias, p_inner, rows, stride_x, H: tl.constexpr, S: tl.constexpr,
    E: tl.constexpr, SHARED: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr, BH: tl.constexpr,
    ALPHA: tl.constexpr, MOST: tl.constexpr, LIMIT: tl.constexpr, PLUS: tl.constexpr, HALVES: tl.constexpr,
    FIRST: tl.constexpr,
):  # fmt: skip
    """HALVES: see `activated`."""
    expert, i_n, o_t, b_place, b_hit, is_hit = tile_rows(p_chosen, p_tiles, rows, E, SHARED, FIRST, K, BT)
    o_n, o_h = i_n * BN + tl.arange(0, BN), tl.arange(0, BH)
    if is_hit:
        m_n = o_n < S
        p_gate, p_up = p_w + expert.to(tl.int64) * HALVES * S * H, p_w + (expert.to(tl.int64) * HALVES + 1) * S * H
        if SHARED > 0:
            if expert >= E:
                p_gate = p_shared + (expert - E).to(tl.int64) * S * H
                p_up = p_gate + SHARED * S * H
        down, across = tl.cdiv(S, 128), tl.cdiv(H, 128)  # blocks of a gate, or of an up
        if p_scale is not None:
            p_gate_scale = p_scale + expert.to(tl.int64) * HALVES * down * across
            p_up_scale = p_gate_scale + down * across
            if SHARED > 0:
                if expert >= E:
                    p_gate_scale = p_shared_scale + (expert - E).to(tl.int64) * down * across
                    p_up_scale = p_gate_scale + SHARED * down * across
            o_scale = i_n * BN // 128 * across
        o_w = o_n.to(tl.int64)[:, None] * H + o_h[None, :]
        b_gate, b_up = tl.zeros([BN, BT], tl.float32), tl.zeros([BN, BT], tl.float32)
        for i in range(tl.cdiv(H, BH)):
            m_h = i * BH + o_h < H
            b_x = tl.load(p_x + o_t[:, None] * stride_x + i * BH + o_h[None, :], mask=b_hit[:, None] & m_h[None, :], other=0.0)
            m_w = m_n[:, None] & m_h[None, :]
            b_x = tl.trans(b_x)
            b_gate_w = tl.load(p_gate + o_w + i * BH, mask=m_w, other=0.0)
            if p_scale is not None:
                b_gate += tl.dot(b_gate_w.to(b_x.dtype), b_x, input_precision="ieee") * tl.load(p_gate_scale + o_scale + i * BH // 128)
            else:
                b_gate = tl.dot(b_gate_w, b_x, b_gate, input_precision="ieee")
            if HALVES == 2:
                b_up_w = tl.load(p_up + o_w + i * BH, mask=m_w, other=0.0)
                if p_scale is not None:
                    b_up += tl.dot(b_up_w.to(b_x.dtype), b_x, input_precision="ieee") * tl.load(p_up_scale + o_scale + i * BH // 128)
                else:
                    b_up = tl.dot(b_up_w, b_x, b_up, input_precision="ieee")
        if p_bias is not None:
            p_b = p_bias + expert * HALVES * S + o_n
            b_gate += tl.load(p_b, mask=m_n, other=0.0).to(tl.float32)[:, None]
            if HALVES == 2:
                b_up += tl.load(p_b + S, mask=m_n, other=0.0).to(tl.float32)[:, None]
        b_inner = activated(b_gate, b_up, ALPHA, MOST, LIMIT, PLUS, HALVES)
        o_out = (o_t * (K + SHARED) + b_place).to(tl.int64)[None, :] * S + o_n[:, None]
        tl.store(p_inner + o_out, b_inner.to(p_inner.dtype.element_ty), mask=m_n[:, None] & b_hit[None, :])


@triton.jit(do_not_specialize=["rows"])
def down_kernel(
    p_inner, p_chosen, p_tiles, p_weights, p_w, p_shared, p_scale, p_shared_scale, p_bias, p_parts, p_out, p_arrivals, rows,
    H: tl.constexpr, S: tl.constexpr, E: tl.constexpr, SHARED: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
    BS: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """Without p_tiles the parts are summed, too: see `add_parts`."""
    expert, i_n, o_t, b_place, b_hit, is_hit = tile_rows(p_chosen, p_tiles, rows, E, SHARED, FIRST, K, BT)
    o_n, o_s = i_n * BN + tl.arange(0, BN), tl.arange(0, BS)
    if is_hit:
        m_n = o_n < H
        p_down = p_w + expert.to(tl.int64) * H * S
        stride = S
        if SHARED > 0:
            if expert >= E:
                p_down = p_shared + (expert - E) * S
                stride = SHARED * S
        if p_scale is not None:
            down, across = tl.cdiv(H, 128), tl.cdiv(S, 128)
            p_down_scale = p_scale + expert.to(tl.int64) * down * across + i_n * BN // 128 * across
            if SHARED > 0:
                if expert >= E:
                    p_down_scale = p_shared_scale + (expert - E) * across + i_n * BN // 128 * SHARED * across
        o_row = (o_t * (K + SHARED) + b_place).to(tl.int64)
        b_acc = tl.zeros([BN, BT], tl.float32)
        for i in range(tl.cdiv(S, BS)):
            m_s = i * BS + o_s < S
            b_x = tl.load(p_inner + o_row[:, None] * S + i * BS + o_s[None, :], mask=b_hit[:, None] & m_s[None, :], other=0.0)
            o_w = o_n.to(tl.int64)[:, None] * stride + i * BS + o_s[None, :]
            b_w = tl.load(p_down + o_w, mask=m_n[:, None] & m_s[None, :], other=0.0)
            if p_scale is not None:
                b_acc += tl.dot(b_w.to(b_x.dtype), tl.trans(b_x), input_precision="ieee") * tl.load(p_down_scale + i * BS // 128)
            else:
                b_acc = tl.dot(b_w, tl.trans(b_x), b_acc, input_precision="ieee")
        if p_bias is not None:
            b_acc += tl.load(p_bias + expert * H + o_n, mask=m_n, other=0.0).to(tl.float32)[:, None]
        b_weight = tl.load(p_weights + o_t * K + b_place, mask=b_hit & (b_place < K), other=1.0)
        tl.store((p_parts + o_row * H)[None, :] + o_n[:, None], b_acc * b_weight[None, :], mask=m_n[:, None] & b_hit[None, :])
    if p_tiles is None:
        if is_hit | (expert == 0):
            i_arrival = i_n * tl.num_programs(0) + tl.program_id(0)
            add_parts(p_parts, p_chosen, p_out, p_arrivals, o_t, o_n, i_arrival, expert, rows, H, E, SHARED, FIRST, K)


def tiling(rows: int, x_bytes: int, hip: bool) -> Tiling:
    """Of tiles of rows that follow one another. float32, which no matrix unit multiplies in full precision, gets small tiles. BN and BK
    divide a block of float8 scales."""
    largest = 16 if x_bytes == 4 else MAX_ROWS
    BT = min(largest, max(16, triton.next_power_of_2(rows)))
    return Tiling(BT, 32, 32, 2) if x_bytes == 4 else Tiling(BT, 64, 64, 1 if hip else 3)


def tilings(rows: int, x_bytes: int, weight_bytes: int, hip: bool) -> tuple[Tiling, Tiling]:
    """Of gate_up and of down. Few rows hit few experts: narrow tiles make programs enough to keep the memory busy. Narrow ones of float8
    gates spill."""
    rule = tiling(rows, x_bytes, hip)
    if rows > 16 or x_bytes == 4 or hip:
        return rule, rule
    return rule if weight_bytes == 1 else Tiling(rule.BT, 16, BLOCK, 4), Tiling(rule.BT, 32, BLOCK, 3)


def grouped_tilings(BT: int, x_bytes: int, weight_bytes: int, hip: bool) -> tuple[Tiling, Tiling]:
    """Of gate_up and of down, for tiles of BT rows of one expert. Few rows read weights: deep tiles have more of them on their way."""
    if x_bytes == 4 or hip:
        rule = Tiling(BT, 32, 32, 2) if x_bytes == 4 else Tiling(BT, 64, 64, 1)
        return rule, rule
    if BT <= 32:
        return Tiling(BT, 64, BLOCK if weight_bytes > 1 else 64, 3), Tiling(BT, 64, BLOCK, 3)
    return Tiling(BT, 64, 64, 3), Tiling(BT, 64, 64, 3) if weight_bytes == 1 else Tiling(BT, BLOCK, 64, 3, warps=8)


def tilings_of(x: Tensor, gate_up: Tensor, down: Tensor, top: int) -> tuple[Tiling, Tiling]:
    """Of gate_up and of down for these rows, those of the chip's table before the rule's. Rows of one expert are in tiles of one size."""
    (rows, hidden), (number, _, size), weight_bytes, hip = x.shape, down.shape, gate_up.element_size(), torch.version.hip is not None
    if rows > MAX_ROWS:
        largest = 16 if x.element_size() == 4 else 128 if weight_bytes > 1 else 64
        rules = grouped_tilings(tile_size(rows, top, number, largest), x.element_size(), weight_bytes, hip)
    else:
        rules = tilings(rows, x.element_size(), weight_bytes, hip)
    shape = f"{type_name(gate_up.dtype)} E{number} K{top} H{hidden} S{size}"
    (wide, _), (back, _) = (with_table(rule, op, shape, rows, x.device) for rule, op in zip(rules, ("gate_up", "down"), strict=True))
    return wide, replace(back, BT=wide.BT)


def experts(
    x: Tensor, weights: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor, shared_gate_up: Tensor | None, shared_down: Tensor | None,
    gate_up_scale: Tensor | None = None, down_scale: Tensor | None = None,
    shared_gate_up_scale: Tensor | None = None, shared_down_scale: Tensor | None = None,
    gate_up_bias: Tensor | None = None, down_bias: Tensor | None = None, clamped: Clamped | None = None,
    squared: bool = False, first: int | None = None,
) -> Tensor:  # fmt: skip
    """See reference.experts. The shared expert's width is a multiple of an expert's; in float8 either both are or neither, and then an
    expert is as wide as whole blocks, unless the shared one is as wide as it is."""
    (rows, hidden), (number, _, size), top, halves = x.shape, down.shape, chosen.shape[1], 1 if squared else 2
    assert x.stride(1) == 1 and chosen.is_contiguous() and weights.is_contiguous(), (x.stride(), chosen.stride(), weights.stride())
    shared = check_matrices(gate_up, down, shared_gate_up, shared_down, hidden, halves)
    check_scales(gate_up_scale, down_scale, shared_gate_up_scale, shared_down_scale, (number, hidden, size), shared, halves)
    assert not shared or (gate_up_bias is None and down_bias is None and clamped is None)
    assert gate_up_bias is None or (gate_up_bias.shape == (number, halves * size) and gate_up_bias.is_contiguous()), gate_up_bias.shape
    assert down_bias is None or (down_bias.shape == (number, hidden) and down_bias.is_contiguous()), down_bias.shape
    alpha, most, limit, plus = clamped or (1.0, None, None, None)
    inner = torch.empty(rows, top + shared, size, dtype=x.dtype, device=x.device)
    parts = torch.empty(rows, top + shared, hidden, dtype=torch.float32, device=x.device)
    out = torch.empty(rows, hidden, dtype=x.dtype, device=x.device)
    if not rows:
        return out
    wide, back = tilings_of(x, gate_up, down, top)
    tiles = expert_tiles(chosen, number, shared, first, wide.BT)
    gate_up_kernel[tiles.grid(size, wide.BN)](
        x, chosen, tiles.table, gate_up, shared_gate_up, gate_up_scale, shared_gate_up_scale, gate_up_bias, inner, rows, x.stride(0),
        H=hidden, S=size, E=number, SHARED=shared, K=top, BT=wide.BT, BN=wide.BN, BH=wide.BK, ALPHA=alpha, MOST=most,
        LIMIT=limit, PLUS=plus, HALVES=halves, FIRST=first, num_warps=wide.warps, num_stages=wide.stages,
    )  # fmt: skip
    down_kernel[tiles.grid(hidden, back.BN)](
        inner, chosen, tiles.table, weights, down, shared_down, down_scale, shared_down_scale, down_bias, parts,
        out, tiles.counters(hidden, back.BN), rows, H=hidden, S=size, E=number, SHARED=shared, K=top,
        BT=back.BT, BN=back.BN, BS=back.BK, FIRST=first, num_warps=back.warps, num_stages=back.stages,
    )  # fmt: skip
    tiles.sum_parts(parts, out)
    return out


def check_matrices(
    gate_up: Tensor, down: Tensor, shared_gate_up: Tensor | None, shared_down: Tensor | None, hidden: int, halves: int
) -> int:  # fmt: skip
    """→ how many experts the shared one is as wide as."""
    number, _, size = down.shape
    assert gate_up.shape == (number, halves * size, hidden) and down.shape[1] == hidden, (gate_up.shape, down.shape)
    assert gate_up.is_contiguous() and down.is_contiguous()
    if shared_gate_up is None or shared_down is None:
        return 0
    shared = shared_down.shape[1] // size
    assert shared_down.shape == (hidden, shared * size) and shared_gate_up.shape == (halves * shared * size, hidden), shared_down.shape
    assert shared_gate_up.is_contiguous() and shared_down.is_contiguous()
    assert shared_gate_up.dtype == gate_up.dtype and shared_down.dtype == down.dtype
    return shared


def check_scales(
    gate_up: Tensor | None, down: Tensor | None, shared_gate_up: Tensor | None, shared_down: Tensor | None, shape: tuple[int, int, int],
    shared: int, halves: int,
) -> None:  # fmt: skip
    number, hidden, size = shape
    blocks, deep = triton.cdiv(size, BLOCK), triton.cdiv(hidden, BLOCK)
    check_scale(gate_up, (number, halves * blocks, deep))
    check_scale(down, (number, deep, blocks))
    check_scale(shared_gate_up, (halves * shared * blocks, deep))
    check_scale(shared_down, (deep, shared * blocks))


def check_scale(scale: Tensor | None, shape: tuple[int, ...]) -> None:
    assert scale is None or (scale.shape == shape and scale.is_contiguous() and scale.dtype == torch.float32), (scale.shape, shape)
