"""Rows grouped by expert, for more rows than one tile: what vLLM's and SGLang's moe_align_block_size makes, in one launch.

Among many rows an expert has few. A tile has BT rows of one expert, so that its weights are multiplied with rows that chose it alone:

    tiles [number, 1 + BT] int32   expert | row * (K + shared) + place of a row that chose it | … | -1 where there is none
                                   or -1  | nothing

Numbers of shared experts follow those of the others; their tiles come first. A routed expert's first tile is number
(assignments of experts before it) // BT + (experts before it): room enough for all tiles before it whatever their rows are, so that a
program counts for one expert alone and need not wait for others. The bound on the tiles, rows * K // BT + experts, follows from shapes:
a captured graph holds for all choices. Rows of an expert are in their order.

Programs of one tile follow one another, and tiles of one expert do: weights come from memory once, and after that from the cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpserve_kernels.arrivals import arrival_counters

MAX_ROWS = 64  # of one tile: as many rows need no groups, weights are read once anyway
CHUNK = 4096  # assignments that a program looks at together
SLOTS = tl.constexpr(256)  # tiles that are marked together


@triton.jit
def _local(p_chosen, o_a, number_of_assignments, FIRST: tl.constexpr):
    """Experts of these assignments, of which 0 to E - 1 are here."""
    b_number = tl.load(p_chosen + o_a, mask=o_a < number_of_assignments, other=-1).to(tl.int32)
    if FIRST is not None:
        b_number -= FIRST
    return b_number


@triton.jit(do_not_specialize=["rows", "number_of_tiles"])
def align_kernel(
    p_chosen, p_tiles, rows, number_of_tiles, E: tl.constexpr, SHARED: tl.constexpr, FIRST: tl.constexpr, K: tl.constexpr,
    BT: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    expert, o_chunk = tl.program_id(0), tl.arange(0, CHUNK)
    shared_tiles = tl.cdiv(rows, BT)  # of each
    total = rows * K
    count, start, end = rows, (expert - E) * shared_tiles, (expert - E + 1) * shared_tiles
    if expert < E:
        before = tl.zeros([], tl.int32)
        for i in range(tl.cdiv(total, CHUNK)):
            b_number = _local(p_chosen, i * CHUNK + o_chunk, total, FIRST)
            before += tl.sum(((b_number >= 0) & (b_number < expert)).to(tl.int32))
        start = SHARED * shared_tiles + before // BT + expert
        count = tl.zeros([], tl.int32)
        for i in range(tl.cdiv(total, CHUNK)):
            o_a = i * CHUNK + o_chunk
            b_match = (_local(p_chosen, o_a, total, FIRST) == expert).to(tl.int32)
            b_rank = count + tl.cumsum(b_match, 0) - b_match
            b_part = o_a // K * (K + SHARED) + o_a % K
            tl.store(p_tiles + (start + b_rank // BT) * (BT + 1) + 1 + b_rank % BT, b_part, mask=b_match > 0)
            count += tl.sum(b_match)
        end = SHARED * shared_tiles + (before + count) // BT + expert + 1
        if expert == E - 1:
            end = number_of_tiles
    else:
        for i in range(tl.cdiv(rows, CHUNK)):
            o_t = i * CHUNK + o_chunk
            b_part = o_t * (K + SHARED) + K + expert - E
            tl.store(p_tiles + (start + o_t // BT) * (BT + 1) + 1 + o_t % BT, b_part, mask=o_t < rows)
    used = tl.cdiv(count, BT)
    o_rest = count + tl.arange(0, BT)
    tl.store(p_tiles + (start + o_rest // BT) * (BT + 1) + 1 + o_rest % BT, -1, mask=o_rest < used * BT)
    for i in range(tl.cdiv(end - start, SLOTS)):
        o_tile = start + i * SLOTS + tl.arange(0, SLOTS)
        tl.store(p_tiles + o_tile * (BT + 1), tl.where(o_tile < start + used, expert, -1), mask=o_tile < end)


@triton.jit
def _hits(p_chosen, o_t, expert, rows, E: tl.constexpr, FIRST: tl.constexpr, K: tl.constexpr):
    """Which rows of the tile chose this expert, and in which of their K places. Every row has chosen a shared expert."""
    BK: tl.constexpr = triton.next_power_of_2(K)
    o_k = tl.arange(0, BK)
    m = (o_t < rows)[:, None] & (o_k < K)[None, :]
    number = expert
    if FIRST is not None:
        number = tl.where(expert < E, FIRST + expert, -2)  # a shared one has no number that somebody else's could have
    b_match = tl.load(p_chosen + o_t[:, None] * K + o_k[None, :], mask=m, other=-1) == number
    beyond = tl.where(expert >= E, 1, 0)
    b_hits = tl.sum(b_match.to(tl.int32), 1) + beyond
    b_place = tl.sum(tl.where(b_match, o_k[None, :], 0), 1)
    return (b_hits > 0) & (o_t < rows), b_place + beyond * (K + expert - E)


@triton.jit
def tile_rows(
    p_chosen, p_tiles, rows, E: tl.constexpr, SHARED: tl.constexpr, FIRST: tl.constexpr, K: tl.constexpr, BT: tl.constexpr
):  # fmt: skip
    """A program's work: the expert, the number of its tile of columns, rows [BT], their places among K + SHARED, which of them there are,
    and whether there is one. Without p_tiles rows follow one another, and those count that chose the expert: the grid is (row tiles,
    experts, columns). With them it is (columns, tiles)."""
    o_b = tl.arange(0, BT)
    if p_tiles is None:
        expert, i_n = tl.program_id(1), tl.program_id(2)
        o_t = tl.program_id(0) * BT + o_b
        b_hit, b_place = _hits(p_chosen, o_t, expert, rows, E, FIRST, K)
        is_hit = tl.sum(b_hit.to(tl.int32)) > 0
    else:
        i_n = tl.program_id(0)
        p_tile = p_tiles + tl.program_id(1) * (BT + 1)
        expert = tl.load(p_tile)
        b_part = tl.load(p_tile + 1 + o_b)  # both loads at once: without an expert these numbers mean nothing
        is_hit = expert >= 0
        b_hit = tl.where(is_hit, b_part, -1) >= 0
        b_part = tl.maximum(b_part, 0)
        o_t, b_place = b_part // (K + SHARED), b_part % (K + SHARED)
    return expert, i_n, o_t, b_place, b_hit, is_hit


@triton.jit
def sum_kernel(
    p_parts, p_chosen, p_out, H: tl.constexpr, E: tl.constexpr, SHARED: tl.constexpr, FIRST: tl.constexpr, K: tl.constexpr,
    BH: tl.constexpr,
):  # fmt: skip
    i_t, o_h = tl.program_id(0).to(tl.int64), tl.program_id(1) * BH + tl.arange(0, BH)
    b_sum = tl.zeros([BH], tl.float32)
    for k in tl.static_range(K + SHARED):
        m = o_h < H
        if FIRST is not None:
            if k < K:  # nobody has written the parts of experts that are elsewhere
                number = tl.load(p_chosen + i_t * K + k) - FIRST
                m = o_h < tl.where((number >= 0) & (number < E), H, 0)
        b_sum += tl.load(p_parts + (i_t * (K + SHARED) + k) * H + o_h, mask=m, other=0.0)
    tl.store(p_out + i_t * H + o_h, b_sum.to(p_out.dtype.element_ty), mask=o_h < H)


def tile_size(rows: int, top: int, number: int, largest: int) -> int:
    """Rows of a tile: most experts have one tile if it is a third larger than their share."""
    share = triton.cdiv(4 * rows * top, 3 * number)
    return min(largest, max(16, int(triton.next_power_of_2(share))))


def align(chosen: Tensor, number: int, shared: int, first: int | None, BT: int) -> Tensor:
    """See reference.align."""
    rows, top = chosen.shape
    assert chosen.is_contiguous() and triton.next_power_of_2(BT) == BT, (chosen.stride(), BT)
    number_of_tiles = rows * top // BT + number + shared * triton.cdiv(rows, BT)
    tiles = torch.empty(number_of_tiles, 1 + BT, dtype=torch.int32, device=chosen.device)
    align_kernel[(number + shared,)](
        chosen, tiles, rows, number_of_tiles, E=number, SHARED=shared, FIRST=first, K=top, BT=BT, CHUNK=CHUNK, num_warps=16
    )
    return tiles


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """How the rows of one mixture are cut into programs' tiles."""

    chosen: Tensor  # [T, K]
    experts: int
    shared: int
    first: int | None
    BT: int
    table: Tensor | None  # see reference.align; None: rows are as they are

    def grid(self, columns: int, BN: int) -> tuple[int, ...]:
        """See `tile_rows`."""
        if self.table is not None:
            return triton.cdiv(columns, BN), len(self.table)
        return triton.cdiv(len(self.chosen), self.BT), self.experts + self.shared, triton.cdiv(columns, BN)

    def counters(self, columns: int, BN: int) -> Tensor | None:
        """Of programs that sum parts where they are the last; None: a launch of its own does."""
        if self.table is not None:
            return None
        return arrival_counters("experts", triton.cdiv(len(self.chosen), self.BT) * triton.cdiv(columns, BN), self.chosen.device)

    def sum_parts(self, parts: Tensor, out: Tensor) -> None:
        """parts [T, K + shared, H] float32 → out [T, H], added over k in its order, where nobody has done so. Parts of experts that are
        elsewhere are not read."""
        if self.table is None:
            return
        rows, hidden = out.shape
        BH = min(int(triton.next_power_of_2(hidden)), 1024)
        sum_kernel[(rows, triton.cdiv(hidden, BH))](
            parts, self.chosen, out, H=hidden, E=self.experts, SHARED=self.shared, FIRST=self.first, K=self.chosen.shape[1], BH=BH,
            num_warps=4,
        )  # fmt: skip


def expert_tiles(chosen: Tensor, number: int, shared: int, first: int | None, BT: int) -> ExpertTiles:
    """Rows are grouped where they are more than one tile."""
    table = align(chosen, number, shared, first, BT) if len(chosen) > MAX_ROWS else None
    return ExpertTiles(chosen, number, shared, first, BT, table)
