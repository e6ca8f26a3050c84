"""The tilings that are tried for each op of the table, on both sides of the kernels' rules: few, as each is compiled."""

from __future__ import annotations

from itertools import product
from math import ceil

from gpu_kit.workloads import Workload

Tile = dict[str, int]
SHARED_BYTES, PROCESSORS, MAX_TILES = 220 << 10, 132, 10
MAX_BLOCK_ROWS = 64  # of a block of the experts' kernels


def spread(tiles: list[Tile]) -> list[Tile]:
    """At most MAX_TILES of them, equally far from each other."""
    step = max(len(tiles) / MAX_TILES, 1.0)
    return [tiles[int(i * step)] for i in range(min(len(tiles), MAX_TILES))]


def near_two_waves(tiles: list[Tile], num_blocks: list[int]) -> list[Tile]:
    """The MAX_TILES tiles whose number of blocks is nearest to two for each processor, in their old order."""
    order = sorted(range(len(tiles)), key=lambda i: abs(num_blocks[i] / (2 * PROCESSORS) - 1))
    return [tiles[i] for i in sorted(order[:MAX_TILES])]


def skinny(workload: Workload) -> list[Tile]:
    outputs, inputs = workload.sizes
    tiles, num_blocks = list[Tile](), list[int]()
    for BN, BK, stages, warps, splits in product((16, 32, 64), (128, 256), (3, 4), (4, 8), (1, 2, 4, 8)):
        depth, count = ceil(inputs / BK / splits), ceil(outputs / BN) * splits
        fits = (BN + max(16, workload.rows)) * BK * 2 * stages <= SHARED_BYTES
        if fits and (splits == 1 or depth >= 2) and (warps == 4 or BN == 64) and (stages == 3 or depth >= stages):
            num_blocks.append(count)
            tiles.append({"BN": BN, "BK": BK, "stages": stages, "warps": warps, "splits": splits})
    return near_two_waves(tiles, num_blocks)


def experts(workload: Workload) -> list[Tile]:
    """Of gate_up, whose tile has two halves, or of down. The same for all numbers of rows, so that they can be compared."""
    gate_up = workload.op == "gate_up"
    depth, halves = workload.sizes[2 if gate_up else 3], 2 if gate_up else 1
    tiles = [
        {"BN": BN, "BK": BK, "stages": stages, "warps": warps}
        for BN, BK, stages, warps in product((16, 32, 64, 128), (64, 128), (3, 4), (4, 8))
        if (halves * BN + MAX_BLOCK_ROWS) * BK * 2 * stages <= SHARED_BYTES and (depth > BK // 2 or BK == 64) and (warps == 4 or BN >= 64)
    ]
    return spread(tiles)


def router(workload: Workload) -> list[Tile]:
    num_experts, hidden = workload.sizes[:2]
    tiles = [
        {"BE": BE, "BH": BH, "SPLITS": splits, "CHOICE_ROWS": at_once, "warps": warps}
        for BE, BH, splits, at_once, warps in product((16, 32), (64, 128), (1, 4, 8, 16), (8, 16), (4, 8))
        if max(num_experts, 16) >= BE and ceil(hidden / BH) >= splits and (splits > 1 or hidden < 256) and at_once * num_experts <= 16 * 64
    ]
    return spread(tiles)


def span(workload: Workload) -> list[Tile]:
    """Without a number of splits: the rule's follows requests and contexts, which a table's shape does not know."""
    width, _, heads, kv_heads, dim, value_dim = workload.sizes
    rows, latent = width * heads // kv_heads, value_dim < dim
    largest = 32 if latent else 64  # the accumulator of 64 latent rows fits no registers
    BM = min(max(16, 1 << (rows - 1).bit_length()), largest)
    BMs, BNs, all_warps = sorted({max(16, BM // 2), BM}), (16, 32, 64) if latent else (32, 64, 128), (8,) if latent else (4, 8)
    return [
        {"BM": BM, "BN": BN, "warps": warps, "stages": stages}
        for BM, BN, warps, stages in product(BMs, BNs, all_warps, (3, 5))
        if (BM + (stages // 2) * (1 if latent else 2) * BN) * dim * 2 <= SHARED_BYTES and (warps == 4 or latent or BM * BN >= 2048)
    ][: 2 * MAX_TILES]


def norm(workload: Workload) -> list[Tile]:
    return [{"warps": warps} for warps in (1, 2, 4, 8, 16) if warps * 32 <= max(workload.sizes[0] // 2, 32)]


TILES = {
    "skinny_linear": skinny, "gate_up": experts, "down": experts, "route": router, "span_gqa": span, "span_mla": span,
    "add_rms_norm": norm,
}  # fmt: skip


def tiles_of(workload: Workload, toy: bool = False) -> list[Tile]:
    """None where its op has no table. `toy`: the first one and the last one."""
    tiles = TILES[workload.op](workload) if workload.op in TILES else []
    return tiles[:: max(len(tiles) - 1, 1)] if toy else tiles
