"""Mixture of experts as DeepSeek-V3 routes it (https://arxiv.org/abs/2412.19437 §2.1.2), by a softmax as Qwen
does, or as DeepSeek-V4."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtpserve.core.arch.model import MoEArch
from mtpserve.core.protocols.linear import LinearMethod
from mtpserve.core.protocols.parallel import SpreadExperts
from mtpserve.layers.devices.torch_kernels import beside
from mtpserve.layers.kernels import Gate, Kernels, MixExperts, Route, SharedExpert
from mtpserve.layers.linear import Float32Linear, Linear, in_float32
from mtpserve.layers.mlp import MLP


class Router(nn.Module):
    """A bias for the choice steers it towards even load; the weights of the chosen come from the scores
    without it."""

    def __init__(self, hidden: int, arch: MoEArch) -> None:
        super().__init__()
        number = arch.experts + arch.zero_experts
        self.weight = in_float32(number, hidden)
        self.bias = None if arch.router_bias is None else in_float32(number)


class Experts(nn.Module):
    """The weights of all experts, or of those that this process has, in two tensors. As loaded: gate_up
    [experts, 2 size, hidden], or up alone [experts, size, hidden] where there is no gate, and down [experts,
    hidden, size].

    Each may be float8, with its scales [experts, blocks down, blocks across]; gate and up begin blocks of
    their own. Or either is float8 or of four bits, with scales and zeros [experts, rows, groups] and global
    scales [experts, rows, 1].
    """

    may_hold_blocks = ("gate_up", "down")
    experts_first = True  # the first dimension of each parameter
    added_once = ("down_bias",)  # as in Linear

    def __init__(
        self, hidden: int, arch: MoEArch, expert_ids: Sequence[int] | None = None, first: int | None = None
    ) -> None:
        """`expert_ids`: the numbers of those that this process has; None: all. `first`: see
        layers.kernels.RoutedExperts."""
        super().__init__()
        self.expert_ids, self.first, experts = (
            expert_ids,
            first,
            arch.experts if expert_ids is None else len(expert_ids),
        )
        parts = (arch.size,) if arch.gate == "relu2" else (arch.size, arch.size)
        self.gate_up = nn.Parameter(torch.empty(experts, sum(parts), hidden), requires_grad=False)
        self.down = nn.Parameter(torch.empty(experts, hidden, arch.size), requires_grad=False)
        self.gate_up_scale_inv: nn.Parameter | None
        self.down_scale_inv: nn.Parameter | None
        self.gate_up_zeros: nn.Parameter | None
        self.down_zeros: nn.Parameter | None
        self.gate_up_global_scale: nn.Parameter | None
        self.down_global_scale: nn.Parameter | None
        for name in ("scale_inv", "zeros", "global_scale"):
            self.register_parameter(f"gate_up_{name}", None)
            self.register_parameter(f"down_{name}", None)
        self.gate = arch.gate
        self.gate_up_bias = (
            nn.Parameter(torch.empty(experts, sum(parts)), requires_grad=False) if arch.biases else None
        )
        self.down_bias = (
            nn.Parameter(torch.empty(experts, hidden), requires_grad=False) if arch.biases else None
        )
        self.parts = {"gate_up": parts, "gate_up_bias": parts, "down": (hidden,), "down_bias": (hidden,)}


class SpreadMix:
    """layers.kernels.MixExperts, of experts that are spread over several engines: their outputs are weighted
    and added up here, in float32 and the order of the experts' numbers, as where all are in one."""

    def __init__(
        self, spread: SpreadExperts, layer: int, shared: SharedExpert | None, gate: Gate | None
    ) -> None:
        self.spread, self.layer, self.shared, self.gate = spread, layer, shared, gate

    def __call__(self, x: Tensor, weights: Tensor, topk_ids: Tensor) -> Tensor:
        numbers, order = topk_ids.sort(-1)
        outputs = self.spread.outputs(self.layer, x, numbers)
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for output, weight in zip(outputs.unbind(1), weights.gather(1, order).unbind(1), strict=True):
            total += output.float() * weight.unsqueeze(1)
        out = total.to(x.dtype)
        return out if self.shared is None else out + beside(self.shared, self.gate, x)


def experts_here(hidden: int, kernels: Kernels, layer: int, arch: MoEArch) -> Experts:
    """Returns the experts that this process has of the layer with this number in `ModelArch.layers`. If
    engines share experts, `SpreadMix` reaches the others. Ranks sum what their experts give."""
    if kernels.spread is not None:
        return Experts(hidden, arch, kernels.spread.owned(layer, arch.experts))
    ranks = kernels.ranks
    if ranks.size == 1 or not arch.by_rank:
        return Experts(hidden, arch, first=0 if arch.zero_experts else None)
    num_local_experts = arch.experts // ranks.size
    return Experts(
        hidden,
        arch,
        range(ranks.rank * num_local_experts, (ranks.rank + 1) * num_local_experts),
        ranks.rank * num_local_experts,
    )


def packed(
    kernels: Kernels,
    layer: int,
    arch: MoEArch,
    experts: Experts,
    shared: SharedExpert | None,
    gate: Gate | None,
) -> MixExperts:
    """`layer`: as in `experts_here`."""
    if kernels.spread is None:
        return kernels.pack_experts(experts, shared, gate)
    mix = kernels.pack_experts(experts, None, None)
    kernels.spread.serve(
        layer, arch.experts, lambda x, topk_ids: mix(x, x.new_ones(len(x), 1, dtype=torch.float32), topk_ids)
    )
    return SpreadMix(kernels.spread, layer, shared, gate)


