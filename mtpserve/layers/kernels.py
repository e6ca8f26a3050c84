"""What layers compute with, as a record of functions that is chosen once and handed to each layer when it is
made.

There is one record per way to compute: plain torch (torch_kernels.py) is the reference, and what runs where
nothing else does; a GPU's are in triton_kernels.py, a CPU's in cpu_kernels.py. A layer calls the same
functions whichever it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch.nn.functional as F
from mtpserve_kernels.lora.reference import RowAdapters, add_lora
from torch import Tensor

from mtpserve.core.arch.gates import ClampedGate, GeluGate, Ungated
from mtpserve.core.arch.model import MoEArch
from mtpserve.core.protocols.attention import Context
from mtpserve.core.protocols.linear import LinearStored, Pack, PackInt8
from mtpserve.core.protocols.parallel import ALONE, Ranks, SpreadExperts
from mtpserve.core.registry import Registry
from mtpserve.layers.linear import Linear
from mtpserve.layers.rope import Rotation

# x [T, H], residual [T, H] or None, weight [H], eps → (rms_norm(x + residual) * weight, x + residual)
AddRMSNorm = Callable[[Tensor, Tensor | None, Tensor, float], tuple[Tensor, Tensor]]


class Residual(Protocol):
    """What a layer's output is still to be added to: a tensor [T, H], or streams that each take a part of
    it."""

    def __add__(self, x: Tensor, /) -> Tensor: ...


# gate_up: a layers.linear.Linear with 2 size outputs; x [T, H]; the gate → [T, size]: silu of its first half
# times the second, or as the gate has it
Gated = Callable[[Callable[[Tensor], Tensor], Tensor, ClampedGate | GeluGate | None], Tensor]


class HeadNorms(NamedTuple):
    """Weights [D] of the norms of each head."""

    q: Tensor
    k: Tensor
    eps: float


# qkv [T, heads + 2 kv_heads, D], rotation, slots [T], keys, values, heads, norms → rotated q [T, heads, D].
# Rotated k, and v, are stored in `slots` of keys and values. q and k are normed before.
RopeStore = Callable[[Tensor, Rotation, Tensor, Tensor, Tensor, int, HeadNorms | None], Tensor]

# q [T, heads, nope + rope], row [T, rank + rope], rotation, slots [T], keys [slots, 1, rank + rope], norm
# [rank], eps, nope, out → the rotated part of q [T, heads, rope], in `out` if that is given, which may be a
# part of something wider. The latent, normed, and the rotated key after it are stored in `slots` of keys.
LatentStore = Callable[[Tensor, Tensor, Rotation, Tensor, Tensor, Tensor, float, int, Tensor | None], Tensor]

# x [T, H] → weights [T, top_k] float32, experts [T, top_k]
Route = Callable[[Tensor], tuple[Tensor, Tensor]]

# weight [E, H] and bias [E] float32, after loading; a bias where `arch.router_bias` says what it is. It may
# reorder the memory of the weight, as core.protocols.linear.Pack.
PackRouter = Callable[[Tensor, Tensor | None, MoEArch], Route]


class SharedExpert(Protocol):
    """layers.mlp.MLP, with a gate if the experts have one. A kernel may read the matrices, or call it."""

    @property
    def gate_up(self) -> Linear: ...

    @property
    def down(self) -> Linear: ...

    @property
    def gate(self) -> ClampedGate | Ungated | GeluGate | None: ...

    def __call__(self, x: Tensor, /) -> Tensor: ...


# layers.linear.Linear with one output: the shared expert's is multiplied with its sigmoid
Gate = Callable[[Tensor], Tensor]


class RoutedExperts(Protocol):
    """layers.moe.Experts: gate_up [E, 2 size, H], or up [E, size, H] where there is no gate, and down [E, H,
    size]; the scales are None for what has none, see quant/stored.py, the biases [E, 2 size] and [E, H] both
    or neither."""

    @property
    def gate_up(self) -> Tensor: ...

    @property
    def down(self) -> Tensor: ...

    @property
    def gate_up_scale_inv(self) -> Tensor | None: ...

    @property
    def down_scale_inv(self) -> Tensor | None: ...

    @property
    def gate_up_bias(self) -> Tensor | None: ...

    @property
    def down_bias(self) -> Tensor | None: ...

    @property
    def gate(self) -> ClampedGate | Ungated | None: ...

    @property
    def gate_up_zeros(self) -> Tensor | None: ...

    @property
    def down_zeros(self) -> Tensor | None: ...

    @property
    def gate_up_global_scale(self) -> Tensor | None: ...

    @property
    def down_global_scale(self) -> Tensor | None: ...

    @property
    def first(self) -> int | None:
        """Its number, where experts with numbers below and above are elsewhere and add nothing here. None:
        all are here."""
        ...


# x [T, H], weights and topk_ids [T, K] → [T, H]: the outputs of these experts by their weights, and the
# shared expert's
MixExperts = Callable[[Tensor, Tensor, Tensor], Tensor]

# Packs experts after loading, also the shared expert and its gate. It may reorder the memory of the experts'
# weights, as core.protocols.linear.Pack.
PackExperts = Callable[[RoutedExperts, SharedExpert | None, Gate | None], MixExperts]

# x [T, heads, K], out → [T, heads, N], in `out` if that is given: each head's rows by the head's own matrix.
# Both may be parts of something wider.
HeadProducts = Callable[[Tensor, Tensor | None], Tensor]

# kv_up [heads * (nope + value), rank], heads, nope → each head's products with its two parts, from nope
# numbers to rank and from rank to value. nope may be 0: only the second one is of use then. It may reorder
# kv_up's memory, as core.protocols.linear.Pack.
PackHeads = Callable[[Tensor, int, int], tuple[HeadProducts, HeadProducts]]


# x [T, H], or of several residual streams [T, streams * H]; rotation, contexts, taps → the norm of the last
# layer's output [T, H], that output, and the outputs of the layers `taps`, all streams of each side by side
RunLayers = Callable[
    [Tensor, Rotation, Sequence[Context], tuple[int, ...]], tuple[Tensor, Tensor, list[Tensor]]
]


# layers.decoder.DecoderLayer: x [T, H], residual, rotation, context → the layer's output, and the residual
Layer = Callable[[Tensor, Residual | None, Rotation, Context], tuple[Tensor, Residual]]


class StoringLayer(Protocol):
    """A Layer whose keys and values can be stored alone."""

    def __call__(
        self, x: Tensor, residual: Residual | None, rotation: Rotation, context: Context, /
    ) -> tuple[Tensor, Residual]: ...

    def store(self, x: Tensor, rotation: Rotation, context: Context, /) -> None:
        """x [T, H]: what other rows need of these, keys and values, and no output."""
        ...


class LastNorm(Protocol):
    """layers.norm.RMSNorm"""

    @property
    def weight(self) -> Tensor: ...

    @property
    def eps(self) -> float: ...

    def add(self, x: Tensor, residual: Residual | None, /) -> tuple[Tensor, Tensor]: ...


# Packs all layers of a model, after they were loaded, and the norm after them.
PackLayers = Callable[[Sequence[Layer], LastNorm], RunLayers]

# layers.embedding.Embedding: [T] → [T, H], of several streams [T, streams * H]
Embed = Callable[[Tensor], Tensor]


# layers.fusion.Fusion, or StreamFusion: embedding, hidden → the layer's input
Fuse = Callable[[Tensor, Tensor], Tensor]


class RunFusedLayer(Protocol):
    """A layer whose input is made of a token and a hidden state for each row (layers.fusion): ids [T] and
    features [T, H], of several streams [T, streams * H]."""

    def __call__(
        self, ids: Tensor, features: Tensor, rotation: Rotation, contexts: Sequence[Context], /
    ) -> tuple[Tensor, Tensor]:
        """→ the norm of the layer's output [T, H], and that output; `contexts` has one."""
        ...

    def store(
        self, ids: Tensor, features: Tensor, rotation: Rotation, contexts: Sequence[Context], /
    ) -> None:
        """Stores as StoringLayer.store does."""
        ...


