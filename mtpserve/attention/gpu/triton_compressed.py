"""Attention to a window and to entries by the Triton kernels: attention/compressed.py with tensors in the
place of lists on the host. Their shapes follow from those of the batch.

Entries of committed tokens are in the pages of group 0, as many in a page as it has such tokens. Nodes of a
tree complete entries that have other places. With trees, each request has a table of single entries:

    column     0 … start - 1                 start + node
    entry      of committed tokens           of the node; of one that completes none, that of another node

A row sees columns before `ends`; of the nodes those whose bit it has.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from mtpserve_kernels.attention.entries import window_and_entries
from mtpserve_kernels.attention.select import select
from torch import Tensor

from mtpserve.attention.contexts import slots_of
from mtpserve.attention.gpu.triton_selected import ChosenSlots, RowsSeen
from mtpserve.attention.selection import Completed
from mtpserve.cache.pool import KVPool
from mtpserve.cache.stores import Store
from mtpserve.core.arch.model import Compressed
from mtpserve.core.batch import Batch

NODES = 64  # bits of a row's set


@dataclass(frozen=True, slots=True)
class TreeNodes:
    """The nodes of a batch's trees. A row that is no node has node 0."""

    bits: Tensor  # [T] int64, -1 for a row that is no node
    start: Tensor  # [T] int64, the root's index
    node: Tensor  # [T] int64
    depth: Tensor  # [T] int64

    @staticmethod
    def of(batch: Batch, starts: Tensor | None) -> TreeNodes | None:
        """`starts`: of RowsSeen."""
        if batch.tree_bits is None or starts is None:
            return None
        members = bit_matrix(batch.tree_bits)
        node = (members * torch.arange(NODES, device=members.device)).amax(1)
        is_node = (batch.tree_bits != -1) & (node > 0)
        bits = torch.where(is_node, batch.tree_bits, -1)
        depth = members.sum(1) - 1
        return TreeNodes(bits, starts, torch.where(is_node, node, 0), torch.where(is_node, depth, 0))


@dataclass(frozen=True, slots=True)
class EntryColumns:
    """The entries that each row sees: columns of a row of `table`, whose pages have `page_size` entries."""

    table: Tensor
    page_size: int
    rows: Tensor  # [T]
    ends: Tensor  # [T]
    bits: Tensor | None  # [T]
    starts: Tensor | None  # [T]


@dataclass(frozen=True, slots=True)
class CompressedSpans:
    """`choice`: of the last layer that selected."""

    pool: KVPool
    entries: KVPool
    slots: Tensor  # [T], where the rows are stored
    completed: Completed
    columns: EntryColumns
    block_table: Tensor  # [seats, columns], of the window's group
    seats: Tensor  # [T]
    index: Tensor  # [T], of the last token that the row sees
    nodes: TreeNodes | None
    window: int
    best: int | None  # how many entries are selected; None: all
    scale: float
    choice: ChosenSlots

    def select(self, q: Tensor, weights: Tensor, layer: int) -> None:
        assert self.best is not None
        columns, keys = self.columns, self.entries.index_keys(layer)
        self.choice.slots, self.choice.counts = select(
            q.contiguous(), weights.contiguous(), keys.rows, columns.table, columns.rows, columns.ends,
            columns.bits, columns.starts, columns.page_size, self.best, scales=keys.scales,
        )  # fmt: skip

    def attend(self, q: Tensor, layer: int, sinks: Tensor | None) -> Tensor:
        """q [T, heads, key_dim]; one latent row is key and value of all heads."""
        assert sinks is not None, "layers with entries have sinks"
        columns = self.columns
        bits, starts = (None, None) if self.nodes is None else (self.nodes.bits, self.nodes.start)
        if self.best is not None:
            assert self.choice.slots is not None and self.choice.counts is not None
            rows = torch.arange(len(q), device=q.device)
            columns = EntryColumns(self.choice.slots, 1, rows, self.choice.counts, None, None)
        return window_and_entries(
            q.contiguous(), self.pool.keys(layer), self.block_table, self.entries.keys(layer), columns.table,
            torch.stack([self.seats, columns.rows]), self.index, bits, starts, columns.ends, columns.bits,
            columns.starts, sinks, self.pool.page_size, columns.page_size, self.window, self.scale,
        )  # fmt: skip


def compressed_spans(batch: Batch, store: Store, visible: RowsSeen, scale: float) -> CompressedSpans:
    kind, compressed = store.kind, store.kind.compressed
    assert compressed is not None and store.entries is not None and kind.window is not None
    assert batch.shift == 0, "columns of layers with entries are not shifted"
    nodes = TreeNodes.of(batch, visible.starts)
    span = torch.searchsorted(
        batch.query_start_loc[1:], torch.arange(len(visible.ends), device=visible.ends.device), right=True
    )
    counts = batch.token_indices < batch.seq_lens[span]
    completes, places = completing(batch, store, compressed.every, nodes, counts)
    columns = entry_columns(batch, store, compressed.every, visible, nodes, span, counts & completes)
    best = None if compressed.selected is None else compressed.selected.best
    return CompressedSpans(
        store.pool,
        store.entries,
        slots_of(batch, store.group),
        completed_by(batch, store, compressed, nodes, completes, places),
        columns,
        batch.req_tensors.block_tables[store.group],
        batch.token_req_indices,
        visible.ends - 1,
        nodes,
        kind.window,
        best,
        scale,
        ChosenSlots(),
    )


