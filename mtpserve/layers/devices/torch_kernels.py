"""The kernels of layers in plain torch: the path of a CPU, and what the others are compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as F
from mtpserve_kernels.moe import reference
from mtpserve_kernels.quant import reference as quant
from torch import Tensor

from mtpserve.cache.pool import store
from mtpserve.core.arch.gates import ClampedGate, GeluGate, Ungated
from mtpserve.core.arch.model import MoEArch
from mtpserve.core.heartbeat import PULSE
from mtpserve.core.protocols.attention import Context
from mtpserve.layers.devices import onednn
from mtpserve.layers.kernels import (
    Embed,
    Fuse,
    Gate,
    HeadNorms,
    HeadProducts,
    Kernels,
    LastNorm,
    Layer,
    RoutedExperts,
    RunLayers,
    SharedExpert,
    StoringLayer,
)
from mtpserve.layers.rope import Rotation
from mtpserve.quant.fp8 import BLOCK, dequantize_block, scale_shape
from mtpserve.quant.stored import QuantisedMatrix, widen

# A few small experts over a few rows: multiplying all of them is one call and cheaper than finding out which
# ones are hit.
ALL_EXPERTS, ALL_ROWS = 16, 64
STRIP = 8  # times 128 rows of stored weights that are widened at a time


def torch_kernels() -> Kernels:
    return Kernels(
        add_rms_norm,
        gated,
        rope_store,
        latent_store,
        partial(partial, route),
        partial(partial, experts),
        pack_heads,
        pack_layers,
        lambda embed, fuse, layer, norm: FusedApart(embed, fuse, layer, pack_layers([layer], norm)),
        onednn.pack,
        Int8Matrix,
        linear_stored,
    )


def exact_kernels() -> Kernels:
    """Returns kernels for which a row's numbers do not depend on the other rows of a pass, for passes of
    equal shape (runtime/exact)."""
    return replace(torch_kernels(), pack_experts=partial(partial, experts_row_by_row))


def add_rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x if residual is None else residual + x
    return F.rms_norm(total, weight.shape, weight, eps), total


def gated(
    gate_up: Callable[[Tensor], Tensor], x: Tensor, gate: ClampedGate | GeluGate | None = None
) -> Tensor:
    return activated(gate_up(x), gate)


def silu_mul(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def normed(qkv: Tensor, heads: int, norms: HeadNorms | None) -> Tensor:
    """[T, heads + 2 kv_heads, D] → the same with q and k normed."""
    if norms is None:
        return qkv
    kv_heads = (qkv.shape[1] - heads) // 2
    q, k, v = qkv.split([heads, kv_heads, kv_heads], 1)
    return torch.cat(
        [
            F.rms_norm(q, norms.q.shape, norms.q, norms.eps),
            F.rms_norm(k, norms.k.shape, norms.k, norms.eps),
            v,
        ],
        1,
    )


def rope_store(
    qkv: Tensor, rotation: Rotation, slots: Tensor, keys: Tensor, values: Tensor, heads: int,
    norms: HeadNorms | None
) -> Tensor:  # fmt: skip
    kv_heads, qkv = keys.shape[1], normed(qkv, heads, norms)
    rotated = rotation.rotate(qkv[:, :-kv_heads])  # q and k side by side: one rotation for both
    store(keys, slots, rotated[:, heads:])
    store(values, slots, qkv[:, -kv_heads:])
    return rotated[:, :heads]


def rope_store_apart(
    qk: Tensor, v: Tensor, rotation: Rotation, slots: Tensor, keys: Tensor, values: Tensor, heads: int
) -> Tensor:  # fmt: skip
    """`rope_store` where values are not as wide as keys, on every device: qk [T, heads + kv_heads, D], v [T,
    kv_heads, E]."""
    rotated = rotation.rotate(qk)
    store(keys, slots, rotated[:, heads:])
    store(values, slots, v)
    return rotated[:, :heads]


def latent_store(
    q: Tensor, row: Tensor, rotation: Rotation, slots: Tensor, keys: Tensor, norm: Tensor, eps: float,
    nope: int, out: Tensor | None = None
) -> Tensor:  # fmt: skip
    heads, rank = q.shape[1], len(norm)
    rotated = rotation.rotate(torch.cat([q[..., nope:], row[:, None, rank:]], 1))  # [T, heads + 1, rope]
    latent = F.rms_norm(row[:, :rank], norm.shape, norm, eps)
    store(keys, slots, torch.cat([latent.unsqueeze(1), rotated[:, heads:]], -1))
    return rotated[:, :heads] if out is None else out.copy_(rotated[:, :heads])


def route(weight: Tensor, bias: Tensor | None, arch: MoEArch, x: Tensor) -> tuple[Tensor, Tensor]:
    if arch.scores == "softmax" and bias is not None:
        of_choice, of_logits = (bias, None) if arch.router_bias == "choice" else (None, bias)
        return reference.route_softmax(
            x, weight, of_choice, of_logits, arch.top_k, arch.renormalise, arch.scale
        )
    return reference.route(
        x, weight, bias, arch.top_k, arch.groups, arch.top_groups, arch.renormalise, arch.scale
    )


@dataclass(frozen=True, slots=True)
class Int8Matrix:
    """core.protocols.Packed"""

    weight: Tensor  # [N, K] int8
    scale: Tensor  # [N]
    bias: Tensor | None

    def __call__(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return quant.linear_int8(x, self.weight, self.scale, self.bias).to(dtype)

    def rows(self, ids: Tensor) -> Tensor:
        return self.weight[ids] * self.scale[ids].unsqueeze(1)


def pack_heads(
    kv_up: Tensor, heads: int, nope: int, product: Callable[..., Tensor] | None = None
) -> tuple[HeadProducts, HeadProducts]:  # fmt: skip
    """`product`: of each head's matrix [heads, K, N] with x and `out`; None: by_head."""
    product = product or by_head
    per_head = kv_up.unflatten(0, (heads, -1))
    k_up, v_up = per_head[:, :nope], per_head[:, nope:].mT
    return partial(product, k_up), partial(product, v_up)


