"""What the products with quantised weights compute, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 128
LARGEST = 448.0  # of e4m3
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def widen(weight: Tensor, scale: Tensor) -> Tensor:
    """weight [N, K] float8, scale [N / 128, K / 128] rounded up → float32"""
    wide = scale.repeat_interleave(BLOCK, 0)[: weight.shape[0]].repeat_interleave(BLOCK, 1)[:, : weight.shape[1]]
    return weight.float() * wide


def linear_fp8(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """W8A16: x [T, K] as it is."""
    out = x.float() @ widen(weight, scale).T
    return (out if bias is None else out + bias.float()).to(x.dtype)


def widen_rows(weight: Tensor, scale: Tensor, zeros: Tensor | None, global_scale: Tensor | None) -> Tensor:
    """weight [..., N, K] float8, or uint8 [..., N, K / 2]: numbers of four bits, two in a byte, the low half first; scale and zeros
    [..., N, groups], zeros 8 where there are none. Scales of one byte are those of e2m1: in MXFP4 e8m0, in NVFP4 e4m3 with a
    global_scale [..., N, 1] float32. → float32"""
    if weight.dtype == torch.uint8:
        whole = torch.stack([weight & 15, weight >> 4], -1).flatten(-2).float()
        if scale.itemsize == 1:
            whole, zeros = torch.tensor(E2M1, device=weight.device)[whole.long()], torch.zeros_like(scale, dtype=torch.uint8)
        numbers = whole.unflatten(-1, (scale.shape[-1], -1)) - (8 if zeros is None else zeros.float().unsqueeze(-1))
    else:
        numbers = weight.float().unflatten(-1, (scale.shape[-1], -1))
    out: Tensor = (numbers * scale.float().unsqueeze(-1)).flatten(-2)
    return out if global_scale is None else out * global_scale


def linear_rows(
    x: Tensor, weight: Tensor, scale: Tensor, zeros: Tensor | None = None, global_scale: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """x [T, K] as it is."""
    out = x.float() @ widen_rows(weight, scale, zeros, global_scale).T
    return (out if bias is None else out + bias.float()).to(x.dtype)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, K], K a multiple of 128 → float8 [T, K] and one scale per row and 128 columns [T, K / 128]; each group's largest at 448."""
    groups = x.float().unflatten(1, (-1, BLOCK))
    scale = groups.abs().amax(-1).clamp_(min=1e-10) / LARGEST
    return (groups / scale.unsqueeze(-1)).clamp_(-LARGEST, LARGEST).flatten(1).to(torch.float8_e4m3fn), scale


def linear_fp8_both(x8: Tensor, x_scale: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """W8A8: what `quantize_rows` gave."""
    x = (x8.float().unflatten(1, (-1, BLOCK)) * x_scale.unsqueeze(-1)).flatten(1)
    out: Tensor = x @ widen(weight, scale).T
    return (out if bias is None else out + bias.float()).to(dtype)


def quantize_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, K] → int8 [T, K] and one scale per row [T] float32: symmetric, each row's largest at 127. A row that is not finite gets NaN
    as its scale."""
    wide = x.float()
    largest = wide.abs().amax(-1)
    inverse = torch.where(largest > 0, torch.full_like(largest, 127) / largest, 0.0)  # `127 / largest` would round twice
    scale = torch.where(wide.isfinite().all(-1), largest / 127, torch.nan)
    return (wide * inverse.unsqueeze(-1)).round().nan_to_num().to(torch.int8), scale


def linear_int8(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    """W8A8: weight int8 [N, K], scale [N]; x [T, K] is quantised per row. The sum of products is a whole number, and exact. → float32"""
    x8, x_scale = quantize_int8(x)
    whole = (x8.long() @ weight.long().T).float()
    out = whole * x_scale.unsqueeze(-1) * scale
    return out if bias is None else out + bias.float()
