"""From places in requests to slots of the pool, and the hidden rows that are kept for the last token of each page: one launch each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

B = 256  # places in a program


@triton.jit(do_not_specialize=["number"])
def slots_kernel(p_out, p_table, p_req_indices, p_index, number, stride, PAGE: tl.constexpr, B: tl.constexpr):
    o = tl.program_id(0) * B + tl.arange(0, B)
    m = o < number
    req_idx, index = tl.load(p_req_indices + o, mask=m, other=0), tl.load(p_index + o, mask=m, other=0)
    page = tl.load(p_table + req_idx * stride + index // PAGE, mask=m, other=0)
    tl.store(p_out + o, page * PAGE + index % PAGE, mask=m)


@triton.jit
def boundary_kernel(p_rows, p_slots, p_hidden, WIDTH: tl.constexpr, PAGE: tl.constexpr, B: tl.constexpr):
    i_row = tl.program_id(0).to(tl.int64)
    slot = tl.load(p_slots + i_row)
    if slot % PAGE == PAGE - 1:
        for i in range(0, WIDTH, B):
            o = i + tl.arange(0, B)
            b = tl.load(p_hidden + i_row * WIDTH + o, mask=o < WIDTH)
            tl.store(p_rows + (slot // PAGE) * WIDTH + o, b, mask=o < WIDTH)


def slots(block_table: Tensor, seats: Tensor, index: Tensor, page_size: int) -> Tensor:
    """See reference.slots; block_table has contiguous rows, seats and index are contiguous."""
    assert block_table.stride(1) == 1 and seats.is_contiguous() and index.is_contiguous(), (seats.stride(), index.stride())
    out = torch.empty_like(index)
    if len(index):
        slots_kernel[(triton.cdiv(len(index), B),)](
            out, block_table, seats, index, len(index), block_table.stride(0), PAGE=page_size, B=B, num_warps=2
        )
    return out


def store_boundary(rows: Tensor, slots: Tensor, hidden: Tensor, page_size: int) -> None:
    """See reference.store_boundary; rows and hidden are contiguous and of one type."""
    width = rows.shape[1]
    assert rows.is_contiguous() and hidden.is_contiguous() and hidden.shape == (len(slots), width) and hidden.dtype == rows.dtype
    if len(slots):
        block = min(1024, triton.next_power_of_2(width))
        boundary_kernel[(len(slots),)](rows, slots, hidden, WIDTH=width, PAGE=page_size, B=block, num_warps=2)
