"""Acceptance, chain or tree: every node's choice, then the walk along the choices that were drafted.

`choose_kernel`, a program per node, finds the cut that top_k, top_p and min_p make through its logits without sorting them, and draws
by a race: the largest of weight / exponential noise, the noise being a function of (seed, index of the token, token) alone. Where
drafts were drawn from a distribution q it also draws whether the draft is accepted, and a token from max(p - q, 0) (Leviathan et al.
2023, https://arxiv.org/abs/2211.17192). `walk_kernel`, a program per request, follows the choices from the root.

The cut is found by bisection over the order of floats, three bits a pass: 11 passes over a row that stays in the processor's cache.
Moves T V numbers from memory once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

STREAMS: tl.constexpr = tl.constexpr(3)
DRAW: tl.constexpr = tl.constexpr(2)
COIN: tl.constexpr = tl.constexpr(1)
GOLDEN: tl.constexpr = tl.constexpr(-7046029254386353131)
FIRST: tl.constexpr = tl.constexpr(-4658895280553007687)
SECOND: tl.constexpr = tl.constexpr(-7723592293110705685)


@triton.jit
def _shifted(x, bits: tl.constexpr):
    """Logical shift: the sign does not follow."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


@triton.jit
def _finalise(x):
    x = (x ^ _shifted(x, 30)) * FIRST
    x = (x ^ _shifted(x, 27)) * SECOND
    return x ^ _shifted(x, 31)


@triton.jit
def _uniform(bits):
    return (_shifted(bits, 12).to(tl.float64) + 0.5) * 2.220446049250313e-16


@triton.jit
def _key(seed, index, stream: tl.constexpr):
    return _finalise(_finalise((index * STREAMS + stream) * GOLDEN) ^ seed)


@triton.jit
def _ordered(b_x):
    """float32 as int32 of the same order."""
    b_bits = b_x.to(tl.int32, bitcast=True)
    return tl.where(b_bits < 0, b_bits ^ 0x7FFFFFFF, b_bits)


@triton.jit
def _scaled(p_row, o, V: tl.constexpr, top, inverse):
    b_x = tl.load(p_row + o, mask=o < V, other=float("-inf"))
    return (b_x - top) * inverse


@triton.jit
def _cut(p_row, top, inverse, least, limit, BY_MASS: tl.constexpr, V: tl.constexpr, BV: tl.constexpr):
    """The least cut c ≥ `least` (as an ordered int) such that what is above it is less than `limit`: a number of tokens, or, by mass, a
    sum of exp. Tokens at or above the cut are kept, so that ties stay together."""
    # Scaled logits are not above 0, whose order is 0; the search is over c = least + offset.
    low, high = least.to(tl.int64), tl.full([], 0, tl.int64)
    for _ in range(11):
        step = (high - low) // 8 + 1
        o_pivot = tl.arange(0, 8)
        b_pivot = tl.minimum(low + o_pivot * step, high)
        b_above = tl.zeros([8], tl.float32)
        for i in range(tl.cdiv(V, BV)):
            b_s = _scaled(p_row, i * BV + tl.arange(0, BV), V, top, inverse)
            b_o = _ordered(b_s).to(tl.int64)
            if BY_MASS:
                b_w = tl.where(b_o >= least, tl.exp(b_s), 0.0)
            else:
                b_w = tl.where(b_s > float("-inf"), 1.0, 0.0)
            b_above += tl.sum(tl.where(b_o[None, :] > b_pivot[:, None], b_w[None, :], 0.0), 1)
        # The first pivot that holds is the new upper end, the one before it the new lower.
        b_holds = b_above < limit
        first = tl.min(tl.where(b_holds, o_pivot, 8))
        new_high = tl.where(first == 8, high, tl.minimum(low + first * step, high))
        low = tl.where(first == 0, low, tl.minimum(low + (first - 1) * step + 1, new_high))
        high = new_high
    return high.to(tl.int32)