# Packs one layer, as PackLayers does. The embedding is the trunk's, which may not be loaded yet.
PackFusedLayer = Callable[[Embed, Fuse, StoringLayer, LastNorm], RunFusedLayer]


# x [T, K], y [T, N], the rows' adapters, a [slots, parts R, K], b [slots, R, N], outputs of each part → y,
# changed in place: see mtpserve_kernels.lora.reference
AddLoRA = Callable[[Tensor, Tensor, RowAdapters, Tensor, Tensor, Sequence[int]], Tensor]
# a layer's number in ModelArch.layers, topk_ids [T, K]
NoteExperts = Callable[[int, Tensor], None]


@dataclass(frozen=True, slots=True)
class Kernels:
    add_rms_norm: AddRMSNorm
    gated: Gated
    rope_store: RopeStore
    latent_store: LatentStore
    pack_router: PackRouter
    pack_experts: PackExperts
    pack_heads: PackHeads
    pack_layers: PackLayers
    pack_fused_layer: PackFusedLayer
    pack: Pack
    pack_int8: PackInt8
    linear_stored: LinearStored
    # the product of weights as they are in the checkpoint
    linear: Callable[[Tensor, Tensor, Tensor | None], Tensor] = F.linear
    packs_in_place: bool = False  # a parameter's own numbers are in another order once they are packed
    add_lora: AddLoRA = add_lora
    ranks: Ranks = ALONE  # what sums and gathers the parts of products that ranks share
    # what reaches the routed experts where they are spread over several engines
    spread: SpreadExperts | None = None
    routing: NoteExperts | None = None  # what wants to know which experts routers choose


KERNELS: Registry[Callable[[], Kernels]] = Registry(
    "kernels",
    {
        "torch": "mtpserve.layers.devices.torch_kernels:torch_kernels",
        "exact": "mtpserve.layers.devices.torch_kernels:exact_kernels",
        "triton": "mtpserve.layers.devices.triton_kernels:triton_kernels",
        "cpu": "mtpserve.layers.devices.cpu_kernels:cpu_kernels",
    },
)
