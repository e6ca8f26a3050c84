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
from torch import Tensor

from mtpserve.core.arch.model import ClampedGate, MoEArch, Ungated
from mtpserve.core.protocols.attention import Context
from mtpserve.core.protocols.linear import LinearStored, Pack, PackInt8
from mtpserve.core.protocols.parallel import ALONE, Ranks, SpreadExperts
from mtpserve.core.registry import Registry
from mtpserve.layers.rope import Rotation


class AddRMSNorm(Protocol):
    def __call__(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, /
    ) -> tuple[Tensor, Tensor]:
        """x [T, H], residual [T, H] or None, weight [H] → (rms_norm(x + residual) * weight, x + residual)."""
        ...


class Residual(Protocol):
    """What a layer's output is still to be added to: a tensor [T, H], or streams that each take a part of
    it."""

    def __add__(self, x: Tensor, /) -> Tensor: ...


class Gated(Protocol):
    def __call__(
        self, gate_up: Callable[[Tensor], Tensor], x: Tensor, gate: ClampedGate | None = None, /
    ) -> Tensor:
        """gate_up: a layers.linear.Linear with 2 size outputs; x [T, H] → [T, size]: silu of its first half
        times the second, or as `gate` has it."""
        ...


class HeadNorms(NamedTuple):
    """Weights [D] of the norms of each head."""

    q: Tensor
    k: Tensor
    eps: float


class RopeStore(Protocol):
    def __call__(
        self,
        qkv: Tensor,
        rotation: Rotation,
        slots: Tensor,
        keys: Tensor,
        values: Tensor,
        heads: int,
        norms: HeadNorms | None,
        /,
    ) -> Tensor:
        """qkv [T, heads + 2 kv_heads, D] → rotated q [T, heads, D]; rotated k, and v, are stored in `slots`
        [T] of keys and values. q and k are normed before."""
        ...


class LatentStore(Protocol):
    def __call__(
        self, q: Tensor, row: Tensor, rotation: Rotation, slots: Tensor, keys: Tensor, norm: Tensor,
        eps: float, nope: int,
        out: Tensor | None = None, /,
    ) -> Tensor:  # fmt: skip
        """q [T, heads, nope + rope], row [T, rank + rope] → the rotated part of q [T, heads, rope], in `out`
        if that is given, which may be a part of something wider; the latent, normed with `norm` [rank] and
        `eps`, and the rotated key after it are stored in `slots` [T] of `keys` [slots, 1, rank + rope]."""
        ...


class Route(Protocol):
    def __call__(self, x: Tensor, /) -> tuple[Tensor, Tensor]:
        """x [T, H] → weights [T, top_k] float32, experts [T, top_k]."""
        ...


class PackRouter(Protocol):
    def __call__(self, weight: Tensor, bias: Tensor | None, arch: MoEArch, /) -> Route:
        """weight [E, H] and bias [E] float32, after loading; a bias where `arch.router_bias` says what it is.
        May reorder the memory of the weight, as core.protocols.linear.Pack."""
        ...


class Matrix(Protocol):
    """A matrix, and its scales and zeros if it is stored with them."""

    @property
    def weight(self) -> Tensor: ...

    @property
    def weight_scale_inv(self) -> Tensor | None: ...


class SharedExpert(Protocol):
    """layers.mlp.MLP, with a gate if the experts have one. A kernel may read the matrices, or call it."""

    @property
    def gate_up(self) -> Matrix: ...

    @property
    def down(self) -> Matrix: ...

    @property
    def gate(self) -> ClampedGate | Ungated | None: ...

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
    def first(self) -> int | None:
        """Its number, where experts with numbers below and above are elsewhere and add nothing here. None:
        all are here."""
        ...


class MixExperts(Protocol):
    def __call__(self, x: Tensor, weights: Tensor, topk_ids: Tensor, /) -> Tensor:
        """x [T, H], weights and topk_ids [T, K] → [T, H]: the chosen experts' outputs by their weights, and
        the shared expert's."""
        ...


class PackExperts(Protocol):
    def __call__(
        self, experts: RoutedExperts, shared: SharedExpert | None, gate: Gate | None, /
    ) -> MixExperts:
        """Packs experts after loading, also the shared expert and its gate. May reorder the memory of the
        experts' weights, as core.protocols.linear.Pack."""
        ...


class HeadProducts(Protocol):
    def __call__(self, x: Tensor, out: Tensor | None = None, /) -> Tensor:
        """x [T, heads, K] → [T, heads, N], in `out` if that is given: each head's rows by the head's own
        matrix. Both may be parts of something wider."""
        ...


class PackHeads(Protocol):
    def __call__(self, kv_up: Tensor, heads: int, nope: int, /) -> tuple[HeadProducts, HeadProducts]:
        """kv_up [heads * (nope + value), rank] → each head's products with its two parts, from nope numbers
        to rank and from rank to value. nope may be 0: only the second one is of use then. May reorder kv_up's
        memory, as core.protocols.linear.Pack."""
        ...


class Layer(Protocol):
    """layers.decoder.DecoderLayer"""

    def __call__(
        self, x: Tensor, residual: Residual | None, rotation: Rotation, context: Context, /
    ) -> tuple[Tensor, Residual]: ...


class RunLayers(Protocol):
    def __call__(
        self, x: Tensor, rotation: Rotation, contexts: Sequence[Context], taps: tuple[int, ...], /
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """x [T, H], or of several residual streams [T, streams * H] → the norm of the last layer's output [T,
        H], that output, and the outputs of the layers `taps`, all streams of each side by side."""
        ...


class LastNorm(Protocol):
    """layers.norm.RMSNorm"""

    @property
    def weight(self) -> Tensor: ...

    @property
    def eps(self) -> float: ...

    def add(self, x: Tensor, residual: Residual | None, /) -> tuple[Tensor, Tensor]: ...


class PackLayers(Protocol):
    def __call__(self, layers: Sequence[Layer], norm: LastNorm, /) -> RunLayers:
        """Packs all layers of a model, after they were loaded, and the norm after them."""
        ...


class StoringLayer(Layer, Protocol):
    def store(self, x: Tensor, rotation: Rotation, context: Context, /) -> None:
        """x [T, H]: what other rows need of these, keys and values, and no output."""
        ...


# layers.embedding.Embedding: [T] → [T, H], of several streams [T, streams * H]
Embed = Callable[[Tensor], Tensor]


class Fuse(Protocol):
    """layers.fusion.Fusion, or StreamFusion"""

    def __call__(self, embedding: Tensor, hidden: Tensor, /) -> Tensor: ...


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


class PackFusedLayer(Protocol):
    def __call__(self, embed: Embed, fuse: Fuse, layer: StoringLayer, norm: LastNorm, /) -> RunFusedLayer:
        """Packs one layer, as PackLayers does. `embed` is the trunk's, which may not be loaded yet."""
        ...


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
    ranks: Ranks = ALONE  # what sums and gathers the parts of products that ranks share
    # what reaches the routed experts where they are spread over several engines
    spread: SpreadExperts | None = None


KERNELS: Registry[Callable[[], Kernels]] = Registry(
    "kernels",
    {
        "torch": "mtpserve.layers.torch_kernels:torch_kernels",
        "exact": "mtpserve.layers.torch_kernels:exact_kernels",
        "triton": "mtpserve.layers.devices.triton_kernels:triton_kernels",
        "cpu": "mtpserve.layers.devices.cpu_kernels:cpu_kernels",
    },
)
