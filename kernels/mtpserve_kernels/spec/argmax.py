"""The largest number of each row of logits, and its first place: a program per CHUNK of a row.

A program leaves one key for its chunk, an int64 that orders numbers and, among equal ones, puts the smaller place higher:

    bits 63 … 32    the float32 as an int32 of the same order; NaN is above all
    bits 30 … 0     2^31 - 1 - place

The largest key of a row says all that torch.argmax does, in whatever order keys are compared. `argmax` leaves that to the row's last
program (arrivals.py); a verdict's walk (accept.py) compares them itself.

For rows that are sampled it also sums a chunk's exponentials, and where a cut is looked for (race.py) it picks a chunk's CANDIDATES largest
numbers, or some less, with a bound that no other number of the chunk exceeds.

Moves T V numbers, and T V / CHUNK keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpserve_kernels.arrivals import arrival_counters

CHUNK = 4096  # numbers of a program. Sums over a row are made of its chunks' sums, so that it follows from nothing
WARPS = 8
CANDIDATES = 64  # of a chunk, at most
SEARCHES: tl.constexpr = tl.constexpr(8)  # for a chunk's bound, each among eight numbers

LAST_PLACE: tl.constexpr = tl.constexpr(0x7FFFFFFF)
NAN_ORDER: tl.constexpr = tl.constexpr(0x7FFFFFFF)
LEAST_KEY: tl.constexpr = tl.constexpr(-0x7FFFFFFFFFFFFFFF)
INFINITY_ORDER: tl.constexpr = tl.constexpr(0x7F800000)
LEAST_ORDER: tl.constexpr = tl.constexpr(-0x7F800001)  # of minus infinity


@triton.jit
def ordered(b_x):
    """float32 as int32 of the same order; not of NaN."""
    b_bits = b_x.to(tl.int32, bitcast=True)
    return tl.where(b_bits < 0, b_bits ^ 0x7FFFFFFF, b_bits)


@triton.jit
def number_of(key):
    """The float32 of a key."""
    order = (key >> 32).to(tl.int32)
    return tl.where(order < 0, order ^ 0x7FFFFFFF, order).to(tl.float32, bitcast=True)


@triton.jit
def place_of(key):
    """int64"""
    return (key & LAST_PLACE) ^ LAST_PLACE


@triton.jit
def is_finite(key):
    order = key >> 32
    return (order > LEAST_ORDER) & (order < INFINITY_ORDER)


@triton.jit
def largest_key(p_keys, i_row, CHUNKS: tl.constexpr):
    """Of a row, whose keys other programs have written."""
    o = tl.arange(0, triton.next_power_of_2(CHUNKS))
    return tl.max(tl.load(p_keys + i_row.to(tl.int64) * CHUNKS + o, mask=o < CHUNKS, other=LEAST_KEY, volatile=True))


@triton.jit
def _larger(x, y):
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _bound(b_x, largest, CANDIDATES: tl.constexpr):
    """A number that at most CANDIDATES of b_x exceed, and, but for many equal ones, a quarter of that at least. The search is over numbers,
    not over their bits: those of a row lie so that two or three steps suffice."""
    low, high = tl.min(tl.where(b_x > float("-inf"), b_x, largest)), largest
    number, search = tl.full([], 0, tl.int32), tl.full([], 0, tl.int32)
    o_pivot = tl.arange(0, 8)
    if tl.sum((b_x > float("-inf")).to(tl.int32)) <= CANDIDATES:
        high = tl.full([], float("-inf"), tl.float32)
        search += SEARCHES
    while (search < SEARCHES) & (number < CANDIDATES // 4):
        b_pivot = low + o_pivot * (high / 8 - low / 8)
        b_number = tl.sum((b_x[None, :] > b_pivot[:, None]).to(tl.int32), 1)
        first = tl.min(tl.where(b_number <= CANDIDATES, o_pivot, 8))
        number = tl.sum(tl.where(o_pivot == first, b_number, 0))
        # What was counted, and not computed anew: a rounding would matter.
        high = tl.where(first < 8, tl.sum(tl.where(o_pivot == first, b_pivot, 0.0)), high)
        low = tl.where(first > 0, tl.sum(tl.where(o_pivot == first - 1, b_pivot, 0.0)), low)
        search += 1
    return high


@triton.jit(do_not_specialize=["p_req_indices"])
def argmax_kernel(
    p_logits, p_keys, p_masses, p_candidates, p_bounds, p_req_indices, p_temperature, p_arrivals, p_places, stride, NODES: tl.constexpr,
    V: tl.constexpr, BV: tl.constexpr, CHUNKS: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Program i has chunk i % CHUNKS of row i // CHUNKS. Where the row's request, one of NODES rows, has a temperature: p_masses, the sum
    of exp((x - the chunk's largest) / temperature), p_candidates [T, CHUNKS, CANDIDATES], minus infinity after the last one, and p_bounds;
    or None. p_arrivals and p_places: as `argmax`, or None."""
    i = tl.program_id(0)
    i_row, chunk = i // CHUNKS, i % CHUNKS
    o = chunk * BV + tl.arange(0, BV)
    b_x = tl.load(p_logits + i_row.to(tl.int64) * stride + o, mask=o < V, other=float("-inf")).to(tl.float32)
    # The number first, then its place: a key for each number would take three times the instructions.
    top = tl.reduce(b_x, 0, _larger)
    order = tl.where(top == top, ordered(tl.where(top == 0, 0.0, top)), NAN_ORDER)  # -0 equals 0
    if top == top:
        place = tl.min(tl.where(b_x == top, o, LAST_PLACE))
    else:
        place = tl.min(tl.where(b_x != b_x, o, LAST_PLACE))
    key = (order.to(tl.int64) << 32) | (place ^ LAST_PLACE).to(tl.int64)
    tl.store(p_keys + i, key)
    if p_masses is not None:
        temperature = tl.load(p_temperature + tl.load(p_req_indices + i_row // NODES))
        if temperature > 0:
            inverse = 1.0 / temperature
            b_weight = tl.where(b_x > float("-inf"), tl.exp((b_x - top) * inverse), 0.0)
            tl.store(p_masses + i, tl.sum(b_weight))
            if p_candidates is not None:
                bound = _bound(b_x, top, CANDIDATES)
                b_is_above = (b_x > bound).to(tl.int32)
                o_slot, p_slots = tl.arange(0, CANDIDATES), p_candidates + i.to(tl.int64) * CANDIDATES
                tl.store(p_slots + tl.cumsum(b_is_above, 0) - 1, b_x, mask=b_is_above > 0)
                tl.store(p_slots + o_slot, float("-inf"), mask=o_slot >= tl.sum(b_is_above))
                tl.store(p_bounds + i, bound)
    if p_places is not None:
        if CHUNKS == 1:
            tl.store(p_places + i_row, place_of(key))
        else:
            tl.debug_barrier()  # the key is written before it is counted
            if tl.atomic_add(p_arrivals + i_row, 1, sem="acq_rel") == CHUNKS - 1:
                tl.store(p_arrivals + i_row, 0)
                tl.store(p_places + i_row, place_of(largest_key(p_keys, i_row, CHUNKS)))


def chunks_of(vocab: int) -> tuple[int, int]:
    """→ numbers of a chunk, chunks of a row."""
    block = min(CHUNK, triton.next_power_of_2(vocab))
    return block, triton.cdiv(vocab, block)


@dataclass(frozen=True, slots=True)
class Chunks:
    """What argmax_kernel has of each chunk of T rows."""

    keys: Tensor  # [T, chunks] int64
    masses: Tensor | None  # [T, chunks] float32, where rows are sampled
    candidates: Tensor | None  # [T, chunks, CANDIDATES] float32, and
    bounds: Tensor | None  # [T, chunks] float32, where some have cuts

    @property
    def number(self) -> int:
        """Of a row."""
        return self.keys.shape[1]


def chunks(logits: Tensor, seats: Tensor, temperature: Tensor | None, has_cuts: bool) -> Chunks:
    """logits [R, nodes, V] float32, contiguous, seats [R], temperature of each seat or None: no row is sampled."""
    requests, nodes, vocab = logits.shape
    (block, number), rows = chunks_of(vocab), requests * nodes
    options: dict[str, Any] = {"device": logits.device}
    keys, masses, candidates, bounds = torch.empty(rows, number, dtype=torch.int64, **options), None, None, None
    if temperature is None:
        nodes = 1  # it would only make variants of the kernel
    else:
        masses = torch.empty(rows, number, **options)
        candidates = torch.empty(rows, number, CANDIDATES, **options) if has_cuts else None
        bounds = torch.empty(rows, number, **options) if has_cuts else None
    argmax_kernel[(rows * number,)](
        logits, keys, masses, candidates, bounds, None if temperature is None else seats, temperature, None, None, vocab, NODES=nodes,
        V=vocab, BV=block, CHUNKS=number, CANDIDATES=CANDIDATES, num_warps=WARPS,
    )  # fmt: skip
    return Chunks(keys, masses, candidates, bounds)


def argmax(logits: Tensor) -> Tensor:
    """logits [T, V] of any float type up to 32 bits, contiguous rows → [T] int64, as torch.argmax: the first of equal ones, or of NaN."""
    rows, vocab = logits.shape
    assert vocab > 0 and logits.stride(1) == 1 and logits.is_floating_point() and logits.itemsize <= 4, (logits.shape, logits.stride())
    places = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if not rows:
        return places
    block, number = chunks_of(vocab)
    keys = torch.empty(rows, number, dtype=torch.int64, device=logits.device)
    arrivals = arrival_counters("argmax", rows, logits.device) if number > 1 else None
    argmax_kernel[(rows * number,)](
        logits, keys, None, None, None, None, None, arrivals, places, logits.stride(0), NODES=1, V=vocab, BV=block, CHUNKS=number,
        CANDIDATES=CANDIDATES, num_warps=WARPS,
    )  # fmt: skip
    return places
