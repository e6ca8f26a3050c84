"""Several residual streams: manifold-constrained hyper-connections (https://arxiv.org/abs/2512.24880), as
DeepSeek-V4 has them.

    inner = norm(sum over streams of  pre * stream)        what a block is computed on
    streams = comb^T streams + post * block(inner)         comb is doubly stochastic, post has a share
                                                           for each stream

`pre`, `post` and `comb` are made of the streams themselves. All of it is where a layer without streams has
the norm before a block, which adds the last block's output to the residual: so a decoder layer is the same
with both.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mtpserve.core.arch.model import ModelArch
from mtpserve.core.arch.streams import StreamsArch
from mtpserve.layers.kernels import Kernels, Residual
from mtpserve.layers.linear import Float32Linear, in_float32
from mtpserve.layers.norm import RMSNorm


@dataclass(frozen=True, slots=True)
class Streams:
    """layers.kernels.Residual"""

    mixed: Tensor  # [T, streams, hidden]
    shares: Tensor  # [T, streams], of the block's output

    def __add__(self, x: Tensor) -> Tensor:
        """x [T, hidden], the block's output → the streams [T, streams * hidden]."""
        return (self.mixed + self.shares.unsqueeze(-1) * x.unsqueeze(1)).flatten(1)


class Mixer(nn.Module):
    """Numbers for each row from all of its streams: scale * (W x / rms(x)) + base, in float32."""

    def __init__(
        self, arch: ModelArch, streams: StreamsArch, outputs: int, scales: int, kernels: Kernels
    ) -> None:
        super().__init__()
        self.eps = arch.norm_eps
        self.product = Float32Linear(streams.number * arch.hidden, outputs, kernels)
        self.base, self.scale = in_float32(outputs), in_float32(scales)

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T, streams * hidden] → the products [T, outputs], scale and base."""
        x = streams.float()
        return (
            self.product(x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)),
            self.scale,
            self.base,
        )


def sigmoid(x: Tensor) -> Tensor:
    """Computes in float64. In float32 torch's result depends on where a vector of the processor ends, and so
    on the number of rows."""
    return x.double().sigmoid().float()


class StreamNorm(RMSNorm):
    """The norm before a block, with the connections of this block."""

    def __init__(self, arch: ModelArch, streams: StreamsArch, kernels: Kernels) -> None:
        super().__init__(arch.hidden, arch.norm_eps, kernels)
        self.streams = streams
        self.mixer = Mixer(arch, streams, (2 + streams.number) * streams.number, 3, kernels)

    def forward(self, x: Tensor) -> Tensor:
        return self.add(x, None)[0]

    def add(self, x: Tensor, residual: Residual | None) -> tuple[Tensor, Streams]:
        """x [T, hidden], the last block's output; without one before it, what all streams begin with, or what
        each does [T, streams * hidden]."""
        number = self.streams.number
        flat = (
            x.repeat(1, 1 if x.shape[1] > len(self.weight) else number) if residual is None else residual + x
        )
        streams = flat.unflatten(1, (number, -1))
        pre, post, comb = self.connections(flat)
        inner = (pre.unsqueeze(-1) * streams).sum(1).to(x.dtype)
        mixed = torch.bmm(comb.to(x.dtype).mT, streams)
        return super().forward(inner), Streams(mixed, post.to(x.dtype))

    def connections(self, streams: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[T, streams * hidden] → pre and post [T, streams], comb [T, streams, streams]"""
        number, eps = self.streams.number, self.streams.eps
        products, scale, base = self.mixer(streams)
        sizes = [number, number, number * number]
        pre, post, comb = (
            product * factor + least
            for product, factor, least in zip(
                products.split(sizes, -1), scale.unbind(), base.split(sizes), strict=True
            )
        )
        comb = comb.unflatten(1, (number, number)).softmax(-1) + eps
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
        for _ in range(self.streams.iterations - 1):  # Sinkhorn's algorithm: rows and columns in turns
            comb = comb / (comb.sum(-1, keepdim=True) + eps)
            comb = comb / (comb.sum(-2, keepdim=True) + eps)
        return sigmoid(pre) + eps, 2 * sigmoid(post), comb


class LastStreamNorm(RMSNorm):
    """The norm after the last layer: the streams become one, which is normed."""

    def __init__(self, arch: ModelArch, streams: StreamsArch, kernels: Kernels) -> None:
        super().__init__(arch.hidden, arch.norm_eps, kernels)
        self.streams, self.mixer = streams, Mixer(arch, streams, streams.number, 1, kernels)

    def add(self, x: Tensor, residual: Residual | None) -> tuple[Tensor, Tensor]:
        """→ what the head multiplies [T, hidden], and the streams [T, streams * hidden]."""
        assert residual is not None
        flat = residual + x
        products, scale, base = self.mixer(flat)
        shares = sigmoid(products * scale + base) + self.streams.eps
        one = (shares.unsqueeze(-1) * flat.unflatten(1, (self.streams.number, -1))).sum(1)
        return super().forward(one.to(x.dtype)), flat


def norm_before(arch: ModelArch, kernels: Kernels) -> RMSNorm:
    """The norm before a block."""
    return (
        RMSNorm(arch.hidden, arch.norm_eps, kernels)
        if arch.streams is None
        else StreamNorm(arch, arch.streams, kernels)
    )


def norm_after(arch: ModelArch, kernels: Kernels) -> RMSNorm:
    """The norm after the last layer."""
    return (
        RMSNorm(arch.hidden, arch.norm_eps, kernels)
        if arch.streams is None
        else LastStreamNorm(arch, arch.streams, kernels)
    )
