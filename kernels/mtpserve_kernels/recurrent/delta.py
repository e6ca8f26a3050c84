"""The gated delta rule by tiles of rows (https://arxiv.org/abs/2412.06464 §3.3), with the rows of a tree as one tile of their own.

Within a tile of rows with keys K, decays that add up to c along each row's path, and M[i, j] = 1 where row j is on row i's path:

    A[i, j] = β_i (k_i · k_j) e^(c_i - c_j)  for j before i on its path        (I + A) V' = β V - (β e^c K) S
    out = e^c Q S + ((Q Kᵀ) e^(c_i - c_j) M) V'                                S ← e^(c_last) S + Σ_j k_j e^(c_last - c_j) V'_j

A is strictly triangular, so that its powers end: (I + A)⁻¹ = (I - A)(I + A²)(I + A⁴) … . A path is not a chain only for nodes of a tree, of
which nothing is added to the state.

Each program has a head of one request and some columns of its state: rows that are replayed, committed rows, and drafts, in this order.
Moves a state twice, the inputs once for each block of columns; 2 T value_heads (key_dim value_dim 4 + BT …) FLOPs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpserve_kernels.recurrent.reference import LayerState, Rule, StateSpans

COLUMNS = 32  # of a state, in one program
CHANNELS = 256  # of the inputs that are kept, in one program


@triton.jit
def inputs_at(p_x, p_before, p_ring, seat, first, replay, fresh, ring_rows, o_n, o_c, m, C: tl.constexpr, HISTORY: tl.constexpr):
    """Channels o_c [n] of rows o_n [m], counted from the span's first: those before it wait in the ring or came before these."""
    o_w = replay + o_n  # among those that are replayed
    m_x, m_r = m & (o_n >= 0)[:, None], m & ((o_n < 0) & (o_w >= 0))[:, None]
    m_b = m & ((o_n < 0) & (o_w < 0) & (o_w >= tl.where(fresh != 0, 0, -HISTORY)))[:, None]
    b_x = tl.load(p_x + (first + o_n)[:, None] * C + o_c[None, :], mask=m_x, other=0.0).to(tl.float32)
    b_r = tl.load(p_ring + (seat * ring_rows + o_w)[:, None] * C + o_c[None, :], mask=m_r, other=0.0).to(tl.float32)
    b_b = tl.load(p_before + (seat * HISTORY + HISTORY + o_w)[:, None] * C + o_c[None, :], mask=m_b, other=0.0).to(tl.float32)
    return b_x + b_r + b_b


@triton.jit
def mixed(
    p_x, p_before, p_ring, p_conv, p_parents, seat, first, replay, fresh, ring_rows, length, o_n, m_n, o_c, m_c, C: tl.constexpr,
    TAPS: tl.constexpr,
):  # fmt: skip
    """silu of the convolution: channels o_c of rows o_n. With parents: of the nodes o_n + 1 of a tree."""
    m = m_n[:, None] & m_c[None, :]
    b = tl.zeros([o_n.shape[0], o_c.shape[0]], tl.float32)
    o_at = o_n if p_parents is None else o_n + 1
    for t in tl.static_range(TAPS):
        # A node has its own row; node 0 is the last committed row, and those before it are -1, -2 …
        o_row = o_at if p_parents is None else tl.where(o_at > 0, length + o_at - 1, length - 1 + o_at)
        b_w = tl.load(p_conv + (TAPS - 1 - t) * C + o_c, mask=m_c, other=0.0)
        b += inputs_at(p_x, p_before, p_ring, seat, first, replay, fresh, ring_rows, o_row, o_c, m, C, TAPS - 1) * b_w[None, :]
        if p_parents is None:
            o_at -= 1
        else:
            o_at = tl.where(o_at > 0, tl.load(p_parents + o_at - 1, mask=m_n & (o_at > 0), other=0).to(o_at.dtype), o_at - 1)
    return b / (1.0 + tl.exp(-b))


@triton.jit
def unit(b):
    return b * tl.rsqrt(tl.sum(b * b, 1) + 1e-6)[:, None]


