"""Multi-head latent attention, absorbed (DeepSeek-V2, https://arxiv.org/abs/2405.04434 §2.1.2).

A token's cache row is its normed latent (kv_rank numbers) and one rotated key shared by all heads. The
up-projections of key and value never touch the cache: W_uk is multiplied into the query, W_uv into the
output.

    score = (q_nope W_uk) · latent + q_rope · k_rope            output = (softmax · latents) W_uv
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mtpserve.core.arch.model import ModelArch
from mtpserve.core.protocols.attention import Context
from mtpserve.core.protocols.linear import LinearMethod
from mtpserve.layers.kernels import HeadProducts, Kernels
from mtpserve.layers.linear import Linear
from mtpserve.layers.norm import RMSNorm
from mtpserve.layers.rope import Rotation

LATENT_EPS = 1e-6  # the latent norms of every published DeepSeek use this, whatever rms_norm_eps says


class MLA(nn.Module):
    """`down` holds q_a (or the whole q projection where there is no q_rank) and kv_a side by side: one
    product for both."""

    packs = ("kv_up",)  # as in Linear

    def __init__(self, arch: ModelArch, method: LinearMethod, kernels: Kernels) -> None:
        super().__init__()
        assert arch.mla is not None
        mla = self.mla = arch.mla
        self.kernels = kernels
        self.heads, q_size = arch.heads, arch.heads * (mla.nope + mla.rope)
        self.down = Linear(arch.hidden, (mla.q_rank or q_size, mla.kv_rank + mla.rope), method)
        self.q_norm = RMSNorm(mla.q_rank, LATENT_EPS, kernels) if mla.q_rank else None
        self.q_up = Linear(mla.q_rank, (q_size,), method) if mla.q_rank else None
        self.kv_norm = RMSNorm(mla.kv_rank, LATENT_EPS, kernels)
        self.kv_up = nn.Parameter(
            torch.empty(arch.heads * (mla.nope + mla.value), mla.kv_rank), requires_grad=False
        )
        self.out = Linear(arch.heads * mla.value, (arch.hidden,), method)
        self.k_up: HeadProducts
        self.v_up: HeadProducts

    def finish_loading(self) -> None:
        """kv_up becomes the products with its two halves, [T, heads, nope] → [T, heads, kv_rank] and [T,
        heads, kv_rank] → [T, heads, value]."""
        self.k_up, self.v_up = self.kernels.pack_heads(self.kv_up.detach(), self.heads, self.mla.nope)

    def forward(self, x: Tensor, rotation: Rotation, context: Context) -> Tensor:
        """x [T, hidden]"""
        q, row = self.down(x).split(self.down.parts, -1)
        if self.q_up is not None and self.q_norm is not None:
            q = self.q_up(self.q_norm(q))
        return self.attended(q, row, rotation, context)

    def attended(self, q: Tensor, row: Tensor, rotation: Rotation, context: Context) -> Tensor:
        """q [T, heads * (nope + rope)], row [T, kv_rank + rope] → [T, hidden]"""
        mla, norm = self.mla, self.kv_norm
        q = q.unflatten(-1, (self.heads, -1))  # [T, heads, nope + rope]
        query = q.new_empty(len(q), self.heads, mla.kv_rank + mla.rope)
        absorbed, q_rope = query.split([mla.kv_rank, mla.rope], -1)
        self.k_up(q[..., : mla.nope], absorbed)
        self.kernels.latent_store(
            q, row, rotation, context.slots, context.keys, norm.weight, norm.eps, mla.nope, q_rope
        )
        latents = context.attend(query)  # [T, heads, kv_rank]
        return self.kernels.ranks.sum(self.out(self.v_up(latents, None).flatten(1)))

    def store(self, x: Tensor, rotation: Rotation, context: Context) -> None:
        """x [T, hidden]; latents and rotated keys are stored, and no query is computed."""
        mla, norm = self.mla, self.kv_norm
        row = self.down(x).split(self.down.parts, -1)[1]
        no_q = row.new_zeros(len(row), 1, mla.nope + mla.rope)
        self.kernels.latent_store(
            no_q, row, rotation, context.slots, context.keys, norm.weight, norm.eps, mla.nope, None
        )
