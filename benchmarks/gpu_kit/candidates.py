"""The tilings that are tried for each op of the table: those that fit the chip and fill it, for the sizes of a work."""

from __future__ import annotations

from itertools import product
from math import ceil

from gpu_kit.works import Work

Tile = dict[str, int]
SHARED_BYTES, PROCESSORS, MOST = 220 << 10, 132, 16


def near(tiles: list[Tile], blocks: dict[int, float]) -> list[Tile]:
    """The MOST tiles whose number of blocks (by the tile's place) is nearest to two for each processor, in their old order."""
    order = sorted(range(len(tiles)), key=lambda place: abs(blocks[place] / (2 * PROCESSORS) - 1) if blocks[place] else 9.0)
    return [tiles[place] for place in sorted(order[:MOST])]


def skinny(work: Work) -> list[Tile]:
    outputs, inputs = work.sizes
    tiles, blocks = list[Tile](), dict[int, float]()
    for BN, BK, stages, splits in product((16, 32, 64, 128), (64, 128, 256), (3, 4), (1, 2, 4, 8, 16)):
        deep, count = ceil(inputs / BK / splits), ceil(outputs / BN) * splits
        fits = (BN + max(16, work.rows)) * BK * 2 * stages <= SHARED_BYTES
        if fits and (splits == 1 or deep >= 2) and (stages == 3 or deep >= stages) and count <= 8 * PROCESSORS:
            blocks[len(tiles)] = count
            tiles.append({"BN": BN, "BK": BK, "stages": stages, "splits": splits})
    return near(tiles, blocks)


def experts(work: Work) -> list[Tile]:
    """Of gate_up, whose tile has two halves, or of down."""
    depth = work.sizes[2] if work.op == "gate_up" else work.sizes[3]
    halves, rows = 2 if work.op == "gate_up" else 1, min(max(16, work.rows), 64)
    return [
        {"BN": BN, "BK": BK, "stages": stages, "warps": warps}
        for BN, BK, stages, warps in product((16, 32, 64, 128), (32, 64, 128), (3, 4), (4, 8))
        if (halves * BN + rows) * BK * 2 * stages <= SHARED_BYTES and max(depth, 32) >= BK and (warps == 4 or BN >= 64)
    ]


def router(work: Work) -> list[Tile]:
    number, hidden = work.sizes[:2]
    return [
        {"BE": BE, "BH": BH, "SPLITS": splits, "AT_ONCE": at_once, "warps": warps}
        for BE, BH, splits, at_once, warps in product((16, 32, 64), (64, 128), (1, 4, 8, 16), (8, 16), (4, 8))
        if max(number, 16) >= BE and ceil(hidden / BH) >= splits and (splits > 1 or hidden <= 1024) and at_once * number <= 16 * 256
    ][: 2 * MOST]


def span(work: Work) -> list[Tile]:
    width, context, heads, kv_heads, dim, value = work.sizes
    tall, latent = width * heads // kv_heads, value < dim
    programs = max(1, work.rows // width) * kv_heads
    most = max(1, ceil(context / 64))
    splits = [size for size in (1, 2, 4, 8, 16, 32, 64) if size <= most and (size == 1 or programs * size <= 8 * PROCESSORS)]
    whole = min(max(16, 1 << (tall - 1).bit_length()), 64)  # one tile for all rows that share keys, or two
    BMs = [whole] if whole == 16 else [whole, whole // 2]
    tiles = [
        {"BM": BM, "BN": BN, "warps": warps, "stages": stages, "splits": count}
        for BM, BN, warps, stages, count in product(BMs, (32, 64), (4, 8), (2, 3), splits[-4:] if len(splits) > 4 else splits)
        if not latent or (BM <= 32 and warps == 8)
    ]
    return tiles[: 2 * MOST]


def norm(work: Work) -> list[Tile]:
    return [{"warps": warps} for warps in (1, 2, 4, 8, 16) if warps * 32 <= max(work.sizes[0] // 2, 32)]


def sampler(work: Work) -> list[Tile]:
    return [{"BLOCKS": count} for count in (1, 2, 4, 8, 16)]


TILES = {
    "skinny_linear": skinny, "gate_up": experts, "down": experts, "route": router, "span_gqa": span, "span_mla": span,
    "add_rms_norm": norm, "choose": sampler,
}  # fmt: skip


def tiles_of(work: Work, toy: bool = False) -> list[Tile]:
    """`toy`: the first one and the last one."""
    tiles = TILES[work.op](work)
    return tiles[:: max(len(tiles) - 1, 1)] if toy else tiles
