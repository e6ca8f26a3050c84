"""Attention in which one latent row is the key and the value of all heads, with entries that stand for
several tokens (DeepSeek-V4, as transformers' model has it).

The last numbers of a row are rotated by its position. The row is the value, too. So a head's result is
rotated back by the position of the query: it depends on distances alone.

An entry is a mean of what its tokens have left: each number of it has weights of its own, a softmax over
these tokens' gates and a bias for each place. With overlap it is made of the tokens before its own, too,
which have left other numbers for it.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mtpserve.attention.selection import CompressingContext
from mtpserve.cache.pool import store
from mtpserve.core.arch.model import Attention, Compressed, ModelArch
from mtpserve.core.protocols.attention import Context
from mtpserve.core.protocols.linear import LinearMethod
from mtpserve.layers.kernels import HeadProducts, Kernels
from mtpserve.layers.linear import Linear, in_float32
from mtpserve.layers.norm import RMSNorm
from mtpserve.layers.rope import Rotation


class EntryMaker(nn.Module):
    """Makes rows of `dim` numbers of what tokens have left: of each its values and its gates, with overlap
    for two entries, the next one first."""

    def __init__(
        self, arch: ModelArch, compression: Compressed, dim: int, method: LinearMethod, kernels: Kernels
    ) -> None:
        super().__init__()
        self.every, self.dim, entries = compression.every, dim, compression.span // compression.every
        self.project = Linear(arch.hidden, (entries * dim, entries * dim), method)
        self.bias = in_float32(compression.every, entries * dim)
        self.norm = RMSNorm(dim, arch.norm_eps, kernels)

    def forward(self, inputs: Tensor, there: Tensor, rotation: Rotation) -> Tensor:
        """inputs [n, span, 2 * entries * dim], there [n, span], rotation of the entries → [n, 1, dim]"""
        values, gates = inputs.chunk(2, -1)
        gates = gates + self.bias.repeat(inputs.shape[1] // self.every, 1)
        values, gates = (
            self.entry_parts(values),
            self.entry_parts(gates).masked_fill(~there.unsqueeze(-1), -torch.inf),
        )
        # by float64: see layers.streams.sigmoid
        shares = gates.softmax(1, dtype=torch.float64).to(values.dtype)
        entry = (values * shares).sum(1)
        return rotation.rotate_last(self.norm(entry).unsqueeze(1))

    def entry_parts(self, numbers: Tensor) -> Tensor:
        """[n, span, entries * dim] → [n, span, dim]: of the tokens before the entry's own the first part, of
        these the last one."""
        return torch.cat([numbers[:, : -self.every, : self.dim], numbers[:, -self.every :, -self.dim :]], 1)


class EntryIndexer(nn.Module):
    """Selects entries for rows by index keys that are made as entries are."""

    def __init__(
        self, arch: ModelArch, compression: Compressed, method: LinearMethod, kernels: Kernels
    ) -> None:
        super().__init__()
        assert arch.shared_kv is not None and arch.indexer is not None
        self.heads = arch.indexer.heads
        self.scale = (compression.index_dim * self.heads) ** -0.5
        self.maker = EntryMaker(arch, compression, compression.index_dim, method, kernels)
        self.q_up = Linear(arch.shared_kv.q_rank, (self.heads * compression.index_dim,), method)
        self.weigh = Linear(arch.hidden, (self.heads,), method)

    def forward(self, x: Tensor, latent: Tensor, rotation: Rotation, context: CompressingContext) -> None:
        q = rotation.rotate_last(self.q_up(latent).unflatten(-1, (self.heads, -1)))
        context.select(q, self.weigh(x, torch.float32) * self.scale)


class Compressor(nn.Module):
    def __init__(self, arch: ModelArch, kind: Attention, method: LinearMethod, kernels: Kernels) -> None:
        super().__init__()
        compression = kind.compressed
        assert compression is not None
        self.maker = EntryMaker(arch, compression, kind.kv.key_dim, method, kernels)
        self.indexer = (
            None if compression.selected is None else EntryIndexer(arch, compression, method, kernels)
        )
        makers = [self.maker] if self.indexer is None else [self.maker, self.indexer.maker]
        self.sizes = [sum(maker.project.parts) for maker in makers]

    def forward(self, x: Tensor, latent: Tensor, rotation: Rotation, context: CompressingContext) -> None:
        """x [T, hidden], latent [T, q_rank]: what the rows leave for entries is stored, and so are the
        entries that they complete; then entries are selected for them."""
        indexer = self.indexer
        inputs = (
            self.maker.project(x)
            if indexer is None
            else torch.cat([self.maker.project(x), indexer.maker.project(x)], -1)
        )
        store(context.inputs, context.slots, inputs.unsqueeze(1))
        completed = context.completed
        if len(completed.slots):
            there, turned = completed.there, rotation.at(completed.positions)
            parts = context.inputs[completed.tokens].squeeze(2).split(self.sizes, -1)
            store(context.entries, completed.slots, self.maker(parts[0], there, turned))
            if indexer is not None:
                context.entry_index_keys.store(completed.slots, indexer.maker(parts[1], there, turned))
        if indexer is not None:
            indexer(x, latent, rotation, context)


class SharedKV(nn.Module):
    packs = ("group_out",)  # as in Linear

    def __init__(self, arch: ModelArch, kind: Attention, method: LinearMethod, kernels: Kernels) -> None:
        super().__init__()
        shared_kv, dim = arch.shared_kv, kind.kv.key_dim
        assert shared_kv is not None
        self.heads, self.groups, self.eps, self.kernels = arch.heads, shared_kv.groups, arch.norm_eps, kernels
        self.in_window = kind.compressed is None and arch.window_rope is not None  # its rotation
        self.down = Linear(arch.hidden, (shared_kv.q_rank, dim), method)
        self.q_norm, self.kv_norm = (
            RMSNorm(shared_kv.q_rank, arch.norm_eps, kernels),
            RMSNorm(dim, arch.norm_eps, kernels),
        )
        self.q_up = Linear(shared_kv.q_rank, (arch.heads * dim,), method)
        self.sinks = in_float32(arch.heads)
        self.group_out = nn.Parameter(
            torch.empty(shared_kv.groups * shared_kv.out_rank, arch.heads * dim // shared_kv.groups),
            requires_grad=False,
        )
        self.out = Linear(shared_kv.groups * shared_kv.out_rank, (arch.hidden,), method)
        self.compressor = None if kind.compressed is None else Compressor(arch, kind, method, kernels)
        self.by_group: HeadProducts

    def finish_loading(self) -> None:
        # Groups of heads as MLA's heads: from what they have attended to, to values.
        self.by_group = self.kernels.pack_heads(self.group_out.detach(), self.groups, 0)[1]

    def forward(self, x: Tensor, rotation: Rotation, context: Context) -> Tensor:
        """x [T, hidden]"""
        rotation = rotation.in_window if self.in_window else rotation
        q, row = self.down(x).split(self.down.parts, -1)
        latent = self.q_norm(q)
        q = self.q_up(latent).unflatten(-1, (self.heads, -1))
        q = rotation.rotate_last(F.rms_norm(q, q.shape[-1:], eps=self.eps))
        self.store_row(row, rotation, context)
        if self.compressor is not None:
            self.compressor(x, latent, rotation, cast(CompressingContext, context))
        attended = rotation.rotate_last(context.attend(q, self.sinks), back=True)  # [T, heads, dim]
        grouped = self.by_group(attended.flatten(1).unflatten(1, (self.groups, -1)), None)
        return self.kernels.ranks.sum(self.out(grouped.flatten(1)))

    def store(self, x: Tensor, rotation: Rotation, context: Context) -> None:
        """x [T, hidden]; only what later rows of a layer without entries need."""
        assert self.compressor is None
        rotation = rotation.in_window if self.in_window else rotation
        self.store_row(self.down(x).split(self.down.parts, -1)[1], rotation, context)

    def store_row(self, row: Tensor, rotation: Rotation, context: Context) -> None:
        store(context.keys, context.slots, rotation.rotate_last(self.kv_norm(row).unsqueeze(1)))
