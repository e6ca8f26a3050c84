"""The draws of sampled nodes: the cut that top_k, top_p and min_p make through a row, without sorting it, and a race along the row.

`race_kernel`, a program per chunk of a row, draws by a race: the largest of weight / exponential noise, the noise being a function of
(seed, index of the token, token) alone. Where drafts were drawn from a distribution q it also draws whether the draft is accepted, and a
token from max(p - q, 0) (Leviathan et al. 2023, https://arxiv.org/abs/2211.17192). `cut_kernel`, a program per row, runs where some
request has a cut: by bisection over the order of floats, three bits a pass, 11 passes over the largest numbers of each chunk (argmax.py).
No number besides these exceeds the bound of its chunk, so that a cut above all bounds is the row's. Another cut, of a flat distribution,
is looked for among all numbers of the row.

A row's mass is the sum over its chunks in their order, or, with a cut, the cut's own: it depends on nothing but the row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpserve_kernels.spec.argmax import WARPS, Chunks, chunks_of, is_finite, largest_key, number_of, ordered

STREAMS: tl.constexpr = tl.constexpr(3)
DRAFT: tl.constexpr = tl.constexpr(0)
COIN: tl.constexpr = tl.constexpr(1)
DRAW: tl.constexpr = tl.constexpr(2)
GOLDEN: tl.constexpr = tl.constexpr(-7046029254386353131)
FIRST: tl.constexpr = tl.constexpr(-4658895280553007687)
SECOND: tl.constexpr = tl.constexpr(-7723592293110705685)
NO_CUT: tl.constexpr = tl.constexpr(-2147483647)
NO_SPEED: tl.constexpr = tl.constexpr(-1)  # below the bits of every float64 that is not negative
PARTS: tl.constexpr = tl.constexpr(4)  # of a chunk: the bits of the winner's speed and its token, of p and of max(p - q, 0)


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
def random_key(seed, index, stream):
    return _finalise(_finalise((index * STREAMS + stream) * GOLDEN) ^ seed)


@triton.jit
def _scaled(p_row, o, V: tl.constexpr, top, inverse):
    b_x = tl.load(p_row + o, mask=o < V, other=float("-inf"))
    return (b_x - top) * inverse


@triton.jit
def _row_mass(p_keys, p_masses, i_row, top, inverse, CHUNKS: tl.constexpr):
    """Sum of exp((x - top) / temperature) over a row, of its chunks' sums."""
    o = tl.arange(0, triton.next_power_of_2(CHUNKS))
    m, p = o < CHUNKS, i_row.to(tl.int64) * CHUNKS + o
    b_key, b_mass = tl.load(p_keys + p, mask=m, other=0), tl.load(p_masses + p, mask=m, other=0.0)
    return tl.sum(tl.where(b_mass > 0, b_mass * tl.exp((number_of(b_key) - top) * inverse), 0.0))


@triton.jit
def _cut(p_row, top, inverse, least, limit, BY_MASS: tl.constexpr, V: tl.constexpr, BV: tl.constexpr):
    """The least cut c ≥ `least` (as an ordered int) such that what is above it is less than `limit`: a number of tokens, or, by mass, a
    sum of exp. Tokens at or above the cut stay, so that ties stay together."""
    # Scaled logits are not above 0, whose order is 0; the search is over c = least + offset.
    low, high = least.to(tl.int64), tl.full([], 0, tl.int64)
    for _ in range(11):
        step = (high - low) // 8 + 1
        o_pivot = tl.arange(0, 8)
        b_pivot = tl.minimum(low + o_pivot * step, high)
        b_above = tl.zeros([8], tl.float32)
        for i in range(tl.cdiv(V, BV)):
            b_s = _scaled(p_row, i * BV + tl.arange(0, BV), V, top, inverse)
            b_o = ordered(b_s).to(tl.int64)
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
def _cut_of_row(
    p_candidates, p_row, bound, top, inverse, least, limit, BY_MASS: tl.constexpr, N: tl.constexpr, BN: tl.constexpr, V: tl.constexpr,
    BV: tl.constexpr,
):  # fmt: skip
    """As _cut of the row: of its N candidates where that is above the bound of the others."""
    cut = _cut(p_candidates, top, inverse, least, limit, BY_MASS, N, BN)
    if cut <= bound:
        cut = _cut(p_row, top, inverse, least, limit, BY_MASS, V, BV)
    return cut


@triton.jit
def _sum_above(p_row, top, inverse, cut, V: tl.constexpr, BV: tl.constexpr):
    b_mass = tl.zeros([BV], tl.float32)
    for i in range(tl.cdiv(V, BV)):
        b_s = _scaled(p_row, i * BV + tl.arange(0, BV), V, top, inverse)
        b_mass += tl.where(ordered(b_s) >= cut, tl.exp(b_s), 0.0)
    return tl.sum(b_mass)