@triton.jit
def choose_kernel(
    p_logits, p_drafts, p_depths, p_seats, p_length, p_temperature, p_top_k, p_top_p, p_min_p, p_seed, p_coupled, p_q,
    p_chosen, p_rest, p_kept, p_fine, stride_depths, stride_q, last_q, NODES: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """p_depths is None for chains, p_q where no drafts were drawn, a cut's parameter where no request uses it."""
    i_row = tl.program_id(0)
    r, node = i_row // NODES, i_row % NODES
    seat = tl.load(p_seats + r)
    p_row = p_logits + i_row.to(tl.int64) * V
    temperature = tl.load(p_temperature + seat)
    at = node.to(tl.int64)
    if p_depths is not None:
        at = tl.load(p_depths + r * stride_depths + node)
    # The largest and its first place; whether there is a NaN.
    b_top, b_where, b_nan = tl.full([BV], float("-inf"), tl.float32), tl.zeros([BV], tl.int32), tl.zeros([BV], tl.int32)
    for i in range(tl.cdiv(V, BV)):
        o = i * BV + tl.arange(0, BV)
        b_x = tl.load(p_row + o, mask=o < V, other=float("-inf"))
        b_nan = tl.where(b_x != b_x, 1, b_nan)
        b_more = b_x > b_top
        b_where = tl.where(b_more, o, b_where)
        b_top = tl.where(b_more, b_x, b_top)
    top = tl.max(b_top)
    first = tl.min(tl.where(b_top == top, b_where, V - 1))
    fine = (tl.max(b_nan) == 0) & (top > float("-inf")) & (top < float("inf"))
    tl.store(p_fine + i_row, tl.where(fine, 1, 0))
    tl.store(p_chosen + i_row, first.to(tl.int64))
    tl.store(p_rest + i_row, first.to(tl.int64))
    tl.store(p_kept + i_row, 0)
    if fine & (temperature > 0):
        inverse = 1.0 / temperature
        cut = tl.full([], -2147483647, tl.int32)
        if p_top_k is not None:
            top_k = tl.load(p_top_k + seat)
            if (top_k > 0) & (top_k < V):
                cut = _cut(p_row, top, inverse, cut, top_k.to(tl.float32), False, V, BV)
        # All sums take the same passes, so that a cut that is not used does not change them.
        b_mass = tl.zeros([BV], tl.float32)
        for i in range(tl.cdiv(V, BV)):
            b_s = _scaled(p_row, i * BV + tl.arange(0, BV), V, top, inverse)
            b_mass += tl.where(_ordered(b_s) >= cut, tl.exp(b_s), 0.0)
        if p_top_p is not None:
            top_p = tl.load(p_top_p + seat)
            if top_p < 1:
                cut = _cut(p_row, top, inverse, cut, top_p * tl.sum(b_mass), True, V, BV)
        if p_min_p is not None:
            min_p = tl.load(p_min_p + seat)
            if min_p > 0:
                cut = tl.maximum(cut, _ordered(tl.log(min_p)))
        b_mass = tl.zeros([BV], tl.float32)
        for i in range(tl.cdiv(V, BV)):
            b_s = _scaled(p_row, i * BV + tl.arange(0, BV), V, top, inverse)
            b_mass += tl.where(_ordered(b_s) >= cut, tl.exp(b_s), 0.0)
        mass = tl.sum(b_mass)
        seed, index = tl.load(p_seed + seat), tl.load(p_length + seat) + at
        base = _key(seed, index, DRAW)
        drawn = False
        if p_q is not None:
            drawn = (tl.load(p_coupled + seat) == 0) & (node < last_q)
        b_best, b_token = tl.full([BV], -1.0, tl.float64), tl.zeros([BV], tl.int32)
        b_best_rest, b_token_rest = tl.full([BV], -1.0, tl.float64), tl.zeros([BV], tl.int32)
        for i in range(tl.cdiv(V, BV)):
            o = i * BV + tl.arange(0, BV)
            b_s = _scaled(p_row, o, V, top, inverse)
            b_p = tl.where((_ordered(b_s) >= cut) & (o < V), tl.exp(b_s), 0.0) / mass
            b_noise = -tl.log(1.0 - _uniform(_finalise(base + (o.to(tl.int64) + 1) * GOLDEN)))
            b_speed = tl.where(b_p > 0, b_p.to(tl.float64) / b_noise, -0.5)
            b_more = b_speed > b_best
            b_token = tl.where(b_more, o, b_token)
            b_best = tl.where(b_more, b_speed, b_best)
            if p_q is not None:
                b_q = tl.load(p_q + seat * stride_q + node * V + o, mask=(o < V) & (o < tl.where(drawn, V, 0)), other=0.0)
                b_over = b_p - b_q
                b_speed_rest = tl.where(b_over > 0, b_over.to(tl.float64) / b_noise, -0.5)
                b_more_rest = b_speed_rest > b_best_rest
                b_token_rest = tl.where(b_more_rest, o, b_token_rest)
                b_best_rest = tl.where(b_more_rest, b_speed_rest, b_best_rest)
        best = tl.max(b_best)
        chosen = tl.min(tl.where(b_best == best, b_token, V - 1))
        tl.store(p_chosen + i_row, chosen.to(tl.int64))
        if p_q is not None:
            best_rest = tl.max(b_best_rest)
            rest = tl.min(tl.where(b_best_rest == best_rest, b_token_rest, V - 1))
            # p = q up to rounding leaves nothing over; then the rejection was rounding too, and p itself is the law.
            tl.store(p_rest + i_row, tl.where(best_rest > 0, rest, chosen).to(tl.int64))
            if drawn:
                # After the request's own drafts there may be anything.
                draft = tl.minimum(tl.maximum(tl.load(p_drafts + r * (NODES - 1) + node), 0), V - 1)
                s = (tl.load(p_row + draft) - top) * inverse
                p = tl.where(_ordered(s) >= cut, tl.exp(s), 0.0) / mass
                q = tl.load(p_q + seat * stride_q + node * V + draft)
                coin = _uniform(_key(seed, index, COIN))
                tl.store(p_kept + i_row, tl.where(coin * q.to(tl.float64) < p.to(tl.float64), 1, 0))


@triton.jit
def walk_kernel(
    p_drafts, p_count, p_parents, p_seats, p_temperature, p_coupled, p_chosen, p_rest, p_kept, p_fine,
    p_tokens, p_accepted, p_path, p_failed, stride_parents, NODES: tl.constexpr, DEPTH: tl.constexpr, DRAWN: tl.constexpr,
):  # fmt: skip
    """p_parents is None for chains."""
    r = tl.program_id(0)
    seat = tl.load(p_seats + r)
    o = tl.arange(0, triton.next_power_of_2(NODES))
    count = tl.minimum(tl.load(p_count + r), NODES - 1)
    m = o < count
    b_draft = tl.load(p_drafts + r * (NODES - 1) + o, mask=m, other=-1)
    b_parent = o.to(tl.int64)
    if p_parents is not None:
        b_parent = tl.load(p_parents + r * stride_parents + o, mask=m, other=-1)
    drawn = tl.full([], 0, tl.int32)
    if DRAWN:
        drawn = tl.where((tl.load(p_temperature + seat) > 0) & (tl.load(p_coupled + seat) == 0), 1, 0)
    node, accepted = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
    going, failed = tl.full([], 1, tl.int32), tl.full([], 0, tl.int32)
    for at in range(DEPTH + 1):
        i_row = r * NODES + node
        fine = tl.load(p_fine + i_row)
        chosen = tl.load(p_chosen + i_row)
        b_next = m & (b_parent == node) & (b_draft == chosen)
        child = tl.max(tl.where(b_next, o + 1, 0))
        if DRAWN:
            has_draft = node < count
            kept = has_draft & (tl.load(p_kept + i_row) > 0) & (at < DEPTH)
            draft = tl.load(p_drafts + r * (NODES - 1) + node, mask=node < count, other=0)
            rest = tl.where(has_draft & (at < DEPTH), tl.load(p_rest + i_row), chosen)
            child = tl.where(drawn > 0, tl.where(kept, node.to(tl.int32) + 1, 0), child)
            chosen = tl.where(drawn > 0, tl.where(kept, draft, rest), chosen)
        if at == DEPTH:
            child = child * 0
        failed = tl.where((going > 0) & (fine == 0), 1, failed)
        # After the end all is void, but a path repeats its last node.
        tl.store(p_tokens + r * (DEPTH + 1) + at, chosen)
        tl.store(p_path + r * (DEPTH + 1) + at, node)
        going = tl.where((child > 0) & (fine > 0), going, 0)
        accepted = accepted + going
        node = tl.where(going > 0, child.to(tl.int64), node)
    tl.store(p_accepted + r, accepted)
    tl.store(p_failed + r, failed)


def accept(
    logits: Tensor, drafts: Tensor, draft_count: Tensor, parents: Tensor | None, depths: Tensor | None, seats: Tensor, length: Tensor,
    temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, seed: Tensor, coupled: Tensor, draft_probs: Tensor | None,
    depth: int, *, any_top_k: bool = True, any_top_p: bool = True, any_min_p: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """logits [R, K+1, V] float32, drafts [R, K], draft_count [R], parents [R, K] and depths [R, K+1] of a tree or None for chains,
    seats [R]: int64. Per seat: length, temperature (0 is greedy), top_k (0 is off), top_p, min_p, seed, coupled (its drafts are point
    masses; else they are a chain drawn from draft_probs [seats, K', V]; None: all are coupled).

    → tokens [R, depth+1], accepted [R], path [R, depth+1] int64, failed [R] bool: a node on the path had no finite largest logit.
    """
    requests, nodes, vocab = logits.shape
    assert logits.is_contiguous() and logits.dtype == torch.float32 and drafts.shape == (requests, nodes - 1), (logits.shape, drafts.shape)
    drafts, q = drafts.contiguous(), draft_probs if nodes > 1 else None
    assert q is None or (q.shape[2] == vocab and q.stride(1) == vocab and q.stride(2) == 1), (q.shape, q.stride())
    device = logits.device
    chosen, rest = (torch.empty(requests, nodes, dtype=torch.int64, device=device) for _ in range(2))
    kept, fine = (torch.empty(requests, nodes, dtype=torch.int32, device=device) for _ in range(2))
    tokens = torch.empty(requests, depth + 1, dtype=torch.int64, device=device)
    path, accepted = torch.empty_like(tokens), torch.empty(requests, dtype=torch.int64, device=device)
    failed = torch.empty(requests, dtype=torch.int32, device=device)
    block = min(4096 if torch.version.hip is None else 1024, triton.next_power_of_2(vocab))
    q_stride, drawn_nodes = (0, 0) if q is None else (q.stride(0), min(q.shape[1], nodes - 1))
    choose_kernel[(requests * nodes,)](
        logits, drafts, depths, seats, length, temperature, top_k if any_top_k else None, top_p if any_top_p else None,
        min_p if any_min_p else None, seed, coupled, q, chosen, rest, kept, fine, 0 if depths is None else depths.stride(0), q_stride,
        drawn_nodes, NODES=nodes, V=vocab, BV=block, num_warps=8,
    )  # fmt: skip
    walk_kernel[(requests,)](
        drafts, draft_count, parents, seats, temperature, coupled, chosen, rest, kept, fine, tokens, accepted, path, failed,
        0 if parents is None else parents.stride(0), NODES=nodes, DEPTH=depth, DRAWN=q is not None, num_warps=1,
    )  # fmt: skip
    return tokens, accepted, path, failed != 0
