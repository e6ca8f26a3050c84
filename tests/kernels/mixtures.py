"""What is compiled of the router and the experts: see matrix.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

ByRow = Callable[[tuple[int, ...], bool], Iterator[tuple[Tensor | None, ...]]]
CLAMPED = (1.702, 7.0, 7.0, 1.0)
GROUPED_ROWS = (65, 150, 300, 700)  # two of 16 experts: tiles of 16, 32, 64 and 128 rows


def ints(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.int64)


def routers() -> None:
    from mtpserve_kernels.moe.route import route

    for rows in (64, 2048):
        x = torch.zeros(rows, 2048, dtype=torch.bfloat16)
        route(x, torch.zeros(256, 2048), torch.zeros(256), 8, 8, 4, True, 2.5)
        route(x, torch.zeros(32, 2048), None, 4, 1, 1, True, 1.0, True, torch.zeros(32))
        route(x, torch.zeros(64, 2048), torch.zeros(64), 6, 1, 1, True, 1.0, True)
        route(x, torch.zeros(64, 2048), torch.zeros(64), 6, 1, 1, False, 1.0)
        route(x, torch.zeros(128, 2048), None, 8, 1, 1, True, 1.0)
        route(x, torch.zeros(60, 2048), None, 4, 1, 1, False, 1.0)


def few_rows(fp8: bool, by_row: ByRow) -> None:
    from mtpserve_kernels.moe.experts import experts
    from mtpserve_kernels.moe.experts_rows import experts_rows

    x = torch.zeros(64, 2048, dtype=torch.bfloat16)
    scales = [torch.zeros(shape) for shape in ((2, 22, 16), (2, 16, 11), (44, 16), (16, 22))]
    for dtype in (torch.bfloat16, torch.float32):
        matrices = [torch.zeros(shape, dtype=dtype) for shape in ((2, 2816, 2048), (2, 2048, 1408), (2 * 2816, 2048), (2048, 2816))]
        stored = [matrix.to(torch.float8_e4m3fn) for matrix in matrices]
        for rows in range(1, 65):
            routed = x[:rows].to(dtype), torch.zeros(rows, 6), ints(rows, 6)
            experts(*routed, *matrices)
            experts(*routed, *matrices, first=2)
            biases = torch.zeros(2, 2816, dtype=dtype), torch.zeros(2, 2048, dtype=dtype)
            experts(*routed, *matrices[:2], *[None] * 6, *biases, CLAMPED)
            plain = matrices[0][:, :1408].contiguous(), matrices[1], matrices[2][:2816], matrices[3]
            experts(*routed, *plain, squared=True)
            if fp8:
                experts(*routed, *stored, *scales)
                experts(*routed, *stored[:2], None, None, *scales[:2], None, None, None, None, (1.0, 7.0, 7.0, 0.0))
                halves = [part[: len(part) // 2] if len(part.shape) == 2 else part[:, : part.shape[1] // 2] for part in scales[::2]]
                up, beside = (part.to(torch.float8_e4m3fn) for part in plain[::2])
                experts(*routed, up, stored[1], beside, stored[3], halves[0].contiguous(), scales[1], halves[1], scales[3], squared=True)
            for gate_up, down in zip(by_row((2, 2816, 2048), fp8), by_row((2, 2048, 1408), fp8), strict=True):
                experts_rows(*routed, *gate_up, *down)
                experts_rows(*routed, *gate_up, *down, *biases, CLAMPED)
                up = (None if part is None else part[:, :1408].contiguous() for part in gate_up)
                experts_rows(*routed, *up, *down, squared=True)


def grouped_rows(fp8: bool, by_row: ByRow) -> None:
    """Rows that are grouped by expert."""
    from mtpserve_kernels.moe.experts import experts
    from mtpserve_kernels.moe.experts_rows import experts_rows

    shapes = (16, 2816, 2048), (16, 2048, 1408), (2816, 2048), (2048, 1408)
    scales = [torch.zeros(shape) for shape in ((16, 22, 16), (16, 16, 11), (22, 16), (16, 11))]
    for dtype in (torch.bfloat16, torch.float32):
        matrices = [torch.zeros(shape, dtype=dtype) for shape in shapes]
        stored = [torch.zeros(shape, dtype=torch.float8_e4m3fn) for shape in shapes]
        biases = torch.zeros(16, 2816, dtype=dtype), torch.zeros(16, 2048, dtype=dtype)
        up = torch.zeros(16, 1408, 2048, dtype=dtype)
        for number, rows in enumerate(GROUPED_ROWS):
            routed = torch.zeros(rows, 2048, dtype=dtype), torch.zeros(rows, 2), ints(rows, 2)
            experts(*routed, *matrices)
            experts(*routed, *matrices[:2], None, None, first=2)
            experts(*routed, *matrices[:2], *[None] * 6, *biases, CLAMPED)
            experts(*routed, up, matrices[1], None, None, squared=True)
            if fp8:
                experts(*routed, *stored, *scales)
                experts(*routed, *stored[:2], None, None, *scales[:2], None, None, None, None, (1.0, 7.0, 7.0, 0.0))
            # With biases for every second form, others for the next number of rows.
            for form, (gate_up, down) in enumerate(zip(by_row(shapes[0], fp8), by_row(shapes[1], fp8), strict=True)):
                experts_rows(*routed, *gate_up, *down, *((*biases, CLAMPED) if (number + form) % 2 else ()))
