"""The tilings that are tried for each op of the table, on both sides of the kernels' rules: few, as each is compiled."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import ceil

from gpu_kit.workloads import Workload

Tile = dict[str, int]
SHARED_BYTES, PROCESSORS, MAX_TILES = 220 << 10, 132, 10
MAX_PRODUCT_TILES, SPLITS = 8, (1, 2, 4, 8)
READ_BYTES_PER_US, BYTES_ON_THE_WAY = 4.5e6, 40 << 10  # of an H200, and those for each of its processors that keep its memory busy
CACHE_BYTES_PER_US = 5.5e6  # of its L2 cache: an assumption
WAIT_US, SPLIT_US = 0.7, 1.0  # for bytes from memory; for the program that adds the parts
MAX_BLOCK_ROWS = 64  # of a block of the experts' kernels, without groups


def spread(tiles: list[Tile]) -> list[Tile]:
    """At most MAX_TILES of them, equally far from each other."""
    step = max(len(tiles) / MAX_TILES, 1.0)
    return [tiles[int(i * step)] for i in range(min(len(tiles), MAX_TILES))]


@dataclass(frozen=True, slots=True)
class ProductTile:
    """Of a product of few rows: BM rows of W, K in steps of BK. `BT`: 1 or 2 without the matrix unit, else 16."""

    BT: int
    BM: int
    BK: int
    stages: int
    warps: int

    @property
    def shared_bytes(self) -> int:
        return (self.BM + self.BT) * self.BK * 2 * (self.stages - 1)

    @property
    def resident(self) -> int:
        """Programs on one processor."""
        thread_registers = 56 if self.BT == 16 else 40 + 5 * self.BM * max(1, self.BK // (256 * self.warps))
        return min(SHARED_BYTES // (self.shared_bytes + 1024), 65536 // (32 * self.warps * thread_registers), 64 // self.warps, 32)

    def microseconds(self, outputs: int, inputs: int, rows: int, splits: int) -> float:
        """A rough order of candidates: the bytes at the read bandwidth, less where too few are on their way; with the rows of x, which each
        program reads, at the cache's; or a program's waits one after the other."""
        blocks, depth, ahead = ceil(outputs / self.BM), ceil(ceil(inputs / self.BK) / splits), max(self.stages - 1, 1)
        waves = max(blocks * splits / (self.resident * PROCESSORS), 1.0)
        on_the_way = blocks * splits / waves / PROCESSORS * min(ahead, depth) * self.BM * self.BK * 2
        memory_us = outputs * inputs * 2 / READ_BYTES_PER_US / min(1.0, on_the_way / BYTES_ON_THE_WAY)
        cache_us = outputs * inputs * 2 * (1 + rows / self.BM) / CACHE_BYTES_PER_US
        return max(memory_us, cache_us, WAIT_US * waves * ceil(depth / ahead)) + (SPLIT_US if splits > 1 else 0.0)

    def tiling(self, op: str, splits: int) -> Tile:
        """As the table has it: BN of outputs, two rows of W for each where they are gated; BT only without the matrix unit."""
        BN = self.BM // 2 if op == "skinny_gated" else self.BM
        tile = {"BN": BN, "BK": self.BK, "stages": self.stages, "warps": self.warps, "splits": splits}
        return tile if self.BT == 16 else {"BT": self.BT} | tile


# BM, BK, stages, warps
GEMV_TILES = (
    (4, 1024, 4, 4), (8, 1024, 3, 4), (4, 1024, 1, 4), (8, 1024, 1, 4), (16, 1024, 2, 4), (16, 512, 3, 2), (4, 2048, 3, 8),
    (8, 2048, 1, 8), (2, 2048, 4, 8), (4, 512, 4, 2), (8, 512, 3, 2), (4, 256, 4, 1), (8, 128, 1, 1),
)  # fmt: skip
DOT_TILES = (
    (16, 256, 4, 4), (16, 128, 4, 4), (32, 128, 4, 4), (32, 256, 3, 8), (64, 128, 4, 4), (64, 64, 5, 4), (16, 512, 3, 8),
    (128, 64, 4, 4),
)  # fmt: skip


def products(workload: Workload) -> list[Tile]:
    """Each form with its best number of splits, those first that should be fast, then some with the second best. For one row and two
    some are of the matrix unit, for comparison."""
    (outputs, inputs), gated = workload.sizes, workload.op == "skinny_gated"
    unit, gemv = list[tuple[int, float, Tile]](), list[tuple[int, float, Tile]]()
    forms = [(unit, ProductTile(16, *form)) for form in DOT_TILES]
    forms += [(gemv, ProductTile(workload.rows, *form)) for form in GEMV_TILES if workload.rows <= 2]
    for tiles, tile in forms:
        if inputs * 3 < tile.BK * 2 > 512 or (gated and tile.BM < 4):
            continue
        depth = ceil(inputs / tile.BK)
        times = sorted(
            (tile.microseconds(outputs, inputs, workload.rows, splits), splits) for splits in ((1,) if gated else SPLITS) if splits <= depth
        )
        tiles += [(rank, us, tile.tiling(workload.op, splits)) for rank, (us, splits) in enumerate(times[:2])]
    ordered = [[tile for _, _, tile in sorted(tiles, key=lambda entry: entry[:2])] for tiles in (gemv, unit)]
    return [*ordered[0][: MAX_PRODUCT_TILES - 2], *ordered[1][: 2 if gemv else MAX_PRODUCT_TILES]]


# BT of the rule where it is 0, BN, BK, stages, warps
GROUPED_TILES = {
    "gate_up": ((0, 64, 64, 3, 4), (0, 64, 128, 3, 4), (0, 64, 64, 4, 4), (0, 128, 64, 3, 8), (32, 64, 64, 3, 4), (64, 64, 64, 3, 4)),
    "down": ((0, 64, 64, 3, 4), (0, 128, 64, 3, 4), (0, 64, 128, 3, 4), (0, 128, 64, 4, 8), (0, 128, 128, 3, 8)),
}


def experts(workload: Workload) -> list[Tile]:
    """Of gate_up, whose tile has two halves, or of down. The same for all numbers of rows, so that they can be compared; others for rows
    that are grouped by expert, where gate_up's decides for both how many rows of an expert a program has."""
    if workload.kind == "grouped":
        fields = "BT", "BN", "BK", "stages", "warps"
        return [{name: number for name, number in zip(fields, form, strict=True) if number} for form in GROUPED_TILES[workload.op]]
    gate_up = workload.op == "gate_up"
    depth, halves = workload.sizes[2 if gate_up else 3], 2 if gate_up else 1
    tiles = [
        {"BN": BN, "BK": BK, "stages": stages, "warps": warps}
        for BN, BK, stages, warps in product((16, 32, 64, 128), (64, 128), (3, 4), (4, 8))
        if (halves * BN + MAX_BLOCK_ROWS) * BK * 2 * stages <= SHARED_BYTES and (depth > BK // 2 or BK == 64) and (warps == 4 or BN >= 64)
    ]
    return spread(tiles)


# BE, BH, SPLITS, CHOICE_ROWS, warps; the last ones for few hidden numbers
ROUTER_TILES = (
    (32, 128, 8, 16, 8), (32, 128, 8, 16, 4), (32, 128, 8, 8, 8), (32, 64, 8, 16, 8), (32, 128, 4, 16, 8), (32, 64, 1, 16, 4),
    (16, 64, 1, 8, 4),
)  # fmt: skip


def router(workload: Workload) -> list[Tile]:
    num_experts, hidden = workload.sizes[:2]
    return [
        {"BE": BE, "BH": BH, "SPLITS": splits, "CHOICE_ROWS": choice_rows, "warps": warps}
        for BE, BH, splits, choice_rows, warps in ROUTER_TILES
        if (hidden >= BH * splits if splits > 1 else hidden < 256) and choice_rows * num_experts <= 16 * 16 * warps
    ]


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


def rope(workload: Workload) -> list[Tile]:
    """256 to 4,096 numbers of a program, 8 or 16 a thread."""
    dim = workload.sizes[2]
    return [
        {"BH": numbers // dim, "warps": warps}
        for numbers, warps in product((256, 1024, 2048, 4096), (1, 2, 4, 8))
        if numbers >= dim and 8 <= numbers // (32 * warps) <= 16
    ]


TILES = {
    "skinny_linear": products, "skinny_gated": products, "gate_up": experts, "down": experts, "route": router, "span_gqa": span,
    "span_mla": span, "add_rms_norm": norm, "rope_store": rope,
}  # fmt: skip


def tiles_of(workload: Workload, toy: bool = False) -> list[Tile]:
    """None where its op has no table. `toy`: the first one and the last one."""
    tiles = TILES[workload.op](workload) if workload.op in TILES else []
    return tiles[:: max(len(tiles) - 1, 1)] if toy else tiles
