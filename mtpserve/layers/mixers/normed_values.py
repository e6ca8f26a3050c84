"""Grouped-query attention whose values are normed too, by a norm without weights (Gemma 4). A layer may take
its values from the keys before their norm, and may read what another layer has stored."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtpserve.core.arch.model import Attention, KVReader, ModelArch
from mtpserve.core.protocols.attention import Context
from mtpserve.core.protocols.linear import LinearMethod
from mtpserve.core.protocols.parallel import ALONE, Ranks
from mtpserve.layers.kernels import HeadNorms, Kernels
from mtpserve.layers.linear import Linear
from mtpserve.layers.norm import RMSNorm
from mtpserve.layers.rope import Rotation


class NormedValueGQA(nn.Module):
    """`tied`: keys give the values, too."""

    def __init__(
        self, arch: ModelArch, kind: Attention, method: LinearMethod, kernels: Kernels, tied: bool
    ) -> None:
        super().__init__()
        heads, dim = arch.heads_of(kind), kind.kv.key_dim
        q, k = heads * dim, kind.kv.heads * dim
        self.heads, self.dim, self.kernels, self.tied = heads, dim, kernels, tied
        self.in_window = kind.window is not None and arch.window_rope is not None  # its rotation
        self.qkv = Linear(arch.hidden, (q, k) if tied else (q, k, k), method, bias=arch.qkv_bias)
        self.out = Linear(q, (arch.hidden,), method, bias=arch.out_bias)
        self.out.added_once = ("bias",)
        self.q_norm, self.k_norm = (RMSNorm(dim, arch.norm_eps, kernels) for _ in range(2))

    def forward(self, x: Tensor, rotation: Rotation, context: Context) -> Tensor:
        """x [T, hidden]"""
        rows = self.qkv(x).unflatten(-1, (-1, self.dim))  # [T, heads + kv_heads, or 2 kv_heads more, dim]
        kv_heads = rows.shape[1] - self.heads if self.tied else (rows.shape[1] - self.heads) // 2
        values = F.rms_norm(rows[:, -kv_heads:], (self.dim,), eps=self.q_norm.eps)
        rows = torch.cat([rows[:, : self.heads + kv_heads], values], 1)
        norms = HeadNorms(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        q = self.kernels.rope_store(
            rows,
            rotation.in_window if self.in_window else rotation,
            context.slots, context.keys, context.values, self.heads, norms,
        )  # fmt: skip
        return self.kernels.ranks.sum(self.out(context.attend(q).flatten(1)))


class ReaderGQA(nn.Module):
    """Queries alone: keys and values are those that another layer has stored. `sources`: the ranks that have
    a part of these each, where every rank has all queries."""

    def __init__(
        self, arch: ModelArch, kind: KVReader, method: LinearMethod, kernels: Kernels,
        sources: Ranks = ALONE
    ) -> None:  # fmt: skip
        super().__init__()
        self.sources = sources
        self.dim, self.kernels = kind.kind.kv.key_dim, kernels
        self.in_window = kind.kind.window is not None and arch.window_rope is not None
        numbers = arch.heads_of(kind.kind) * self.dim
        self.q = Linear(arch.hidden, (numbers,), method, bias=arch.qkv_bias)
        self.out = Linear(numbers, (arch.hidden,), method, bias=arch.out_bias)
        self.out.added_once = ("bias",)
        self.q_norm = RMSNorm(self.dim, arch.norm_eps, kernels)

    def forward(self, x: Tensor, rotation: Rotation, context: Context) -> Tensor:
        """x [T, hidden]"""
        q, ranks = self.queries(x, rotation.in_window if self.in_window else rotation), self.sources
        if ranks.size > 1:
            q = q.chunk(ranks.size, 1)[ranks.rank]
        attended = context.attend(q).flatten(1)
        return self.kernels.ranks.sum(self.out(attended if ranks.size == 1 else ranks.gather(attended)))

    def queries(self, x: Tensor, rotation: Rotation) -> Tensor:
        """→ [T, heads, dim], normed and rotated."""
        heads = self.q_norm(self.q(x).view(-1, self.dim))
        return rotation.rotate(heads.view(len(x), -1, self.dim))
