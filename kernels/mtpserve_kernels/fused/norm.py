"""RMS norm with the residual sum before it: reads x and residual once, writes the norm and the sum. 4 T H numbers moved, 5 FLOPs each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mtpserve_kernels import dependent_launch, tuned
from mtpserve_kernels.dependent_launch import grid_dependency_wait
from mtpserve_kernels.tiling import type_name

THREAD_NUMBERS = 8  # of a row: one 16-byte load of each tensor in bfloat16
MAX_WARPS = 16


@triton.jit
def add_rms_norm_kernel(
    p_x, p_residual, p_weight, p_out, p_sum, stride_x, stride_residual, eps,
    H: tl.constexpr, BH: tl.constexpr, ADD: tl.constexpr, launch_pdl: tl.constexpr,
):  # fmt: skip
    """A program has one row, all of it in registers. The weight comes from memory, and its load waits for nothing."""
    i_row = tl.program_id(0).to(tl.int64)
    o_h = tl.arange(0, BH)
    m_h = o_h < H
    b_weight = tl.load(p_weight + o_h, mask=m_h, other=0.0)
    grid_dependency_wait(launch_pdl)
    b_x = tl.load(p_x + i_row * stride_x + o_h, mask=m_h, other=0.0)
    if ADD:
        b_residual = tl.load(p_residual + i_row * stride_residual + o_h, mask=m_h, other=0.0)
        b_x = (b_x.to(tl.float32) + b_residual.to(tl.float32)).to(b_x.dtype)
        tl.store(p_sum + i_row * H + o_h, b_x, mask=m_h)
    b_x = b_x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(b_x * b_x) / H + eps)
    tl.store(p_out + i_row * H + o_h, (b_x * scale * b_weight.to(tl.float32)).to(p_out.dtype.element_ty), mask=m_h)


def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See reference.add_rms_norm. Rows may be strided; without a residual the sum is x itself. The launch before writes no weight."""
    rows, size = x.shape
    assert x.stride(1) == 1 and weight.shape == (size,) and size <= 1 << 16, (x.shape, weight.shape)
    assert residual is None or (residual.shape == x.shape and residual.dtype == x.dtype and residual.stride(1) == 1)
    out = torch.empty(rows, size, dtype=x.dtype, device=x.device)
    total = x if residual is None else torch.empty_like(out)
    block = triton.next_power_of_2(size)
    entry = tuned.tiling("add_rms_norm", f"{type_name(x.dtype)} H{size}", rows, x.device) or {}
    warps = min(max(block // (32 * THREAD_NUMBERS), 1), MAX_WARPS)
    if rows:
        add_rms_norm_kernel[(rows,)](
            x, residual, weight, out, total, x.stride(0), 0 if residual is None else residual.stride(0), eps,
            H=size, BH=block, ADD=residual is not None, launch_pdl=dependent_launch.enabled(x.device),
            num_warps=entry.get("warps", warps),
        )  # fmt: skip
    return out, total
