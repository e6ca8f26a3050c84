"""The kernels of layers from mtpserve_kernels. Imported only where they run: triton takes a second to
import."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from mtpserve_kernels.fused import rope
from mtpserve_kernels.fused.linear import MAX_ROWS, has_tiling, skinny_gated, skinny_linear
from mtpserve_kernels.fused.norm import add_rms_norm
from mtpserve_kernels.fused.silu import silu_mul
from mtpserve_kernels.lora.grouped import add_lora
from mtpserve_kernels.moe import experts as moe_experts, route as moe_route
from mtpserve_kernels.moe.experts_rows import experts_rows
from mtpserve_kernels.quant.linear_fp8 import linear_fp8
from mtpserve_kernels.quant.rows import linear_rows, widen_rows
from torch import Tensor

from mtpserve.core.arch.gates import ClampedGate, GeluGate
from mtpserve.core.arch.model import MoEArch
from mtpserve.layers.devices import torch_kernels
from mtpserve.layers.kernels import Gate, HeadNorms, Kernels, RoutedExperts, SharedExpert
from mtpserve.layers.linear import Linear
from mtpserve.layers.rope import Rotation
from mtpserve.quant.fp8 import BLOCK
from mtpserve.quant.kept import Kept
from mtpserve.quant.stored import QuantisedMatrix
from mtpserve.quant.unquantized import Unquantized

STRIP = 8192  # rows of stored weights that are widened at a time, where many rows are multiplied


def triton_kernels() -> Kernels:
    return replace(
        torch_kernels.torch_kernels(),
        add_rms_norm=add_rms_norm,
        gated=gated,
        rope_store=rope_store,
        latent_store=latent_store,
        pack_heads=partial(torch_kernels.pack_heads, product=by_head),
        pack_router=partial(partial, route),
        pack_experts=partial(partial, experts),
        pack=lambda *_: None,
        linear=linear,
        linear_stored=linear_stored,
        add_lora=add_lora,
    )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The own product where the chip's table has a tiling for this one, which was faster than the library's
    when it was measured."""
    return (
        skinny_linear(x, weight, bias)
        if has_tiling("skinny_linear", x, weight)
        else F.linear(x, weight, bias)
    )


def gated(
    gate_up: Callable[[Tensor], Tensor], x: Tensor, gate: ClampedGate | GeluGate | None = None
) -> Tensor:
    if gate is not None:
        return torch_kernels.activated(gate_up(x), gate)
    if (
        isinstance(gate_up, Linear)
        and has_plain_weight(gate_up)
        and has_tiling("skinny_gated", x, gate_up.weight)
    ):
        return skinny_gated(x, gate_up.weight, gate_up.bias)
    return silu_mul(gate_up(x))


def has_plain_weight(module: Linear) -> bool:
    """True if the product is that of the weight as it is."""
    return (
        isinstance(module.method, Unquantized | Kept)
        and module.packed is None
        and module.weight_scale_inv is None
    )


def rope_store(
    qkv: Tensor, rotation: Rotation, slots: Tensor, keys: Tensor, values: Tensor, heads: int,
    norms: HeadNorms | None
) -> Tensor:  # fmt: skip
    tables = rotation.positions, rotation.cos, rotation.sin
    q_norm, k_norm, eps = norms or (None, None, 0.0)
    return rope.rope_store(
        qkv, *tables, slots, keys, values, heads, q_norm, k_norm, eps, rotation.interleaved
    )


def latent_store(
    q: Tensor, row: Tensor, rotation: Rotation, slots: Tensor, keys: Tensor, norm: Tensor, eps: float,
    nope: int, out: Tensor | None = None
) -> Tensor:  # fmt: skip
    tables = rotation.positions, rotation.cos, rotation.sin
    return rope.latent_store(q, row, *tables, slots, keys, norm, eps, nope, rotation.interleaved, out)


def by_head(matrices: Tensor, x: Tensor, out: Tensor | None = None) -> Tensor:
    """matrices [heads, K, N], x [T, heads, K] → [T, heads, N]. The library writes rows of any stride: nothing
    is copied before or after."""
    if out is None:
        out = x.new_empty(*x.shape[:2], matrices.shape[2])
    torch.bmm(x.transpose(0, 1), matrices, out=out.transpose(0, 1))
    return out