def completing(
    batch: Batch, store: Store, every: int, nodes: TreeNodes | None, counts: Tensor
) -> tuple[Tensor, Tensor]:
    """counts [T]: rows that stand for tokens → which rows complete an entry [T], and its place [T]."""
    if nodes is None:
        return counts & ((batch.token_indices + 1) % every == 0), batch.slot_mapping // every
    is_node = nodes.node > 0
    last = torch.where(is_node, nodes.start + nodes.depth, batch.token_indices)
    of_node = store.of_node(batch.token_req_indices, nodes.node.clamp(min=1))
    places = torch.where(is_node, of_node, batch.slot_mapping // every)
    return counts & ((last + 1) % every == 0), places


def entry_columns(
    batch: Batch, store: Store, every: int, visible: RowsSeen, nodes: TreeNodes | None, span: Tensor,
    completes: Tensor,
) -> EntryColumns:  # fmt: skip
    """span [T]: the number of each row's request in the batch."""
    assert store.entries is not None
    pages, size = batch.req_tensors.block_tables[0], store.entries.page_size
    ends = visible.ends // every
    if nodes is None:
        return EntryColumns(pages, size, batch.token_req_indices, ends, None, None)
    requests, numbers = batch.req_indices, torch.arange(NODES, device=pages.device)
    is_node = nodes.node > 0
    there = torch.zeros(len(requests), NODES, dtype=torch.int64, device=pages.device)
    there.index_put_((span, nodes.node), (completes & is_node).long(), accumulate=True)
    there = there > 0
    node_entries = store.of_node(requests.unsqueeze(1), numbers.clamp(1, max(store.nodes, 1)))
    other = node_entries.gather(1, there.long().argmax(1, keepdim=True))
    start = (nodes.start + 1) // every
    # A node's row sees its request's start, whichever row that is.
    first = torch.zeros_like(requests).index_put_((span,), start)
    entries = (pages[requests].unsqueeze(-1) * size + torch.arange(size, device=pages.device)).flatten(1)
    table = torch.cat([entries, entries.new_zeros(len(requests), NODES)], 1)
    table.scatter_(1, first.unsqueeze(1) + numbers, torch.where(there, node_entries, other))
    bits = torch.where(is_node, nodes.bits & ((there.long() << numbers).sum(1))[span], -1)
    with_nodes = is_node & (bits != 0) & (batch.token_indices < batch.seq_lens[span])
    ends = torch.where(is_node, torch.minimum(start, ends), ends)
    ends = torch.where(with_nodes, start + nodes.node + 1, ends)
    return EntryColumns(table, 1, span, ends, bits, start)


def completed_by(
    batch: Batch, store: Store, compressed: Compressed, nodes: TreeNodes | None, completes: Tensor,
    places: Tensor,
) -> Completed:  # fmt: skip
    """Returns as many rows as may complete an entry. Those that complete none write where nobody reads."""
    rows, every = len(completes), compressed.every
    capacity = rows if nodes is not None else min(rows, rows // every + len(batch.req_indices))
    some = completes.long().argsort(descending=True, stable=True)[:capacity]
    seats, index = batch.token_req_indices[some].unsqueeze(1), batch.token_indices[some]
    back = torch.arange(compressed.span - 1, -1, -1, device=some.device)  # places before a path's end
    if nodes is None:
        length, tokens = index + 1, index.unsqueeze(1) - back
    else:
        # A row that is no node is a path of itself after the tokens before it.
        is_node = nodes.node[some] > 0
        start = torch.where(is_node, nodes.start[some], index)
        path = from_the_last(torch.where(is_node, nodes.bits[some], 1))  # [n, NODES]
        on_path = torch.where(is_node, nodes.depth[some], 0).unsqueeze(1) + 1
        nodes_back = start.unsqueeze(1) + path.gather(1, back.clamp(max=NODES - 1).expand(len(some), -1))
        tokens = torch.where(back < on_path, nodes_back, start.unsqueeze(1) - 1 - (back - on_path))
        length = start + on_path.squeeze(1)
    group_slots = batch.req_tensors.slot_mapping(
        seats.expand_as(tokens).flatten().contiguous(), tokens.clamp(min=0).flatten(), store.group
    )
    padding = batch.req_tensors.padding_slots[0] // every
    return Completed(
        group_slots.view(tokens.shape),
        tokens >= 0,
        torch.where(completes[some], places[some], padding),
        (length - every).clamp(min=0),
    )


def bit_matrix(bits: Tensor) -> Tensor:
    """[T] → [T, NODES] int64, 0 or 1."""
    return bits.unsqueeze(1) >> torch.arange(NODES, device=bits.device) & 1


def from_the_last(bits: Tensor) -> Tensor:
    """[n] → [n, NODES]: the bits that are set, from the highest one down; what follows is void."""
    members = bit_matrix(bits)
    rank = members.flip(1).cumsum(1).flip(1) - 1
    column = torch.where(members == 1, rank, NODES)
    order = bits.new_zeros(len(bits), NODES + 1)
    order.scatter_(1, column, torch.arange(NODES, device=bits.device).expand_as(column))
    return order[:, :NODES]
