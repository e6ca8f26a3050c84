"""Recurrences on a GPU, row by row, by the gated delta rule or Mamba-2's: a program has a head of one request and some columns of its
state, which stay in registers while the request's rows go by: those that are replayed, committed ones, and drafts, in this order. Columns
do not depend on each other. What is long goes by tiles first, by the delta rule: see tiles.py.

A node of a tree goes along its path again, from the state after the last committed row: a path is short, and states are large.

Moves a state twice, and the inputs once for each block of columns; 6 T value_heads key_dim value_dim FLOPs, Mamba-2 4 T, of trees with T
nodes as many times as a path is long.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpserve_kernels.recurrent.reference import LayerState, Rule, StateSpans
from mtpserve_kernels.recurrent.rows import inputs_of, mixed
from mtpserve_kernels.recurrent.tiles import ROWS, tiles_kernel, tiles_of

COLUMNS = tl.constexpr(32)  # of a state, in one program
CHANNELS = 256  # of the inputs that are kept, in one program


@triton.jit
def advance(
    b_s, p_g, p_x, p_before, p_ring, p_conv, p_skip, p_parents, req_idx, first, replay, fresh, ring_rows, length, n, o_k, o_v, i_h,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """One row, whose gates are at p_g → the state after it, and what it reads."""
    C: tl.constexpr = 2 * HK * DK + HV * DV
    MAMBA2: tl.constexpr = p_skip is not None
    # Channels are q, k and v, of Mamba-2 v, k and q.
    own = i_h // (HV // HK) * DK
    query = (HV * DV + HK * DK if MAMBA2 else 0) + own
    key = (HV * DV if MAMBA2 else HK * DK) + own
    value = (0 if MAMBA2 else 2 * HK * DK) + i_h * DV
    b_q = mixed(
        p_x, p_before, p_ring, p_conv, p_parents, req_idx, first, replay, fresh, ring_rows, length, n, query, o_k, DK, C, TAPS, MAMBA2
    )
    b_k = mixed(
        p_x, p_before, p_ring, p_conv, p_parents, req_idx, first, replay, fresh, ring_rows, length, n, key, o_k, DK, C, TAPS, MAMBA2
    )
    b_v = mixed(
        p_x, p_before, p_ring, p_conv, p_parents, req_idx, first, replay, fresh, ring_rows, length, n, value, o_v, DV, C, TAPS, MAMBA2
    )
    b_s *= tl.exp(tl.load(p_g + i_h))
    if MAMBA2:
        b_written = b_v
    else:
        b_q *= tl.rsqrt(tl.sum(b_q * b_q, 0) + 1e-6) * (DK**-0.5)
        b_k *= tl.rsqrt(tl.sum(b_k * b_k, 0) + 1e-6)
        b_written = b_v - tl.sum(b_s * b_k[:, None], 0)
    b_s += b_k[:, None] * (b_written * tl.load(p_g + HV + i_h))[None, :]
    b_out = tl.sum(b_s * b_q[:, None], 0)
    if MAMBA2:
        b_out += b_v * tl.load(p_skip + i_h)
    return b_s, b_out


@triton.jit(do_not_specialize=["ring_rows", "drafted"])
def recur_kernel(
    p_x, p_gates, p_conv, p_skip, p_out, p_state, p_before, p_ring, p_ring_gates, p_req_indices, p_query_start_loc, p_length, p_replay,
    p_fresh,
    p_parents, p_keep_after, p_keep_in, ring_rows, drafted, HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    TAPS: tl.constexpr, TILED: tl.constexpr,
):  # fmt: skip
    """TILED: tiles_kernel has computed the first rows of spans that are long enough."""
    i_v, i_h, i_r = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    KP: tl.constexpr = triton.next_power_of_2(DK)
    BV: tl.constexpr = COLUMNS if DV > COLUMNS else triton.next_power_of_2(DV)
    req_idx, first, length = tl.load(p_req_indices + i_r), tl.load(p_query_start_loc + i_r), tl.load(p_length + i_r).to(tl.int32)
    drafts = (tl.load(p_query_start_loc + i_r + 1) - first).to(tl.int32) - length
    fresh = tl.load(p_fresh + i_r).to(tl.int32)
    replay = tl.where(fresh != 0, 0, tl.load(p_replay + i_r).to(tl.int32))
    o_k, o_v = tl.arange(0, KP), i_v * BV + tl.arange(0, BV)
    o_s = i_h * DK * DV + o_k[:, None] * DV + o_v[None, :]
    done = 0
    if TILED:
        done = tiles_of(replay, length) * ROWS
    m_v, known = o_v < DV, tl.where((fresh != 0) & (done == 0), 0, DK)
    m_s = (o_k < DK)[:, None] & m_v[None, :]
    p_own = p_state + req_idx * HV * DK * DV
    b_s = tl.load(p_own + o_s, mask=(o_k < known)[:, None] & m_v[None, :], other=0.0)
    # One loop for the rows that are replayed and the committed ones: with two, Triton's AMD pass over comparisons fails.
    for n in range(done - replay, length):
        p_old, p_new = p_ring_gates + (req_idx * ring_rows + replay + n) * 2 * HV, p_gates + (first + n) * 2 * HV
        b_s, b_out = advance(
            b_s, tl.where(n < 0, p_old, p_new), p_x, p_before, p_ring, p_conv, p_skip, None, req_idx, first, replay, fresh,
            ring_rows, length, n, o_k, o_v, i_h, HK, HV, DK, DV, TAPS,
        )  # fmt: skip
        tl.store(p_out + ((first + n) * HV + i_h) * DV + o_v, b_out, mask=m_v & (n >= 0))
        if p_keep_after is not None:
            if tl.load(p_keep_after + i_r) == replay + n + 1:
                tl.store(p_state + tl.load(p_keep_in + i_r) * HV * DK * DV + o_s, b_s, mask=m_s)
    tl.store(p_own + o_s, b_s, mask=m_s)
    b_root = b_s
    for j in range(drafts):
        if p_parents is None:
            p_g = p_gates + (first + length + j) * 2 * HV
            b_s, b_out = advance(
                b_s, p_g, p_x, p_before, p_ring, p_conv, p_skip, None, req_idx, first, replay, fresh, ring_rows, length, length + j,
                o_k, o_v, i_h, HK, HV, DK, DV, TAPS,
            )  # fmt: skip
        else:
            p_tree = p_parents + i_r * drafted
            one = first * 0 + 1  # of 64 bits, as a path is
            path, at = one << j, j + 1
            for _ in range(j):
                at = tl.where(at > 0, tl.load(p_tree + tl.maximum(at - 1, 0)).to(tl.int32), 0)
                path = tl.where(at > 0, path | (one << tl.maximum(at - 1, 0)), path)
            b_s, b_out = b_root, tl.zeros([BV], tl.float32)
            for a in range(j + 1):
                if (path >> a) & 1 == 1:
                    p_g = p_gates + (first + length + a) * 2 * HV
                    b_s, b_out = advance(
                        b_s, p_g, p_x, p_before, p_ring, p_conv, p_skip, p_tree, req_idx, first, replay, fresh, ring_rows, length,
                        length + a, o_k, o_v, i_h, HK, HV, DK, DV, TAPS,
                    )  # fmt: skip
        tl.store(p_out + ((first + length + j) * HV + i_h) * DV + o_v, b_out, mask=m_v)


@triton.jit(do_not_specialize=["ring_rows"])
def keep_kernel(
    p_x, p_gates, p_before, p_ring, p_ring_gates, p_req_indices, p_query_start_loc, p_length, p_replay, p_fresh, p_keep_after, p_keep_in,
    ring_rows,
    C: tl.constexpr, HV: tl.constexpr, TAPS: tl.constexpr, BC: tl.constexpr, BG: tl.constexpr,
):  # fmt: skip
    """The inputs that the next step finds: of the last rows before it, and of those that wait."""
    i_c, i_r = tl.program_id(0), tl.program_id(1)
    req_idx, first, length = tl.load(p_req_indices + i_r), tl.load(p_query_start_loc + i_r), tl.load(p_length + i_r).to(tl.int32)
    drafts = (tl.load(p_query_start_loc + i_r + 1) - first).to(tl.int32) - length
    fresh = tl.load(p_fresh + i_r).to(tl.int32)
    replay = tl.where(fresh != 0, 0, tl.load(p_replay + i_r).to(tl.int32))
    o_c = i_c * BC + tl.arange(0, BC)
    HISTORY: tl.constexpr = TAPS - 1
    if p_keep_after is not None:
        keep = tl.load(p_keep_after + i_r).to(tl.int32)
        if keep > 0:
            place = tl.load(p_keep_in + i_r)
            for t in tl.static_range(HISTORY):
                at = keep - replay - HISTORY + t
                b_x = inputs_of(p_x, p_before, p_ring, req_idx, first, replay, fresh, ring_rows, at, o_c, o_c, C, C, HISTORY)
                tl.store(p_before + (place * HISTORY + t) * C + o_c, b_x, mask=o_c < C)
    # From the oldest on: what is read then is never older than what is overwritten.
    for t in tl.static_range(HISTORY):
        at = length - HISTORY + t
        b_x = inputs_of(p_x, p_before, p_ring, req_idx, first, replay, fresh, ring_rows, at, o_c, o_c, C, C, HISTORY)
        tl.store(p_before + (req_idx * HISTORY + t) * C + o_c, b_x, mask=o_c < C)
    o_g = tl.arange(0, BG)
    for j in range(drafts):
        row = first + length + j
        b_x = tl.load(p_x + row * C + o_c, mask=o_c < C, other=0.0)
        tl.store(p_ring + (req_idx * ring_rows + j) * C + o_c, b_x, mask=o_c < C)
        if i_c == 0:
            b_g = tl.load(p_gates + row * 2 * HV + o_g, mask=o_g < 2 * HV, other=0.0)
            tl.store(p_ring_gates + (req_idx * ring_rows + j) * 2 * HV + o_g, b_g, mask=o_g < 2 * HV)


def recur(
    x: Tensor, gates: Tensor, conv: Tensor, layer: LayerState, spans: StateSpans, rule: Rule, skip: Tensor | None = None
) -> Tensor:  # fmt: skip
    """As the reference. Reads nothing on the host. A tree has at most 63 nodes beside its root."""
    x, requests = x.contiguous(), len(spans.seats)
    assert gates.is_contiguous() and conv.is_contiguous() and all(part.is_contiguous() for part in layer) and spans.widest < 64
    *dimensions, mamba2 = rule
    assert (skip is not None) == mamba2 and len(conv) == rule.taps + mamba2, (conv.shape, rule)
    parents = None if spans.parents is None else spans.parents.contiguous()
    out = torch.empty(len(x), rule.value_heads, rule.value_dim, dtype=x.dtype, device=x.device)
    own = spans.seats, spans.query_start_loc, spans.length, spans.replay, spans.fresh
    ring_rows, kept = layer.ring.shape[1], (spans.keep_after, spans.keep_in)
    tiled = spans.longest >= ROWS.value and not mamba2
    if tiled:
        # Products take 16 columns at least.
        columns = max(min(COLUMNS.value, triton.next_power_of_2(rule.value_dim)), 16)
        tiles_kernel[(triton.cdiv(rule.value_dim, columns), rule.value_heads, requests)](
            x, gates, conv, out, layer.state, layer.before, layer.ring, layer.ring_gates, *own, *kept, ring_rows, *dimensions, columns,
            num_stages=1,  # loaded ahead, the next keys spill
        )  # fmt: skip
    columns = min(COLUMNS.value, triton.next_power_of_2(rule.value_dim))
    recur_kernel[(triton.cdiv(rule.value_dim, columns), rule.value_heads, requests)](
        x, gates, conv, skip, out, layer.state, layer.before, layer.ring, layer.ring_gates, *own, parents, *kept, ring_rows,
        0 if parents is None else parents.shape[1], *dimensions, tiled,
        num_warps=4 if parents is None else 8,  # a node of a tree needs the root's state beside its own
    )  # fmt: skip
    channels = min(CHANNELS, triton.next_power_of_2(rule.channels))
    keep_kernel[(triton.cdiv(rule.channels, channels), requests)](
        x, gates, layer.before, layer.ring, layer.ring_gates, *own, *kept, ring_rows, rule.channels, rule.value_heads, rule.taps,
        channels, triton.next_power_of_2(2 * rule.value_heads),
    )  # fmt: skip
    return out