@triton.jit
def _mass_above(
    p_candidates, p_row, bound, top, inverse, cut, N: tl.constexpr, BN: tl.constexpr, V: tl.constexpr, BV: tl.constexpr
):  # fmt: skip
    """The row's sum of exp at or above the cut."""
    mass = _sum_above(p_candidates, top, inverse, cut, N, BN)
    if cut <= bound:
        mass = _sum_above(p_row, top, inverse, cut, V, BV)
    return mass


@triton.jit(do_not_specialize=["p_req_indices"])
def cut_kernel(
    p_logits, p_keys, p_masses, p_candidates, p_bounds, p_req_indices, p_temperature, p_top_k, p_top_p, p_min_p, p_cuts, p_totals,
    NODES: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, CHUNKS: tl.constexpr, N: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """A row's cut, as an ordered int, and the mass at or above it; of a greedy row neither is written. N candidates of a row. A cut's
    parameter is None where no request uses it."""
    i_row = tl.program_id(0)
    req_idx = tl.load(p_req_indices + i_row // NODES)
    temperature = tl.load(p_temperature + req_idx)
    key = largest_key(p_keys, i_row, CHUNKS)
    if is_finite(key) & (temperature > 0):
        p_row, p_some = p_logits + i_row.to(tl.int64) * V, p_candidates + i_row.to(tl.int64) * N
        top, inverse, cut = number_of(key), 1.0 / temperature, tl.full([], NO_CUT, tl.int32)
        o = tl.arange(0, triton.next_power_of_2(CHUNKS))
        b_bound = tl.load(p_bounds + i_row.to(tl.int64) * CHUNKS + o, mask=o < CHUNKS, other=float("-inf"))
        bound = ordered((tl.max(b_bound) - top) * inverse)
        mass = _row_mass(p_keys, p_masses, i_row, top, inverse, CHUNKS)
        if p_top_k is not None:
            top_k = tl.load(p_top_k + req_idx)
            if (top_k > 0) & (top_k < V):
                cut = _cut_of_row(p_some, p_row, bound, top, inverse, cut, top_k.to(tl.float32), False, N, BN, V, BV)
        if p_top_p is not None:
            top_p = tl.load(p_top_p + req_idx)
            if top_p < 1:
                above = mass
                if cut > NO_CUT:
                    above = _mass_above(p_some, p_row, bound, top, inverse, cut, N, BN, V, BV)
                cut = _cut_of_row(p_some, p_row, bound, top, inverse, cut, top_p * above, True, N, BN, V, BV)
        if p_min_p is not None:
            min_p = tl.load(p_min_p + req_idx)
            if min_p > 0:
                cut = tl.maximum(cut, ordered(tl.log(min_p)))
        if cut > NO_CUT:
            mass = _mass_above(p_some, p_row, bound, top, inverse, cut, N, BN, V, BV)
        tl.store(p_cuts + i_row, cut)
        tl.store(p_totals + i_row, mass)


@triton.jit
def cut_and_mass(p_cuts, p_totals, p_keys, p_masses, i_row, top, inverse, CHUNKS: tl.constexpr):
    """Of a sampled row: those of cut_kernel, or all of it where no request has a cut."""
    if p_cuts is not None:
        cut, mass = tl.load(p_cuts + i_row), tl.load(p_totals + i_row)
    else:
        cut, mass = tl.full([], NO_CUT, tl.int32), _row_mass(p_keys, p_masses, i_row, top, inverse, CHUNKS)
    return cut, mass


@triton.jit
def probabilities(p_row, o, top, inverse, cut, mass, V: tl.constexpr):
    b_s = _scaled(p_row, o, V, top, inverse)
    return tl.where((ordered(b_s) >= cut) & (o < V), tl.exp(b_s), 0.0) / mass


@triton.jit
def exponential_noise(base, o):
    """float64, of each token of the random_key `base`."""
    return -tl.log(1.0 - _uniform(_finalise(base + (o.to(tl.int64) + 1) * GOLDEN)))


@triton.jit
def store_winner(b_weight, b_noise, o, p_part, CHUNKS: tl.constexpr):
    """Stores the bits of the largest speed, and the first token that has it."""
    b_speed = tl.where(b_weight > 0, b_weight.to(tl.float64) / b_noise, -0.5)
    best = tl.max(b_speed)
    tl.store(p_part, best.to(tl.int64, bitcast=True))
    tl.store(p_part + CHUNKS, tl.min(tl.where(b_speed == best, o, 0x7FFFFFFF)).to(tl.int64))


@triton.jit(do_not_specialize=["p_drafts", "p_rows", "p_depths", "p_req_indices", "stride_depths"])
def race_kernel(
    p_logits, p_drafts, p_rows, p_depths, p_req_indices, p_length, p_temperature, p_seed, p_coupled, p_q, p_keys, p_masses, p_cuts,
    p_totals, p_winners, p_coins, stride_depths, stride_q, last_q, NODES: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    CHUNKS: tl.constexpr,
):  # fmt: skip
    """p_winners [T, PARTS, CHUNKS], of which a greedy row has none. p_coins [T]: whether the draft after a row's node is accepted, where
    drafts were drawn. p_depths is None for chains, p_q where no drafts were drawn, p_cuts and p_totals where no request has a cut."""
    i = tl.program_id(0)
    i_row, chunk = i // CHUNKS, i % CHUNKS
    r, node = i_row // NODES, i_row % NODES
    req_idx = tl.load(p_req_indices + r)
    temperature, key = tl.load(p_temperature + req_idx), largest_key(p_keys, i_row, CHUNKS)
    if is_finite(key) & (temperature > 0):
        p_row, top, inverse = p_logits + i_row.to(tl.int64) * V, number_of(key), 1.0 / temperature
        cut, mass = cut_and_mass(p_cuts, p_totals, p_keys, p_masses, i_row, top, inverse, CHUNKS)
        at = node.to(tl.int64)
        if p_depths is not None:
            at = tl.load(p_depths + r * stride_depths + node)
        seed, index = tl.load(p_seed + req_idx), tl.load(p_length + req_idx) + at
        p_part = p_winners + i_row.to(tl.int64) * PARTS * CHUNKS + chunk
        if p_q is not None:
            has_q = (tl.load(p_coupled + req_idx) == 0) & (node < last_q)
            p_node_q = p_q + req_idx * stride_q + node * V
            if has_q:
                # After the request's own drafts there may be anything.
                draft = tl.minimum(tl.maximum(_draft(p_drafts, p_rows, r, node, NODES), 0), V - 1)
                if draft // BV == chunk:
                    s = (tl.load(p_row + draft) - top) * inverse
                    p = tl.where(ordered(s) >= cut, tl.exp(s), 0.0) / mass
                    coin = _uniform(random_key(seed, index, COIN)) * tl.load(p_node_q + draft).to(tl.float64) < p.to(tl.float64)
                    tl.store(p_coins + i_row, coin.to(tl.int32))
            elif chunk == 0:
                tl.store(p_coins + i_row, 0)
        chunk_top = number_of(tl.load(p_keys + i))
        if ordered((chunk_top - top) * inverse) >= cut:
            o = chunk * BV + tl.arange(0, BV)
            b_p, b_noise = probabilities(p_row, o, top, inverse, cut, mass, V), exponential_noise(random_key(seed, index, DRAW), o)
            store_winner(b_p, b_noise, o, p_part, CHUNKS)
            if p_q is not None:
                b_q = tl.load(p_node_q + o, mask=(o < V) & (o < tl.where(has_q, V, 0)), other=0.0)
                store_winner(b_p - b_q, b_noise, o, p_part + 2 * CHUNKS, CHUNKS)
        else:
            tl.store(p_part, NO_SPEED)
            if p_q is not None:
                tl.store(p_part + 2 * CHUNKS, NO_SPEED)


@triton.jit
def _draft(p_drafts, p_rows, r, node, NODES: tl.constexpr):
    """The draft after `node`, of a request that has one."""
    if p_rows is not None:
        token = tl.load(p_drafts + tl.load(p_rows + r * NODES + node + 1))
    else:
        token = tl.load(p_drafts + r * (NODES - 1) + node)
    return token


def row_cuts(
    logits: Tensor, parts: Chunks, seats: Tensor, temperature: Tensor, cuts: tuple[Tensor | None, Tensor | None, Tensor | None]
) -> tuple[Tensor | None, Tensor | None]:
    """logits [R, nodes, V], `cuts`: top_k, top_p and min_p of each seat, None where no request uses it.
    → cuts and totals [R * nodes], as cut_kernel has them; None where no request has a cut."""
    (_, nodes, vocab), rows, device = logits.shape, len(parts.keys), logits.device
    if parts.candidates is None:
        return None, None
    cut_orders, totals = torch.empty(rows, dtype=torch.int32, device=device), torch.empty(rows, device=device)
    (block, number), candidates = chunks_of(vocab), parts.candidates[0].numel()
    cut_kernel[(rows,)](
        logits, parts.keys, parts.masses, parts.candidates, parts.bounds, seats, temperature, *cuts, cut_orders, totals, NODES=nodes,
        V=vocab, BV=cut_block(block), CHUNKS=number, N=candidates, BN=cut_block(triton.next_power_of_2(candidates)), num_warps=WARPS,
    )  # fmt: skip
    return cut_orders, totals


def cut_block(numbers: int) -> int:
    """Of so many numbers, those that a pass of cut_kernel takes at a time."""
    return min(numbers, 2048 if torch.version.hip is None else 1024)
