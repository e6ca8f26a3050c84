"""Products of few rows with the forms of tilings that a table may have; what the wrappers choose without one is beside it in matrix.py."""

from __future__ import annotations

import torch

GEMV = ((8, 1024, 3, 4), (4, 1024, 1, 4), (16, 1024, 2, 4), (16, 512, 3, 2), (2, 2048, 4, 8), (4, 256, 4, 1), (8, 128, 1, 1))
DOT = ((16, 256, 3, 4), (16, 128, 4, 4), (32, 128, 3, 4), (128, 64, 3, 4))  # all fit AMD's shared memory


def lora_launches() -> None:
    """Tiles of few rows and of many; ranks that fill a tile and not; one fused matrix and three."""
    from mtpserve_kernels.lora.grouped import add_lora
    from mtpserve_kernels.lora.reference import RowAdapters

    for dtype in (torch.bfloat16, torch.float32):
        for rows, rank, parts in ((4, 64, (4096,)), (4, 16, (3072, 512, 512)), (300, 8, (2048, 2048)), (300, 64, (3072, 512, 512))):
            x, y = torch.zeros(rows, 4096, dtype=dtype), torch.zeros(rows, 4096, dtype=dtype if rows == 4 else torch.float32)
            where = torch.zeros(rows, dtype=torch.int64)
            a, b = torch.zeros(4, len(parts) * rank, 4096, dtype=dtype), torch.zeros(4, rank, 4096, dtype=dtype)
            add_lora(x, y, RowAdapters(where, where), a, b, parts)


def product_launches() -> None:
    """BN, BK, stages and warps of each, with one split and with two."""
    from mtpserve_kernels import tuned
    from mtpserve_kernels.fused.linear import skinny_gated, skinny_linear

    lora_launches()
    weight = torch.zeros(512, 4096, dtype=torch.bfloat16)
    for rows, splits in ((1, 1), (1, 2), (2, 1), (2, 2), (16, 1), (16, 2)):
        for BN, BK, stages, warps in GEMV if rows <= 2 else DOT:
            tile = {"BT": rows, "BK": BK, "stages": stages, "warps": warps, "splits": splits}
            with tuned.override("skinny_linear", tile | {"BN": BN}):
                skinny_linear(weight[:rows], weight, weight[0, :512] if splits == 2 else None)
            with tuned.override("skinny_gated", tile | {"BN": BN // 2}):
                skinny_gated(weight[:rows], weight)