def route(weight: Tensor, bias: Tensor | None, arch: MoEArch, x: Tensor) -> tuple[Tensor, Tensor]:
    of_choice, of_logits = (bias, None) if arch.router_bias == "choice" else (None, bias)
    routing = arch.top_k, arch.groups, arch.top_groups, arch.renormalise, arch.scale
    return moe_route.route(x, weight, of_choice, *routing, arch.scores == "softmax", of_logits)


def experts(
    experts: RoutedExperts, shared: SharedExpert | None, gate: Gate | None, x: Tensor, weights: Tensor,
    topk_ids: Tensor
) -> Tensor:  # fmt: skip
    matrices, scales = (experts.gate_up, experts.down), (experts.gate_up_scale_inv, experts.down_scale_inv)
    biases, squared, first = (experts.gate_up_bias, experts.down_bias), experts.gate == "relu2", experts.first
    clamped = experts.gate.numbers if isinstance(experts.gate, ClampedGate) else None
    plain = clamped is None and biases[0] is None
    by_row = [
        scale is not None and scale.shape[1] == matrix.shape[1]
        for matrix, scale in zip(matrices, scales, strict=True)
    ]
    if any(by_row):
        if not all(scale is None or row_wise for scale, row_wise in zip(scales, by_row, strict=True)):
            # one of them in blocks: nobody publishes that
            return torch_kernels.experts(experts, shared, gate, x, weights, topk_ids)
        gate_up = matrices[0], scales[0], experts.gate_up_zeros, experts.gate_up_global_scale
        down = matrices[1], scales[1], experts.down_zeros, experts.down_global_scale
        mixed = experts_rows(x, weights, topk_ids, *gate_up, *down, *biases, clamped, squared, first)
        return mixed if shared is None else mixed + torch_kernels.beside(shared, gate, x)
    if shared is None or not plain:
        out = moe_experts.experts(
            x, weights, topk_ids, *matrices, None, None, *scales, None, None, *biases, clamped, squared, first
        )
        return out if shared is None else out + torch_kernels.beside(shared, gate, x)
    beside = (shared.gate_up.weight, shared.down.weight)
    beside_scales = (shared.gate_up.weight_scale_inv, shared.down.weight_scale_inv)
    # The kernel takes the shared expert for as many more experts as it is wide: it must be stored like one,
    # in whole blocks, and have no gate of another form. Its weight is 1: one with a gate is computed by
    # itself.
    alike = all((mine is None) == (other is None) for mine, other in zip(scales, beside_scales, strict=True))
    alike = alike and shared.gate == experts.gate and shared.down.weight.shape[1] % experts.down.shape[2] == 0
    if (
        gate is not None
        or not alike
        or (any(scale is not None for scale in scales) and experts.down.shape[2] % BLOCK[0])
    ):
        out = moe_experts.experts(
            x, weights, topk_ids, *matrices, None, None, *scales, squared=squared, first=first
        )
        return out + torch_kernels.beside(shared, gate, x)
    return moe_experts.experts(
        x, weights, topk_ids, *matrices, *beside, *scales, *beside_scales, squared=squared, first=first
    )


def linear_stored(
    x: Tensor, weight: Tensor, scale: Tensor, zeros: Tensor | None, global_scale: Tensor | None,
    bias: Tensor | None
) -> Tensor:  # fmt: skip
    matrix = QuantisedMatrix(weight, scale, zeros, None, global_scale)
    if matrix.in_blocks:
        return linear_fp8(x, weight, scale, bias)
    if len(x) <= MAX_ROWS:
        return linear_rows(x, weight, scale, zeros, global_scale, bias)
    strips = (matrix.rows(start, min(start + STRIP, len(weight))) for start in range(0, len(weight), STRIP))
    wide = (widen_rows(part.numbers, part.scale, part.zeros, part.global_scale, x.dtype) for part in strips)
    out = torch.cat([F.linear(x, wide_weight) for wide_weight in wide], -1)
    return out if bias is None else out + bias