def by_head(matrices: Tensor, x: Tensor, out: Tensor | None = None) -> Tensor:
    """matrices [heads, K, N], x [T, heads, K] → [T, heads, N]"""
    products = torch.bmm(x.transpose(0, 1), matrices).transpose(0, 1)
    return products if out is None else out.copy_(products)


def pack_layers(layers: Sequence[Layer], norm: LastNorm) -> RunLayers:
    """Computes one layer after the other, each with its own calls of the other kernels."""

    def run(
        x: Tensor, rotation: Rotation, contexts: Sequence[Context], taps: tuple[int, ...]
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        residual, aux_hidden_states = None, []
        for i, (layer, context) in enumerate(zip(layers, contexts, strict=True)):
            PULSE.beat()
            x, residual = layer(x, residual, rotation, context)
            if i in taps:
                aux_hidden_states.append(residual + x)
        return *norm.add(x, residual), aux_hidden_states

    return run


@dataclass(frozen=True, slots=True)
class FusedApart:
    """layers.kernels.RunFusedLayer: the layer's input is made by calls of its own."""

    embed: Embed
    fuse: Fuse
    layer: StoringLayer
    run: RunLayers

    def __call__(
        self, ids: Tensor, features: Tensor, rotation: Rotation, contexts: Sequence[Context]
    ) -> tuple[Tensor, Tensor]:
        return self.run(self.fuse(self.embed(ids), features), rotation, contexts, ())[:2]

    def store(self, ids: Tensor, features: Tensor, rotation: Rotation, contexts: Sequence[Context]) -> None:
        self.layer.store(self.fuse(self.embed(ids), features), rotation, contexts[0])


def experts(
    experts: RoutedExperts, shared: SharedExpert | None, gate: Gate | None, x: Tensor, weights: Tensor,
    topk_ids: Tensor
) -> Tensor:  # fmt: skip
    routed = all_experts if few(x, experts) else hit_experts
    out = routed(x, weights, topk_ids, experts)
    return out if shared is None else out + beside(shared, gate, x)


def experts_row_by_row(
    experts: RoutedExperts, shared: SharedExpert | None, gate: Gate | None, x: Tensor, weights: Tensor,
    topk_ids: Tensor
) -> Tensor:  # fmt: skip
    routed = all_experts if few(x, experts) else hit_row_by_row
    out = routed(x, weights, topk_ids, experts)
    return out if shared is None else out + beside(shared, gate, x)


def beside(shared: SharedExpert, gate: Gate | None, x: Tensor) -> Tensor:
    out = shared(x)
    return out if gate is None else out * gate(x).sigmoid()


def activated(gate_up: Tensor, gate: ClampedGate | Ungated | GeluGate | None) -> Tensor:
    match gate:
        case None:
            return silu_mul(gate_up)
        case "relu2":
            return F.relu(gate_up).square()
        case "gelu_tanh":
            opening, up = gate_up.chunk(2, -1)
            return F.gelu(opening, approximate="tanh") * up
        case ClampedGate():
            return reference.clamped_gate(gate_up, *gate.numbers)


def few(x: Tensor, experts: RoutedExperts) -> bool:
    return len(experts.gate_up) <= ALL_EXPERTS and len(x) <= ALL_ROWS


def all_experts(x: Tensor, weights: Tensor, topk_ids: Tensor, experts: RoutedExperts) -> Tensor:
    """Computes every expert over every row; what was not chosen is multiplied with zero."""
    number, places = len(experts.gate_up), places_of(topk_ids, experts)
    # [T, experts]
    dense = weights.new_zeros(len(x), number + 1).scatter_(1, places, weights)[:, :number].to(x.dtype)
    numbers = range(number)
    # Stored weights are widened for this product alone; what needs no widening is not copied either.
    gate_up = (
        experts.gate_up
        if experts.gate_up_scale_inv is None
        else torch.stack([gate_up_of(experts, i, x.dtype) for i in numbers])
    )
    down = (
        experts.down
        if experts.down_scale_inv is None
        else torch.stack([down_of(experts, i, x.dtype) for i in numbers])
    )
    both = torch.matmul(x, gate_up.mT)  # [experts, T, 2 size]
    if experts.gate_up_bias is not None and experts.down_bias is not None:
        both += experts.gate_up_bias.unsqueeze(1)
        biases = dense @ experts.down_bias
    inner = activated(both, experts.gate) * dense.T.unsqueeze(-1)
    out = torch.bmm(inner, down.mT).sum(0)
    return out if experts.down_bias is None else out + biases


def hit_experts(x: Tensor, weights: Tensor, topk_ids: Tensor, experts: RoutedExperts) -> Tensor:
    out, places = torch.zeros_like(x), places_of(topk_ids, experts)
    for expert in places.unique().tolist():
        if expert == len(experts.gate_up):
            continue
        rows, choices = (places == expert).nonzero(as_tuple=True)
        biases = [
            None if bias is None else bias[expert] for bias in (experts.gate_up_bias, experts.down_bias)
        ]
        inner = activated(F.linear(x[rows], gate_up_of(experts, expert, x.dtype), biases[0]), experts.gate)
        expert_out = F.linear(inner, down_of(experts, expert, x.dtype), biases[1])
        out.index_add_(0, rows, expert_out * weights[rows, choices, None].to(x.dtype))
    return out


def places_of(topk_ids: Tensor, experts: RoutedExperts) -> Tensor:
    """Returns each expert's place in `experts`; for experts elsewhere the place after the last one."""
    if experts.first is None:
        return topk_ids
    number = len(experts.gate_up)
    places = topk_ids - experts.first
    return torch.where((places >= 0) & (places < number), places, number)


def hit_row_by_row(x: Tensor, weights: Tensor, topk_ids: Tensor, experts: RoutedExperts) -> Tensor:
    """Computes products of one row, in the order of the experts' numbers: the other rows cannot change how it
    is added up."""
    order = topk_ids.argsort(-1)
    alone = zip(
        x.split(1), weights.gather(1, order).split(1), topk_ids.gather(1, order).split(1), strict=True
    )
    return torch.cat([hit_experts(*row, experts) for row in alone])


def gate_up_of(experts: RoutedExperts, expert: int, dtype: torch.dtype) -> Tensor:
    """Returns one expert's gate and up, widened if they have scales. Gate and up begin blocks of their
    own."""
    weight, scales = experts.gate_up[expert], experts.gate_up_scale_inv
    if scales is None:
        return weight
    if scales.shape[1] == len(weight):
        return wide(weight, scales, experts.gate_up_zeros, experts.gate_up_global_scale, expert, dtype)
    size = len(weight) if experts.gate == "relu2" else len(weight) // 2
    by_part = scales[expert].split(scale_shape(size, 1)[0])
    return torch.cat([dequantize_block(*pair) for pair in zip(weight.split(size), by_part, strict=True)]).to(
        dtype
    )


def down_of(experts: RoutedExperts, expert: int, dtype: torch.dtype) -> Tensor:
    weight, scales = experts.down[expert], experts.down_scale_inv
    if scales is None:
        return weight
    return wide(weight, scales, experts.down_zeros, experts.down_global_scale, expert, dtype)


def wide(
    numbers: Tensor, scales: Tensor, zeros: Tensor | None, global_scales: Tensor | None, expert: int,
    dtype: torch.dtype
) -> Tensor:  # fmt: skip
    """numbers of one expert; scales, zeros and global scales of all."""
    of_one = (None if tensor is None else tensor[expert] for tensor in (zeros, None, global_scales))
    matrix = QuantisedMatrix(numbers, scales[expert], *of_one)
    return widen(matrix, matrix.columns).to(dtype)


def linear_stored(
    x: Tensor, weight: Tensor, scale: Tensor, zeros: Tensor | None, global_scale: Tensor | None,
    bias: Tensor | None
) -> Tensor:  # fmt: skip
    """Widens the weights for each product anew, a strip at a time: slower than a widened copy, and no larger
    than the stored weights."""
    matrix, strip = QuantisedMatrix(weight, scale, zeros, None, global_scale), STRIP * BLOCK[0]
    strips = (widen(matrix.rows(start, start + strip), x.shape[1]) for start in range(0, len(weight), strip))
    out = torch.cat([F.linear(x, rows.to(x.dtype)) for rows in strips], -1)
    return out if bias is None else out + bias
