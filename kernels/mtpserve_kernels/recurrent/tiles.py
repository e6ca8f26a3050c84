"""The gated delta rule on a GPU for prompts: tiles of 16 rows in a few products each, in place of 16 rows one by one (the chunk form of
https://arxiv.org/abs/2412.06464 §3.2, with the inverse of its triangular matrix).

With G the sum of a tile's g up to a row, D_ti = e^(G_t - G_i), and S the state before the tile, the rows' updates U solve

    (I + A) U = β (V - e^G K S)      A_ti = β_t D_ti (k_t · k_i) where i < t
    out = e^G Q S + (D Q Kᵀ where i ≤ t) U      S ← e^G₁₆ S + (e^(G₁₆ - G) K)ᵀ U

A program has a head of one request and some columns of its state, as in delta.py, which computes what is left of a span. Numbers are
float32's throughout, and the same up to rounding.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mtpserve_kernels.recurrent.rows import mixed

ROWS = tl.constexpr(16)
KEYS = tl.constexpr(16)  # of a state, at a time


@triton.jit
def tiles_of(replay, length):
    """Of a span's rows, those that are replayed and those committed. What is shorter than a tile goes row by row."""
    return tl.where(length < ROWS, 0, (replay + length) // ROWS)


@triton.jit
def inverse(b_a, o_t, o_i):
    """(I + A)⁻¹ of A [16, 16], which is zero on and above its diagonal. First of blocks of 4 along it, whose fourth power is zero; then
    of those as a whole: no power of a larger one is formed, whose numbers would cancel."""
    b_one = tl.where(o_t == o_i, 1.0, 0.0)
    b_near = tl.where(o_t // 4 == o_i // 4, b_a, 0.0)
    b_blocks = tl.dot(b_one - b_near, b_one + tl.dot(b_near, b_near, input_precision="ieee"), input_precision="ieee")
    b_far = tl.dot(b_blocks, b_a - b_near, input_precision="ieee")
    b_whole = tl.dot(b_one - b_far, b_one + tl.dot(b_far, b_far, input_precision="ieee"), input_precision="ieee")
    return tl.dot(b_whole, b_blocks, input_precision="ieee")


@triton.jit(do_not_specialize=["ring_rows"])
def tiles_kernel(
    p_x, p_gates, p_conv, p_out, p_state, p_before, p_ring, p_ring_gates, p_req_indices, p_query_start_loc, p_length, p_replay, p_fresh,
    p_keep_after,
    p_keep_in, ring_rows, HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, TAPS: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """KEYS keys at a time, of a state that stays in the cache: a whole one beside all of a tile's keys does not fit into registers."""
    i_v, i_h, i_r = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    req_idx, first, length = tl.load(p_req_indices + i_r), tl.load(p_query_start_loc + i_r), tl.load(p_length + i_r).to(tl.int32)
    fresh = tl.load(p_fresh + i_r).to(tl.int32)
    replay = tl.where(fresh != 0, 0, tl.load(p_replay + i_r).to(tl.int32))
    C: tl.constexpr = 2 * HK * DK + HV * DV
    query, value = i_h // (HV // HK) * DK, 2 * HK * DK + i_h * DV
    key = query + HK * DK
    o_r, o_t, o_i = tl.arange(0, ROWS), tl.arange(0, ROWS)[:, None], tl.arange(0, ROWS)[None, :]
    o_b, o_v = tl.arange(0, KEYS), i_v * BV + tl.arange(0, BV)[None, :]
    o_s = i_h * DK * DV + o_v
    p_own = p_state + req_idx * HV * DK * DV + o_s
    for tile in range(tiles_of(replay, length)):
        o_n = tile * ROWS - replay + o_t
        known = tl.where((fresh != 0) & (tile == 0), 0, DK)
        b_kk, b_qk = tl.zeros([ROWS, ROWS], tl.float32), tl.zeros([ROWS, ROWS], tl.float32)
        b_ks, b_qs = tl.zeros([ROWS, BV], tl.float32), tl.zeros([ROWS, BV], tl.float32)
        b_k2, b_q2 = tl.full([ROWS], 1e-6, tl.float32), tl.full([ROWS], 1e-6, tl.float32)
        for j in range(0, DK, KEYS):
            o_k, o_d = (j + o_b)[None, :], (j + o_b)[:, None]
            b_k = mixed(
                p_x, p_before, p_ring, p_conv, None, req_idx, first, replay, fresh, ring_rows, length, o_n, key, o_k, DK, C, TAPS
            )  # fmt: skip
            b_q = mixed(
                p_x, p_before, p_ring, p_conv, None, req_idx, first, replay, fresh, ring_rows, length, o_n, query, o_k, DK, C, TAPS
            )  # fmt: skip
            b_s = tl.load(p_own + o_d * DV, mask=(o_d < known) & (o_v < DV), other=0.0)
            b_kk = tl.dot(b_k, tl.trans(b_k), b_kk, input_precision="ieee")
            b_qk = tl.dot(b_q, tl.trans(b_k), b_qk, input_precision="ieee")
            b_ks = tl.dot(b_k, b_s, b_ks, input_precision="ieee")
            b_qs = tl.dot(b_q, b_s, b_qs, input_precision="ieee")
            b_k2 += tl.sum(b_k * b_k, 1)
            b_q2 += tl.sum(b_q * b_q, 1)
        b_v = mixed(
            p_x, p_before, p_ring, p_conv, None, req_idx, first, replay, fresh, ring_rows, length, o_n, value, o_v, DV, C, TAPS
        )  # fmt: skip
        n = tile * ROWS - replay + o_r
        p_g = tl.where(n < 0, p_ring_gates + (req_idx * ring_rows + replay + n) * 2 * HV, p_gates + (first + n) * 2 * HV) + i_h
        b_g, b_beta, b_unit = tl.load(p_g), tl.load(p_g + HV)[:, None], tl.rsqrt(b_k2)
        b_sum, whole = tl.cumsum(b_g, 0), tl.sum(b_g, 0)
        b_all = tl.exp(b_sum)[:, None]
        b_decay = tl.where(o_i <= o_t, tl.exp(tl.where(o_i <= o_t, b_sum[:, None] - b_sum[None, :], 0.0)) * b_unit[None, :], 0.0)
        b_a = tl.where(o_i < o_t, b_kk * b_decay * b_unit[:, None] * b_beta, 0.0)
        b_u = tl.dot(inverse(b_a, o_t, o_i), (b_v - b_all * b_unit[:, None] * b_ks) * b_beta, input_precision="ieee")
        b_out = b_all * b_qs + tl.dot(b_qk * b_decay, b_u, input_precision="ieee")
        b_out *= (tl.rsqrt(b_q2) * (DK**-0.5))[:, None]
        tl.store(p_out + ((first + o_n) * HV + i_h) * DV + o_v, b_out, mask=(o_n >= 0) & (o_v < DV))
        b_ahead = (b_unit * tl.exp(whole - b_sum))[:, None]
        if p_keep_after is not None:
            keep = tl.load(p_keep_after + i_r).to(tl.int32) - tile * ROWS
            part = tl.sum(tl.where(o_r < keep, b_g, 0.0), 0)
            b_part = tl.where(o_r < keep, b_unit * tl.exp(tl.where(o_r < keep, part - b_sum, 0.0)), 0.0)[:, None]
            p_kept = p_state + tl.load(p_keep_in + i_r) * HV * DK * DV + o_s
        for j in range(0, DK, KEYS):
            o_k, o_d = (j + o_b)[None, :], (j + o_b)[:, None]
            b_k = mixed(
                p_x, p_before, p_ring, p_conv, None, req_idx, first, replay, fresh, ring_rows, length, o_n, key, o_k, DK, C, TAPS
            )  # fmt: skip
            b_s = tl.load(p_own + o_d * DV, mask=(o_d < known) & (o_v < DV), other=0.0)
            if p_keep_after is not None:
                if (keep > 0) & (keep <= ROWS):
                    b_kept = tl.dot(tl.trans(b_k * b_part), b_u, b_s * tl.exp(part), input_precision="ieee")
                    tl.store(p_kept + o_d * DV, b_kept, mask=(o_d < DK) & (o_v < DV))
            b_s = tl.dot(tl.trans(b_k * b_ahead), b_u, b_s * tl.exp(whole), input_precision="ieee")
            tl.store(p_own + o_d * DV, b_s, mask=(o_d < DK) & (o_v < DV))
        tl.debug_barrier()  # what a thread has stored another one loads for the next tile