@triton.jit
def heads_of(
    p_x, p_before, p_ring, p_conv, p_parents, seat, first, replay, fresh, ring_rows, length, o_n, m_n, o_q, m_k, o_v, m_v,
    KEYS: tl.constexpr, C: tl.constexpr, TAPS: tl.constexpr,
):  # fmt: skip
    """q, k [rows, key_dim] and v [rows, columns] of one head."""
    b_q = mixed(p_x, p_before, p_ring, p_conv, p_parents, seat, first, replay, fresh, ring_rows, length, o_n, m_n, o_q, m_k, C, TAPS)
    b_k = mixed(p_x, p_before, p_ring, p_conv, p_parents, seat, first, replay, fresh, ring_rows, length, o_n, m_n, KEYS + o_q, m_k, C, TAPS)
    b_v = mixed(p_x, p_before, p_ring, p_conv, p_parents, seat, first, replay, fresh, ring_rows, length, o_n, m_n, o_v, m_v, C, TAPS)
    return unit(b_q), unit(b_k), b_v


@triton.jit
def solved(b_a, BT: tl.constexpr):
    """(I + A)⁻¹ of a strictly triangular A."""
    o = tl.arange(0, BT)
    b_one = (o[:, None] == o[None, :]).to(tl.float32)
    b_power, b_out = b_a, b_one - b_a
    for power in tl.static_range(1, 6):
        if 2**power < BT:
            b_power = tl.dot(b_power, b_power, input_precision="ieee")
            b_out = tl.dot(b_out, b_one + b_power, input_precision="ieee")
    return b_out


@triton.jit
def tile(b_s, b_q, b_k, b_v, b_g, b_beta, b_path, BT: tl.constexpr):
    """b_path [BT, BT]: 1 where column j is on row i's path, i itself included → out [BT, columns], and the state after the last row."""
    o = tl.arange(0, BT)
    b_c = tl.sum(b_path * b_g[None, :], 1)
    b_decay = tl.exp(tl.where(b_path > 0, b_c[:, None] - b_c[None, :], 0.0)) * b_path
    b_kk = tl.dot(b_k, tl.trans(b_k), input_precision="ieee")
    b_a = tl.where(o[:, None] == o[None, :], 0.0, b_kk * b_decay * b_beta[:, None])
    b_seen = tl.dot(b_k * tl.exp(b_c)[:, None], b_s, input_precision="ieee")
    b_new = tl.dot(solved(b_a, BT), (b_v - b_seen) * b_beta[:, None], input_precision="ieee")
    b_qk = tl.dot(b_q, tl.trans(b_k), input_precision="ieee") * b_decay
    b_out = tl.dot(b_q * tl.exp(b_c)[:, None], b_s, input_precision="ieee") + tl.dot(b_qk, b_new, input_precision="ieee")
    # Rows beyond the last one neither decay nor add anything.
    total = tl.sum(b_g, 0)
    b_s = b_s * tl.exp(total) + tl.dot(tl.trans(b_k * tl.exp(total - b_c)[:, None]), b_new, input_precision="ieee")
    return b_out, b_s