class MoE(nn.Module):
    """A mixture of experts. With a latent size, the routed experts are computed between two projections
    (Nemotron 3 Super, https://arxiv.org/abs/2601.18089); the shared one is not."""

    packs = ("router", "experts")  # as in Linear

    def __init__(
        self, hidden: int, arch: MoEArch, layer: int, method: LinearMethod, kernels: Kernels
    ) -> None:
        """`layer`: its number in `ModelArch.layers`."""
        super().__init__()
        self.arch, self.layer, self.kernels = arch, layer, kernels
        self.router, self.experts = (
            Router(hidden, arch),
            experts_here(arch.latent or hidden, kernels, layer, arch),
        )
        self.latent_in = Linear(hidden, (arch.latent,), method) if arch.latent else None
        self.latent_out = Linear(arch.latent, (hidden,), method) if arch.latent else None
        self.shared = (
            MLP(hidden, arch.shared, method, kernels, arch.beside, partial=True) if arch.shared else None
        )
        self.shared_gate = Linear(hidden, (1,), method) if arch.shared_gate else None
        self.route: Route
        self.mix: MixExperts

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, H] → weights and experts [T, top_k]."""
        weights, topk_ids = self.route(x)
        if self.kernels.routing is not None:
            self.kernels.routing(self.layer, topk_ids)
        return weights, topk_ids

    def finish_loading(self) -> None:
        self.route = self.kernels.pack_router(self.router.weight, self.router.bias, self.arch)
        along = (None, None) if self.latent_in is not None else (self.shared, self.shared_gate)
        self.mix = packed(self.kernels, self.layer, self.arch, self.experts, *along)

    def forward(self, x: Tensor) -> Tensor:
        if self.latent_in is None or self.latent_out is None:
            weights, topk_ids = self.choose(x)
            out = self.kernels.ranks.sum(self.mix(x, weights, topk_ids))
            return out + self.unchanged(x, weights, topk_ids) if self.arch.zero_experts else out
        routed: Tensor = self.latent_out(self.mix(self.latent_in(x), *self.choose(x)))
        return self.kernels.ranks.sum(routed if self.shared is None else routed + self.shared(x))

    def unchanged(self, x: Tensor, weights: Tensor, topk_ids: Tensor) -> Tensor:
        """Returns what the zero-computation experts give, which every rank has whole: x by their weights
        (LongCat-Flash, https://arxiv.org/abs/2509.01322 §2.1)."""
        share = weights.masked_fill(topk_ids < self.arch.experts, 0).sum(-1, keepdim=True)
        return (x.float() * share).to(x.dtype)


class TokenRouter(Float32Linear):
    """DeepSeek-V4's, as transformers' model has it: experts are chosen by their scores and a bias, or a table
    has those of each token (Hash layers, https://arxiv.org/abs/2106.04426); their weights are the scores in
    any case."""

    def __init__(self, hidden: int, arch: MoEArch, tokens: int, kernels: Kernels) -> None:
        """`tokens`: of the table; 0: there is none."""
        super().__init__(hidden, arch.experts, kernels)
        self.arch = arch
        self.table = (
            nn.Parameter(torch.empty(tokens, arch.top_k, dtype=torch.int64), requires_grad=False)
            if tokens
            else None
        )
        self.choice_bias = None if tokens else in_float32(arch.experts)

    def route(self, x: Tensor, ids: Tensor | None) -> tuple[Tensor, Tensor]:
        """x [T, H], ids [T] → weights [T, top_k] float32, experts [T, top_k]."""
        arch, logits = self.arch, self(x, torch.float32).double()  # see layers.streams.sigmoid
        scores = (logits.sigmoid() if arch.scores == "sigmoid" else F.softplus(logits).sqrt()).float()
        if self.table is None:
            assert self.choice_bias is not None
            experts = (scores + self.choice_bias).topk(arch.top_k, -1).indices
        else:
            assert ids is not None
            experts = self.table[ids]
        weights = scores.gather(1, experts)
        return weights / (weights.sum(-1, keepdim=True) + 1e-20) * arch.scale, experts


class TokenMoE(nn.Module):
    """A mixture of experts whose router may choose by the token alone."""

    packs = ("experts",)  # as in Linear

    def __init__(
        self, hidden: int, arch: MoEArch, layer: int, tokens: int, method: LinearMethod, kernels: Kernels
    ) -> None:
        super().__init__()
        self.arch, self.layer, self.kernels = arch, layer, kernels
        self.router = TokenRouter(hidden, arch, tokens, kernels)
        self.experts = experts_here(hidden, kernels, layer, arch)
        self.shared = (
            MLP(hidden, arch.shared, method, kernels, arch.beside, partial=True) if arch.shared else None
        )
        self.mix: MixExperts

    def finish_loading(self) -> None:
        self.mix = packed(self.kernels, self.layer, self.arch, self.experts, self.shared, None)

    def forward(self, x: Tensor, ids: Tensor | None) -> Tensor:
        weights, topk_ids = self.router.route(x, ids)
        if self.kernels.routing is not None:
            self.kernels.routing(self.layer, topk_ids)
        return self.kernels.ranks.sum(self.mix(x, weights, topk_ids))
