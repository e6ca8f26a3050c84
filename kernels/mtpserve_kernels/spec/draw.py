"""A draft for each row of a draft model's logits, drawn by the race of race.py, and the distribution that it was drawn from.

argmax_kernel, cut_kernel where some request has a cut, and `draw_kernel`, a program per chunk of a row; the last one of a row (arrivals.py)
takes the fastest token. Moves T V numbers twice, and q.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpserve_kernels.arrivals import arrival_counters
from mtpserve_kernels.spec.argmax import WARPS, chunks, chunks_of, is_finite, largest_key, number_of, ordered, place_of
from mtpserve_kernels.spec.race import (
    DRAFT,
    DRAW,
    NO_SPEED,
    cut_and_mass,
    exponential_noise,
    probabilities,
    random_key,
    row_cuts,
    store_winner,
)


@triton.jit
def _fastest(p_part, CHUNKS: tl.constexpr):
    """The first token with the largest speed; other programs have written the chunks' winners."""
    o = tl.arange(0, triton.next_power_of_2(CHUNKS))
    b_speed = tl.load(p_part + o, mask=o < CHUNKS, other=NO_SPEED, volatile=True)
    b_token = tl.load(p_part + CHUNKS + o, mask=o < CHUNKS, other=0, volatile=True)
    return tl.min(tl.where(b_speed == tl.max(b_speed), b_token, 0x7FFFFFFF))


@triton.jit(do_not_specialize=["p_req_indices", "p_index"])
def draw_kernel(
    p_logits, p_req_indices, p_index, p_temperature, p_seed, p_coupled, p_keys, p_masses, p_cuts, p_totals, p_q, p_winners, p_arrivals,
    p_tokens, stride_q, V: tl.constexpr, BV: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """p_winners [T, 2, CHUNKS]. p_coupled is None where all are coupled, p_q where nobody asks, p_cuts and p_totals where no request has a
    cut."""
    i = tl.program_id(0)
    i_row, chunk = (i // CHUNKS).to(tl.int64), i % CHUNKS
    req_idx, key = tl.load(p_req_indices + i_row), largest_key(p_keys, i_row, CHUNKS)
    temperature, o, p_part = tl.load(p_temperature + req_idx), chunk * BV + tl.arange(0, BV), p_winners + i_row * 2 * CHUNKS + chunk
    p_law, is_sampled = p_q, is_finite(key) & (temperature > 0)
    if p_q is not None:
        p_law += i_row * stride_q
    if is_sampled:
        p_row, top, inverse = p_logits + i_row * V, number_of(key), 1.0 / temperature
        cut, mass = cut_and_mass(p_cuts, p_totals, p_keys, p_masses, i_row, top, inverse, CHUNKS)
        stream = tl.full([], DRAW, tl.int64)
        if p_coupled is not None:
            stream = tl.where(tl.load(p_coupled + req_idx) != 0, DRAW, DRAFT).to(tl.int64)
        if ordered((number_of(tl.load(p_keys + i)) - top) * inverse) >= cut:
            base = random_key(tl.load(p_seed + req_idx), tl.load(p_index + i_row), stream)
            b_p = probabilities(p_row, o, top, inverse, cut, mass, V)
            if p_q is not None:
                tl.store(p_law + o, b_p, mask=o < V)
            store_winner(b_p, exponential_noise(base, o), o, p_part, CHUNKS)
        else:
            tl.store(p_part, NO_SPEED)
            if p_q is not None:
                tl.store(p_law + o, tl.zeros([BV], tl.float32), mask=o < V)
    else:
        if p_q is not None:
            tl.store(p_law + o, tl.where(o == place_of(key), 1.0, 0.0), mask=o < V)
    tl.debug_barrier()  # the winner is written before it is counted
    if tl.atomic_add(p_arrivals + i_row, 1, sem="acq_rel") == CHUNKS - 1:
        tl.store(p_arrivals + i_row, 0)
        token = place_of(key)
        if is_sampled:
            token = _fastest(p_winners + i_row * 2 * CHUNKS, CHUNKS)
        tl.store(p_tokens + i_row, token)


def draw(
    logits: Tensor, seats: Tensor, index: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seed: Tensor,
    coupled: Tensor | None, q: Tensor | None, *, any_top_k: bool = True, any_top_p: bool = True, any_min_p: bool = True,
) -> Tensor:  # fmt: skip
    """logits [T, V] float32, seats and index [T] int64, index: of the draft; the rest as for `accept`, by seat.

    → [T] int64, drawn with the stream DRAFT or, where the seat is coupled, DRAW; what they were drawn from is written to q [T, V] float32.
    All are coupled where `coupled` is None, and nobody asks what they were drawn from where q is. Of a greedy row, and of one whose largest
    number is not finite, that is the place of the largest number alone.
    """
    (rows, vocab), device = logits.shape, logits.device
    assert logits.dtype == torch.float32 and (q is None or (q.shape == logits.shape and q.stride(1) == 1)), (logits.dtype, logits.shape)
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    if not rows:
        return tokens
    nodes, seats, index = logits.contiguous().unsqueeze(1), seats.contiguous(), index.contiguous()
    cuts = top_k if any_top_k else None, top_p if any_top_p else None, min_p if any_min_p else None
    parts = chunks(nodes, seats, temperature, any(cut is not None for cut in cuts))
    cut_orders, totals = row_cuts(nodes, parts, seats, temperature, cuts)
    (block, number), q_stride = chunks_of(vocab), 0 if q is None else q.stride(0)
    winners = torch.empty(rows, 2, number, dtype=torch.int64, device=device)
    draw_kernel[(rows * number,)](
        nodes, seats, index, temperature, seed, coupled, parts.keys, parts.masses, cut_orders, totals, q, winners,
        arrival_counters("draw", rows, device), tokens, q_stride, V=vocab, BV=block, CHUNKS=number,
        num_warps=2 * WARPS,  # the noise of 16 numbers a thread does not fit its registers
    )  # fmt: skip
    return tokens