@triton.jit(do_not_specialize=["ring_rows", "drafted"])
def recur_kernel(
    p_x, p_gates, p_conv, p_out, p_state, p_before, p_ring, p_ring_gates, p_seats, p_cu_q, p_length, p_replay, p_fresh, p_parents,
    p_keep_after, p_keep_in, ring_rows, drafted, HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
    TAPS: tl.constexpr, BT: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    i_v, i_h, i_r = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    C: tl.constexpr = 2 * HK * DK + HV * DV
    KP: tl.constexpr = triton.next_power_of_2(DK) if DK > 16 else 16
    seat, first, length = tl.load(p_seats + i_r), tl.load(p_cu_q + i_r), tl.load(p_length + i_r)
    drafts = tl.load(p_cu_q + i_r + 1) - first - length
    fresh = tl.load(p_fresh + i_r)
    replay = tl.where(fresh != 0, 0, tl.load(p_replay + i_r))
    o_k, o_v, o_t = tl.arange(0, KP), i_v * BV + tl.arange(0, BV), tl.arange(0, BT)
    m_k, m_v, known = o_k < DK, o_v < DV, tl.where(fresh != 0, 0, DK)
    o_s = i_h * DK * DV + o_k[:, None] * DV + o_v[None, :]
    m_s = m_k[:, None] & m_v[None, :]
    b_s = tl.load(p_state + seat * HV * DK * DV + o_s, mask=(o_k < known)[:, None] & m_v[None, :], other=0.0)
    o_q = i_h // (HV // HK) * DK + o_k
    o_value = 2 * HK * DK + i_h * DV + o_v
    b_chain = (o_t[:, None] >= o_t[None, :]).to(tl.float32)
    keep = 0
    if p_keep_after is not None:
        keep = tl.load(p_keep_after + i_r)
    # What is replayed, what is committed up to the state that is kept, and the rest: rows begin … end - 1, counted from the span's first.
    for part in tl.static_range(3):
        begin = -replay if part == 0 else (keep * 0 if part == 1 else keep)
        end = keep * 0 if part == 0 else (keep if part == 1 else length)
        for i in range(tl.cdiv(end - begin, BT)):
            o_n = begin + i * BT + o_t
            m_n = o_n < end
            b_q, b_k, b_v = heads_of(
                p_x, p_before, p_ring, p_conv, None, seat, first, replay, fresh, ring_rows, length, o_n, m_n, o_q, m_k, o_value, m_v,
                HK * DK, C, TAPS,
            )  # fmt: skip
            p_g = p_ring_gates + (seat * ring_rows + replay + o_n) * 2 * HV if part == 0 else p_gates + (first + o_n) * 2 * HV
            b_g, b_beta = tl.load(p_g + i_h, mask=m_n, other=0.0), tl.load(p_g + HV + i_h, mask=m_n, other=0.0)
            b_out, b_s = tile(b_s, b_q, b_k, b_v, b_g, b_beta, b_chain, BT)
            if part > 0:
                p_o = p_out + ((first + o_n) * HV + i_h)[:, None] * DV + o_v[None, :]
                tl.store(p_o, b_out * (DK**-0.5), mask=m_n[:, None] & m_v[None, :])
        if part == 1:
            if keep > 0:
                tl.store(p_state + tl.load(p_keep_in + i_r) * HV * DK * DV + o_s, b_s, mask=m_s)
    tl.store(p_state + seat * HV * DK * DV + o_s, b_s, mask=m_s)
    if drafts > 0:
        m_n, o_n = o_t < drafts, length + o_t
        p_own, b_path = None, b_chain
        if p_parents is not None:
            p_own = p_parents + i_r * drafted
            o_n, o_at = o_t, o_t + 1
            b_path = tl.zeros([BT, BT], tl.float32)
            for _ in range(drafts):
                b_path = tl.where(o_at[:, None] == o_t[None, :] + 1, 1.0, b_path)
                o_at = tl.load(p_own + o_at - 1, mask=m_n & (o_at > 0), other=0).to(o_at.dtype)
        b_q, b_k, b_v = heads_of(
            p_x, p_before, p_ring, p_conv, p_own, seat, first, replay, fresh, ring_rows, length, o_n, m_n, o_q, m_k, o_value, m_v,
            HK * DK, C, TAPS,
        )  # fmt: skip
        p_g = p_gates + (first + length + o_t) * 2 * HV + i_h
        b_g, b_beta = tl.load(p_g, mask=m_n, other=0.0), tl.load(p_g + HV, mask=m_n, other=0.0)
        b_out, _ = tile(b_s, b_q, b_k, b_v, b_g, b_beta, b_path, BT)
        p_o = p_out + ((first + length + o_t) * HV + i_h)[:, None] * DV + o_v[None, :]
        tl.store(p_o, b_out * (DK**-0.5), mask=m_n[:, None] & m_v[None, :])


@triton.jit(do_not_specialize=["ring_rows"])
def keep_kernel(
    p_x, p_gates, p_before, p_ring, p_ring_gates, p_seats, p_cu_q, p_length, p_replay, p_fresh, p_keep_after, p_keep_in, ring_rows,
    C: tl.constexpr, HV: tl.constexpr, TAPS: tl.constexpr, BC: tl.constexpr, BH: tl.constexpr, BG: tl.constexpr,
):  # fmt: skip
    """The inputs that the next step finds: of the last rows before it, and of those that wait."""
    i_c, i_r = tl.program_id(0), tl.program_id(1)
    seat, first, length = tl.load(p_seats + i_r), tl.load(p_cu_q + i_r), tl.load(p_length + i_r)
    drafts = tl.load(p_cu_q + i_r + 1) - first - length
    fresh = tl.load(p_fresh + i_r)
    replay = tl.where(fresh != 0, 0, tl.load(p_replay + i_r))
    o_c, o_t = i_c * BC + tl.arange(0, BC), tl.arange(0, BH)
    m = (o_t < TAPS - 1)[:, None] & (o_c < C)[None, :]
    b_last = inputs_at(p_x, p_before, p_ring, seat, first, replay, fresh, ring_rows, length - (TAPS - 1) + o_t, o_c, m, C, TAPS - 1)
    if p_keep_after is not None:
        keep = tl.load(p_keep_after + i_r)
        if keep > 0:
            b_kept = inputs_at(p_x, p_before, p_ring, seat, first, replay, fresh, ring_rows, keep - (TAPS - 1) + o_t, o_c, m, C, TAPS - 1)
            place = tl.load(p_keep_in + i_r)
            tl.store(p_before + (place * (TAPS - 1) + o_t)[:, None] * C + o_c[None, :], b_kept, mask=m)
    tl.debug_barrier()  # all of it is read before any is written
    tl.store(p_before + (seat * (TAPS - 1) + o_t)[:, None] * C + o_c[None, :], b_last, mask=m)
    o_g = tl.arange(0, BG)
    for j in range(drafts):
        row = first + length + j
        b_x = tl.load(p_x + row * C + o_c, mask=o_c < C)
        tl.store(p_ring + (seat * ring_rows + j) * C + o_c, b_x, mask=o_c < C)
        if i_c == 0:
            b_g = tl.load(p_gates + row * 2 * HV + o_g, mask=o_g < 2 * HV)
            tl.store(p_ring_gates + (seat * ring_rows + j) * 2 * HV + o_g, b_g, mask=o_g < 2 * HV)


def recur(x: Tensor, gates: Tensor, conv: Tensor, layer: LayerState, spans: StateSpans, rule: Rule) -> Tensor:
    """As the reference. Reads nothing on the host."""
    x, requests = x.contiguous(), len(spans.seats)
    assert gates.is_contiguous() and conv.is_contiguous() and all(part.is_contiguous() for part in layer)
    parents = None if spans.parents is None else spans.parents.contiguous()
    out = torch.empty(len(x), rule.value_heads, rule.value_dim, dtype=x.dtype, device=x.device)
    own = spans.seats, spans.cu_q, spans.length, spans.replay, spans.fresh
    ring_rows, kept = layer.ring.shape[1], (spans.keep_after, spans.keep_in)
    # A tile holds all drafts of a request.
    rows = max(16, triton.next_power_of_2(max(spans.widest, 1)), 32 if len(x) > 16 * requests else 0)
    columns = max(16, min(COLUMNS, triton.next_power_of_2(rule.value_dim)))
    recur_kernel[(triton.cdiv(rule.value_dim, columns), rule.value_heads, requests)](
        x, gates, conv, out, layer.state, layer.before, layer.ring, layer.ring_gates, *own, parents, *kept, ring_rows,
        0 if parents is None else parents.shape[1], rule.key_heads, rule.value_heads, rule.key_dim, rule.value_dim, rule.taps,
        rows, columns, num_warps=8 if rows >= 64 else 4,
    )  # fmt: skip
    channels = min(CHANNELS, triton.next_power_of_2(rule.channels))
    keep_kernel[(triton.cdiv(rule.channels, channels), requests)](
        x, gates, layer.before, layer.ring, layer.ring_gates, *own, *kept, ring_rows, rule.channels, rule.value_heads, rule.taps,
        channels, triton.next_power_of_2(rule.taps - 1), triton.next_power_of_2(2 * rule.value_heads),
    )  # fmt: skip
    return out
