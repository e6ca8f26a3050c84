"""The kernels of layers from mtpserve_kernels. Imported only where they run: triton takes a second to import."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from mtpserve_kernels.fused import rope
from mtpserve_kernels.fused.norm import add_rms_norm
from mtpserve_kernels.fused.silu import silu_mul
from mtpserve_kernels.moe import experts as moe_experts, route as moe_route
from mtpserve_kernels.quant.linear_fp8 import linear_fp8
from torch import Tensor

from mtpserve.core.arch import MoEArch
from mtpserve.layers import torch_kernels
from mtpserve.layers.kernels import Gate, HeadNorms, Kernels, RoutedExperts, SharedExpert
from mtpserve.layers.rope import Rotation
from mtpserve.quant.fp8 import BLOCK


def triton_kernels() -> Kernels:
    return replace(
        torch_kernels.torch_kernels(),
        add_rms_norm=add_rms_norm,
        gated=gated,
        rope_store=rope_store,
        latent_store=latent_store,
        pack_router=partial(partial, route),
        pack_experts=partial(partial, experts),
        pack=lambda *_: None,
        linear_fp8=linear_fp8,
    )


def gated(gate_up: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return silu_mul(gate_up(x))


def rope_store(
    qkv: Tensor, rotation: Rotation, slots: Tensor, keys: Tensor, values: Tensor, heads: int, norms: HeadNorms | None
) -> Tensor:  # fmt: skip
    tables = rotation.positions, rotation.cos, rotation.sin
    q_norm, k_norm, eps = norms or (None, None, 0.0)
    return rope.rope_store(qkv, *tables, slots, keys, values, heads, q_norm, k_norm, eps, rotation.interleaved)


def latent_store(
    q: Tensor, row: Tensor, rotation: Rotation, slots: Tensor, keys: Tensor, norm: Tensor, eps: float, nope: int
) -> Tensor:  # fmt: skip
    tables = rotation.positions, rotation.cos, rotation.sin
    return rope.latent_store(q, row, *tables, slots, keys, norm, eps, nope, rotation.interleaved)


def route(weight: Tensor, bias: Tensor | None, arch: MoEArch, x: Tensor) -> tuple[Tensor, Tensor]:
    return moe_route.route(x, weight, bias, arch.top_k, arch.groups, arch.top_groups, arch.renormalise, arch.scale)


def experts(
    experts: RoutedExperts, shared: SharedExpert | None, gate: Gate | None, x: Tensor, weights: Tensor, chosen: Tensor
) -> Tensor:  # fmt: skip
    matrices, scales = (experts.gate_up, experts.down), (experts.gate_up_scale_inv, experts.down_scale_inv)
    if shared is None:
        return moe_experts.experts(x, weights, chosen, *matrices, None, None, *scales)
    beside = (shared.gate_up.weight, shared.down.weight)
    beside_scales = (shared.gate_up.weight_scale_inv, shared.down.weight_scale_inv)
    # The kernel takes the shared expert for as many more experts as it is wide: it must be stored like one, in whole blocks. Its weight
    # is 1: one with a gate is computed by itself.
    alike = all((mine is None) == (other is None) for mine, other in zip(scales, beside_scales, strict=True))
    if gate is not None or not alike or (any(scale is not None for scale in scales) and experts.down.shape[2] % BLOCK[0]):
        return moe_experts.experts(x, weights, chosen, *matrices, None, None, *scales) + torch_kernels.beside(shared, gate, x)
    return moe_experts.experts(x, weights, chosen, *matrices, *beside, *scales, *beside_scales)
