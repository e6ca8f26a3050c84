"""silu(gate) * up over the halves of one product. Reads 2 T size numbers and writes half of that."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpserve_kernels import dependent_launch
from mtpserve_kernels.dependent_launch import grid_dependency_wait

BLOCK = 1024  # numbers of a program, 8 a thread


@triton.jit
def silu_mul_kernel(p_x, p_out, size, stride_x, B: tl.constexpr, launch_pdl: tl.constexpr):
    i_row, i_block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    o = i_block * B + tl.arange(0, B)
    m = o < size
    grid_dependency_wait(launch_pdl)
    b_gate = tl.load(p_x + i_row * stride_x + o, mask=m, other=0.0).to(tl.float32)
    b_up = tl.load(p_x + i_row * stride_x + size + o, mask=m, other=0.0).to(tl.float32)
    tl.store(p_out + i_row * size + o, (b_gate / (1.0 + tl.exp(-b_gate)) * b_up).to(p_out.dtype.element_ty), mask=m)


def silu_mul(gate_up: Tensor) -> Tensor:
    """[T, 2 size] → [T, size]"""
    rows, both = gate_up.shape
    assert both % 2 == 0 and gate_up.stride(1) == 1, gate_up.shape
    out = torch.empty(rows, both // 2, dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        silu_mul_kernel[(rows, triton.cdiv(both // 2, BLOCK))](
            gate_up, out, both // 2, gate_up.stride(0), B=BLOCK, launch_pdl=dependent_launch.enabled(gate_up.device), num_warps=4
        )
    return out
