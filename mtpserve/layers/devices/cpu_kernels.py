"""The kernels of layers from mtpserve_kernels.cpu: C++, one object per instruction set.

Each row's numbers depend on that row alone, whatever shares the pass: see each op's docstring. Weights are
packed in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import Array
from dataclasses import dataclass, replace
from functools import partial
from typing import cast
from weakref import ref

import torch
from mtpserve_kernels.cpu import fused, layers as stacks, linear, lora, matrices, moe
from mtpserve_kernels.cpu.ranks import Exchange
from mtpserve_kernels.moe.reference import Clamped
from torch import Tensor

from mtpserve.attention.contexts import Contexts
from mtpserve.attention.cpu import CPUSpans
from mtpserve.cache.stores import Stores
from mtpserve.core.arch.gates import ClampedGate, GeluGate, Ungated
from mtpserve.core.arch.model import MoEArch
from mtpserve.core.heartbeat import PULSE
from mtpserve.core.protocols.attention import Context
from mtpserve.layers.decoder import DecoderLayer
from mtpserve.layers.devices.torch_kernels import (
    FusedApart,
    activated,
    beside,
    pack_layers as one_by_one,
    torch_kernels,
)
from mtpserve.layers.embedding import Embedding
from mtpserve.layers.fusion import Fusion
from mtpserve.layers.kernels import (
    Embed,
    Fuse,
    Gate,
    HeadNorms,
    HeadProducts,
    Kernels,
    LastNorm,
    Layer,
    MixExperts,
    Route,
    RoutedExperts,
    RunFusedLayer,
    RunLayers,
    SharedExpert,
    StoringLayer,
)
from mtpserve.layers.linear import Linear
from mtpserve.layers.mixers.attention import GQA
from mtpserve.layers.mixers.mla import MLA
from mtpserve.layers.mlp import MLP
from mtpserve.layers.moe import MoE
from mtpserve.layers.norm import RMSNorm
from mtpserve.layers.rope import Rotation

MANY_ROWS = 64  # with so many a layer takes so long that a call from Python is nothing


def cpu_kernels() -> Kernels:
    return replace(
        torch_kernels(),
        add_rms_norm=fused.add_rms_norm,
        gated=gated,
        rope_store=rope_store,
        latent_store=latent_store,
        pack_router=pack_router,
        pack_experts=pack_experts,
        pack_heads=pack_heads,
        pack_layers=pack_layers,
        pack_fused_layer=pack_fused_layer,
        pack=pack,
        pack_int8=pack_int8,
        packs_in_place=True,
        add_lora=lora.add_lora,
    )


def gated(
    gate_up: Callable[[Tensor], Tensor], x: Tensor, gate: ClampedGate | GeluGate | None = None
) -> Tensor:
    if gate == "gelu_tanh":
        return activated(gate_up(x), gate)
    if isinstance(gate_up, Linear) and isinstance(gate_up.packed, PanelMatrix) and gate_up.packed.gates:
        return linear.linear(x, gate_up.packed.matrix, gated=True, clamped=clamp_of(gate))
    return fused.silu_mul(gate_up(x)) if gate is None else activated(gate_up(x), gate)


def clamp_of(gate: ClampedGate | Ungated | None) -> Clamped | None:
    return gate.numbers if isinstance(gate, ClampedGate) else None


def rope_store(
    qkv: Tensor, rotation: Rotation, slots: Tensor, keys: Tensor, values: Tensor, heads: int,
    norms: HeadNorms | None
) -> Tensor:  # fmt: skip
    tables = rotation.positions, rotation.cos, rotation.sin
    q_norm, k_norm, eps = norms or (None, None, 0.0)
    return fused.rope_store(
        qkv, *tables, slots, keys, values, heads, q_norm, k_norm, eps, rotation.interleaved
    )


def latent_store(
    q: Tensor, row: Tensor, rotation: Rotation, slots: Tensor, keys: Tensor, norm: Tensor, eps: float,
    nope: int, out: Tensor | None = None
) -> Tensor:  # fmt: skip
    tables = rotation.positions, rotation.cos, rotation.sin
    return fused.latent_store(q, row, *tables, slots, keys, norm, eps, nope, rotation.interleaved, out)


def pack_router(weight: Tensor, bias: Tensor | None, arch: MoEArch) -> Route:
    routing = arch.top_k, arch.groups, arch.top_groups, arch.renormalise, arch.scale
    router_bias = None if bias is None else bias.detach()
    of_choice, of_logits = (router_bias, None) if arch.router_bias == "choice" else (None, router_bias)
    return PanelRouter(
        moe.pack_router(weight.detach(), of_choice, *routing, arch.scores == "softmax", of_logits)
    )


@dataclass(frozen=True, slots=True)
class PanelRouter:
    """layers.kernels.Route"""

    router: moe.Router

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return moe.route(x, self.router)


def pack_experts(experts: RoutedExperts, shared: SharedExpert | None, gate: Gate | None) -> MixExperts:
    """float8 experts are not packed: engine/startup/compute leaves them to plain torch."""
    assert experts.gate_up_scale_inv is None and experts.down_scale_inv is None
    routed = moe.pack_expert_pair(experts.gate_up, experts.down, experts.gate_up_bias, experts.down_bias)
    clamped = clamp_of(experts.gate)
    factory = partial(
        moe.experts_of, routed, clamped=clamped, squared=experts.gate == "relu2", first=experts.first or 0
    )
    if shared is None:
        return PanelExperts(factory(None), None)
    if (matrices := shared_matrices(shared)) is None:
        return PanelExperts(factory(None), partial(beside, shared, gate))
    return PanelExperts(factory(matrices, None if gate is None else matrix_of(cast(Linear, gate))), None)


def shared_matrices(shared: SharedExpert) -> tuple[linear.Matrix, linear.Matrix] | None:
    """Returns gate_up and down of the shared expert. None: its size is not one of whole panels, or its gate
    has limits, and it is computed by itself."""
    matrices = matrix_of(shared.gate_up), matrix_of(shared.down)
    return None if matrices[1].inputs % linear.PANEL or isinstance(shared.gate, ClampedGate) else matrices


@dataclass(frozen=True, slots=True)
class PanelExperts:
    """layers.kernels.MixExperts"""

    experts: moe.Experts
    apart: Callable[[Tensor], Tensor] | None  # a shared expert that is not among them

    def __call__(self, x: Tensor, weights: Tensor, topk_ids: Tensor) -> Tensor:
        out = moe.mix_experts(x, weights, topk_ids, self.experts)
        return out if self.apart is None else out + self.apart(x)


def pack_heads(kv_up: Tensor, heads: int, nope: int) -> tuple[HeadProducts, HeadProducts]:
    k_up, v_up = matrices.pack_heads(kv_up, heads, nope)
    return HeadMatrices(k_up), HeadMatrices(v_up)


@dataclass(frozen=True, slots=True)
class HeadMatrices:
    """layers.kernels.HeadProducts"""

    packed: matrices.Matrices

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        return matrices.heads_linear(x, self.packed, out)


def pack(weight: Tensor, bias: Tensor | None, lookups: bool) -> PanelMatrix:
    """core.protocols.linear.Pack"""
    return PanelMatrix(linear.pack(weight, bias))


def pack_int8(weight: Tensor, scale: Tensor, bias: Tensor | None) -> PanelMatrix:
    """core.protocols.PackInt8"""
    return PanelMatrix(linear.pack_int8(weight, scale, bias))


@dataclass(frozen=True, slots=True)
class PanelMatrix:
    """core.protocols.Packed"""

    matrix: linear.Matrix

    @property
    def gates(self) -> bool:
        """True if it can be [gate; up] of a gated product: each must be whole panels."""
        return bool(self.matrix.outputs % (2 * linear.PANEL) == 0)

    def __call__(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        return linear.linear(x, self.matrix, dtype)

    def rows(self, ids: Tensor) -> Tensor:
        return linear.rows(self.matrix, ids)


def pack_layers(layers: Sequence[Layer], norm: LastNorm) -> RunLayers:
    """Packs all layers in one call. Layers of other kinds are computed one by one, and so are those of ranks
    without shared memory."""
    try:
        described, ranks = [described_layer(layer) for layer in layers], exchange_of(layers)
    except NotDescribed:
        return one_by_one(layers, norm)
    return LayerStack(layers, norm, (stacks.Layer * len(layers))(*described), ranks)


def exchange_of(layers: Sequence[Layer]) -> Exchange | None:
    """Returns the exchange between ranks; None: no other rank has a part of them."""
    ranks = cast("GQA | MLA", cast(DecoderLayer, layers[0]).attention).kernels.ranks
    if ranks.size == 1:
        return None
    if not isinstance(ranks, Exchange):
        raise NotDescribed
    return ranks


class NotDescribed(Exception):
    """A part that the op for whole layers does not have."""


class LayerStack:
    """layers.kernels.RunLayers. `described` points to what is in `layers` and `norm`."""

    def __init__(
        self, layers: Sequence[Layer], norm: LastNorm, described: Array[stacks.Layer], ranks: Exchange | None
    ) -> None:
        self.layers, self.norm, self.described, self.ranks = layers, norm, described, ranks
        self.last = fused.norm_of(norm.weight, norm.eps)
        # the engine's stores, weakly, which `contexts` belong to
        self.stores: Callable[[], Stores | None] = lambda: None
        self.contexts = stacks.Contexts([], [])

    def __call__(
        self, x: Tensor, rotation: Rotation, contexts: Sequence[Context], taps: tuple[int, ...]
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        self.plan(contexts)
        angles, residual, aux_hidden_states, first = angles_of(rotation), None, [], 0
        # Many rows are computed layer by layer, so that it is seen that the engine gets on; the numbers are
        # the same.
        stops = range(1, len(self.described)) if x.shape[0] >= MANY_ROWS else [tap + 1 for tap in taps]
        for end in sorted({*stops, len(self.described)}):
            PULSE.beat()
            last = self.last if end == len(self.described) else None
            x, residual = stacks.run(
                self.described, slice(first, end), self.contexts, x, residual, angles, last, self.ranks
            )
            if end - 1 in taps:
                aux_hidden_states.append(residual if last else residual + x)
            first = end
        assert residual is not None
        return x, residual, aux_hidden_states

    def plan(self, contexts: Sequence[Context]) -> None:
        """What `contexts` say is in `self.contexts` then."""
        cpu_contexts = cast("Contexts[CPUSpans]", contexts)
        if self.stores() is not cpu_contexts.stores:
            self.stores, self.contexts = ref(cpu_contexts.stores), contexts_of(cpu_contexts.stores)
        self.contexts.plan(
            [(attention.spans, attention.slots) for attention in cpu_contexts.batch_attentions]
        )


def angles_of(rotation: Rotation) -> fused.Rotation:
    return fused.rotation_of(rotation.positions, rotation.cos, rotation.sin, rotation.interleaved)


def pack_fused_layer(embed: Embed, fuse: Fuse, layer: StoringLayer, norm: LastNorm) -> RunFusedLayer:
    """Embedding, fusion and layer in one call."""
    run = pack_layers([layer], norm)
    if (
        not isinstance(run, LayerStack)
        or type(fuse) is not Fusion
        or not isinstance(fuse.project.packed, PanelMatrix)
    ):
        return FusedApart(embed, fuse, layer, run)
    norms = norm_of(fuse.embedding_norm), norm_of(fuse.hidden_norm)
    return FusedStack(run, embed, fuse, stacks.Fusion(*norms, matrix_of(fuse.project), fuse.embedding_first))


@dataclass(frozen=True, slots=True)
class FusedStack:
    """layers.kernels.RunFusedLayer. `described` points to what is in `fuse`."""

    stack: LayerStack
    embed: Embed
    fuse: Fusion
    described: stacks.Fusion

    def __call__(
        self, ids: Tensor, features: Tensor, rotation: Rotation, contexts: Sequence[Context]
    ) -> tuple[Tensor, Tensor]:
        out = self.run(ids, features, rotation, contexts, self.stack.last)
        assert out is not None
        return out

    def store(self, ids: Tensor, features: Tensor, rotation: Rotation, contexts: Sequence[Context]) -> None:
        self.run(ids, features, rotation, contexts, None)

    def run(
        self,
        ids: Tensor,
        features: Tensor,
        rotation: Rotation,
        contexts: Sequence[Context],
        last: fused.Norm | None,
    ) -> tuple[Tensor, Tensor] | None:
        stack = self.stack
        stack.plan(contexts)
        PULSE.beat()
        # A table that a tied head has packed, or of which each rank has a part, is looked up by itself.
        table = self.embed.table if isinstance(self.embed, Embedding) else None
        embedding, places = (self.embed(ids), None) if table is None else (table, ids)
        parts = stack.described, stack.contexts, self.described
        return stacks.run_fused(*parts, embedding, places, features, angles_of(rotation), last, stack.ranks)


def contexts_of(stores: Stores) -> stacks.Contexts:
    pools = [(stores.stores[location.store].pool, location.layer) for location in stores.places]
    return stacks.Contexts(
        [(pool.keys(layer), pool.values(layer)) for pool, layer in pools],
        [location.store for location in stores.places],
    )


def described_layer(layer: Layer) -> stacks.Layer:
    if (
        type(layer) is not DecoderLayer
        or type(layer.attention_norm) is not RMSNorm
        or type(layer.mlp_norm) is not RMSNorm
    ):
        raise NotDescribed
    stack_layer = stacks.Layer(attention_norm=norm_of(layer.attention_norm), mlp_norm=norm_of(layer.mlp_norm))
    stack_layer.attention = described_attention(layer.attention)
    if isinstance(layer.mlp, MLP) and layer.mlp.gated:
        stack_layer.gate_up, stack_layer.down = matrix_of(layer.mlp.gate_up), matrix_of(layer.mlp.down)
        if not cast(PanelMatrix, layer.mlp.gate_up.packed).gates or layer.mlp.gate is not None:
            raise NotDescribed
    elif (
        isinstance(layer.mlp, MoE)
        and isinstance(layer.mlp.route, PanelRouter)
        and isinstance(layer.mlp.mix, PanelExperts)
    ):
        if layer.mlp.mix.apart is not None or layer.mlp.latent_in is not None:
            raise NotDescribed
        if layer.mlp.kernels.routing is not None:  # the op does not say which experts it has chosen
            raise NotDescribed
        stack_layer.router, stack_layer.experts = layer.mlp.route.router, layer.mlp.mix.experts
    else:
        raise NotDescribed
    return stack_layer


def described_attention(module: object) -> stacks.AttentionLayer:
    attention = stacks.AttentionLayer()
    if type(module) is GQA and module.ordinary:
        out = matrix_of(module.out)
        attention.out, attention.heads, attention.dim = out, module.heads, out.inputs // module.heads
        attention.kv_heads = (module.all_heads - module.heads) // 2
        setattr(attention, "in", matrix_of(module.qkv))
        attention.sinks = None if module.sinks is None else module.sinks.data_ptr()
        if module.q_norm is not None and module.k_norm is not None:
            attention.q_norm, attention.kv_norm = norm_of(module.q_norm), norm_of(module.k_norm)
    elif type(module) is MLA:
        mla = module.mla
        setattr(attention, "in", matrix_of(module.down))
        attention.out, attention.heads, attention.kv_norm = (
            matrix_of(module.out),
            module.heads,
            norm_of(module.kv_norm),
        )
        if module.q_norm is not None and module.q_up is not None:
            attention.q_norm, attention.q_up, attention.q_rank = (
                norm_of(module.q_norm),
                matrix_of(module.q_up),
                mla.q_rank,
            )
        attention.k_up, attention.v_up = (
            cast(HeadMatrices, product).packed for product in (module.k_up, module.v_up)
        )
        attention.kv_rank, attention.nope, attention.rope, attention.value = (
            mla.kv_rank,
            mla.nope,
            mla.rope,
            mla.value,
        )
    else:
        raise NotDescribed
    return attention


def norm_of(module: RMSNorm) -> fused.Norm:
    return fused.norm_of(module.weight, module.eps)


def matrix_of(module: Linear) -> linear.Matrix:
    if not isinstance(module.packed, PanelMatrix):
        raise NotDescribed
    return module.packed.matrix
