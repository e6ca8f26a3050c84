"""The tensors that a step changes, one row (seat) per running request. A slot is something else: a place in
the KV pool.

    tokens[seat]   |---- committed ----|x| d1 d2 d3 |   void   |   x is the last committed token, length is
                                                                   the place after it
    computed[seat] |------ KV is in the pages -----|               computed = length - 1 between two steps of
                                                                   a decoding request

What follows `num_tokens` is void or a proposal; committing is writing there and moving `num_tokens`.

A request ends here (`done`) as soon as it has a stop token or all its tokens, which the host learns later:
steps that were launched in between leave its seat as it is. There is one seat more than requests can run; it
is no request's, always done, and pads batches.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence as Seq
from functools import partial
from typing import NamedTuple

import torch
from mtpserve_kernels.cache import reference as cache
from mtpserve_kernels.requests import reference
from torch import Tensor

from mtpserve.core.batch import Batch, Drafts, Tree, VerifyOutput
from mtpserve.core.spec_sizes import SpecSizes
from mtpserve.runtime.lora.device_adapters import DeviceAdapters
from mtpserve.runtime.sampling.proposals import Node
from mtpserve.runtime.transfer import staged, upload, write

# stop tokens of a request that the device looks for; one with more of them is ended by the host alone
STOPS = 32
NO_NODE = Node(0, 0, 0)  # what comes after those that wait is void


class RequestKernels(NamedTuple):
    """What a step reads from the seats and writes to them, as mtpserve_kernels.requests.reference has it."""

    slots: reference.SlotsOf = cache.slots
    place: Callable[..., reference.PlacedRows] | None = None  # None: the reference with these slots
    # likewise
    following: Callable[[reference.RequestTable, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]] | None = None
    advance: Callable[..., None] = reference.advance
    hold: Callable[..., None] = reference.hold
    result_table: Callable[..., Tensor] = reference.result_table


TORCH = RequestKernels()


class DeviceRequests:
    """core.batch.RequestTensors.

    `trees` and `sources` are there only for drafters whose proposals branch or come from several sources; a
    chain needs neither. `spare_pages`: of each group of pages (core.arch.model.page_groups) one that no
    request ever gets: what pads a batch is written there.
    """

    def __init__(
        self, seats: int, max_len: int, sizes: SpecSizes, vocab: int, page_size: int, device: torch.device,
        eos_ids: Collection[int] = (),
        spare_pages: Seq[int] = (0,), coupled: bool = False, in_flight: int = 0,
        kernels: RequestKernels = TORCH,
    ) -> None:  # fmt: skip
        self.page_size, self.device, self.eos_ids, self.padding = page_size, device, tuple(eos_ids), seats
        self.padding_slots, self._slots_of = [page * page_size for page in spare_pages], kernels.slots
        self._place_rows, self._advance = (
            kernels.place or partial(reference.place, slots_of=kernels.slots),
            kernels.advance,
        )
        self._hold, self._result_table = kernels.hold, kernels.result_table
        self._following = kernels.following or partial(reference.following, slots_of=kernels.slots)
        num_columns, drafts = max_len + sizes.num_lookahead_tokens(in_flight), sizes.nodes

        # The memory plan makes all this on no device, where any arithmetic would bring torch's compiler
        # along: seconds of imports.
        def integers(*shape: int, fill: int = 0) -> Tensor:
            return torch.full(shape, fill, dtype=torch.int64, device=device)

        seats += 1
        self.tokens = integers(seats, num_columns)
        # One column is written at admission; each row has its name.
        self.counts = integers(5, seats)
        self.num_tokens, self.num_computed_tokens, self.prompt, self.limit, self.num_draft_tokens = (
            self.counts.unbind(0)
        )
        # The padding seat's request has one token, and room for no more.
        write(self.counts[:, self.padding], (1, 0, 1, 1, 0))
        self.stops = integers(seats, STOPS, fill=-1)
        self.done = torch.ones(seats, dtype=torch.bool, device=device)
        self.block_tables = integers(len(spare_pages), seats, -(-num_columns // page_size))
        for table, page in zip(self.block_tables, spare_pages, strict=True):
            table.fill_(page)
        self._rows = reference.RequestTable(
            self.tokens, self.counts, self.stops, self.done, self.block_tables[0], page_size
        )
        chained = 0 if coupled else sizes.depth
        self.draft_probs = torch.zeros(seats, chained, vocab if chained else 1, device=device)
        self.draft_tree = (
            Tree(integers(seats, drafts), integers(seats, drafts + 1), integers(seats, drafts + 1))
            if sizes.branching
            else None
        )
        if self.draft_tree is not None:
            for tensor, row in zip(self.draft_tree, chain_rows(drafts), strict=True):
                write(tensor, row)
        self.draft_sources = integers(seats, drafts)
        # Seats whose waiting drafts are not a chain; known on the host. All other rows of `draft_tree` are
        # chains, and their sources MTP, unless the drafter always names others.
        self.branching: set[int] = set()
        self.adapters: DeviceAdapters | None = None
        self.predictions: dict[int, Tensor] = {}  # by seat; of one that was left, until it is given again

    @property
    def nbytes(self) -> int:
        tensors = (
            self.tokens,
            self.counts,
            self.stops,
            self.done,
            self.block_tables,
            self.draft_probs,
            self.draft_sources,
        )
        return sum(tensor.nbytes for tensor in (*tensors, *(self.draft_tree or ())))

    def predict(self, req_idx: int, prediction: Tensor) -> None:
        """What the output of the request in this seat probably repeats [n]; empty: nothing."""
        self.predictions.pop(req_idx, None)
        if len(prediction):
            self.predictions[req_idx] = prediction.clone()

    def keep_probs(self, depth: int, vocab: int) -> None:
        """Room for what chains of this depth are drawn from, where the seats were made without."""
        if self.draft_probs.shape[1] < depth:
            self.draft_probs = torch.zeros(len(self.num_tokens), depth, vocab, device=self.device)

    def slot_mapping(self, req_indices: Tensor, index: Tensor, group: int = 0) -> Tensor:
        return self._slots_of(self.block_tables[group], req_indices, index, self.page_size)

    def num_prompt_tokens(self, req_indices: Tensor) -> Tensor:
        return self.prompt[req_indices]

    def predicted(self, seats: Iterable[int]) -> tuple[Tensor, Tensor] | None:
        """Batch.predictions of these seats."""
        if self.predictions.keys().isdisjoint(seats):
            return None
        rows = [self.predictions.get(req_idx, self.num_tokens[:0]) for req_idx in seats]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True), upload(
            [len(row) for row in rows], self.device
        )

    def waiting_tree(self, req_indices: Tensor, drafts: int) -> Tree:
        assert self.draft_tree is not None
        parents, ancestors, depths = (tensor[req_indices] for tensor in self.draft_tree)
        return Tree(parents[:, :drafts], ancestors[:, : drafts + 1], depths[:, : drafts + 1])

    def place_rows(
        self,
        req_indices: Tensor,
        row_span: Tensor,
        offset: Tensor,
        query_start_loc: Tensor,
        drafts: Tensor,
        samples: Tensor,
        start: Tensor | None = None,
    ) -> reference.PlacedRows:
        """The rows of a step: see mtpserve_kernels.requests.reference.place."""
        return self._place_rows(
            self._rows, req_indices, row_span, offset, query_start_loc, drafts, samples, start=start
        )

    def next_tokens(self, req_indices: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self._following(self._rows, req_indices, index)

    def advance(self, batch: Batch, verify_output: VerifyOutput) -> None:
        """Commit a verdict. A span that does not sample writes after its length, where nothing counts, and
        moves `num_computed_tokens` only."""
        self._advance(
            self._rows,
            batch.req_indices,
            batch.query_start_loc,
            batch.last_token_rows,
            batch.samples,
            verify_output.num_accepted_tokens,
            verify_output.tokens,
        )

    def result_table(self, batch: Batch, verify_output: VerifyOutput) -> Tensor:
        """What the host gets of a step: see mtpserve_kernels.requests.reference.result_table. Before the
        seats are changed."""
        tree = (
            (batch.tree.parents, verify_output.path)
            if batch.tree is not None and verify_output.path is not None
            else ()
        )
        return self._result_table(
            batch.req_indices, batch.input_ids, batch.sample_rows, self.draft_sources, batch.num_draft_tokens,
            verify_output.num_accepted_tokens, verify_output.failed, verify_output.tokens, *tree,
        )  # fmt: skip

    def waiting(self, seats: Seq[int]) -> Tensor:
        """What waits for these seats: how many drafts, then tokens, parents and sources of as many as a seat
        may have [n, 1 + 3 K]."""
        req_indices, number = upload(seats, self.device), self.draft_sources.shape[1]
        columns = torch.arange(number, device=self.device).unsqueeze(0)
        index = self.num_tokens[req_indices].unsqueeze(1) + columns
        tree = self.draft_tree
        return torch.cat(
            [
                self.num_draft_tokens[req_indices].unsqueeze(1),
                self.tokens[req_indices.unsqueeze(1), index],
                columns.expand(len(seats), -1) if tree is None else tree.parents[req_indices],
                self.draft_sources[req_indices],
            ],
            1,
        )

    def replace_waiting(self, seats: Seq[int], nodes: Seq[Seq[Node]], trees: bool) -> None:
        """Other drafts than those that wait for these seats. `trees`: they may branch."""
        if (number := self.draft_sources.shape[1]) == 0:
            return
        rows = [[*request_nodes, *[NO_NODE] * (number - len(request_nodes))] for request_nodes in nodes]
        fields = [[node[place] for row in rows for node in row] for place in range(3)]
        lists = [*fields, *tree_rows(rows)] if trees else fields
        req_indices, counts, *parts = staged([seats, list(map(len, nodes)), *lists], self.device)
        tokens, parents, sources, *shape = (part.view(len(seats), -1) for part in parts)
        tree, had_trees = Tree(parents, *shape) if trees else None, not self.branching.isdisjoint(seats)
        self.store_drafts(req_indices, Drafts(tokens, counts, tree=tree, sources=sources), had_trees)
        self.branch(seats, trees)

    def store_drafts(self, req_indices: Tensor, drafts: Drafts | None, trees: bool) -> None:
        """Put proposals after the committed tokens, where the next span's rows are read from. `trees`: some
        of these seats are `branching`."""
        if drafts is None:
            self.num_draft_tokens.index_fill_(0, req_indices, 0)
            return
        number = drafts.tokens.shape[1]
        draft_probs = None if drafts.probs is None else (drafts.probs, self.draft_probs)
        self._hold(self._rows, req_indices, drafts.tokens, drafts.num_draft_tokens, draft_probs)
        if drafts.sources is not None:
            self.draft_sources[req_indices, :number] = drafts.sources
        elif trees:
            self.draft_sources.index_fill_(0, req_indices, 0)
        if self.draft_tree is None or (drafts.tree is None and not trees):
            return
        if drafts.tree is None:
            # All of a chain: what waits here next may be longer, and be verified beside a tree.
            number = self.draft_tree.parents.shape[1]
        tree = self.chain(number) if drafts.tree is None else drafts.tree
        self.draft_tree.parents[req_indices, :number] = tree.parents
        self.draft_tree.ancestors[req_indices, : number + 1] = tree.ancestors
        self.draft_tree.depths[req_indices, : number + 1] = tree.depths

    def chain(self, drafts: int) -> Tree:
        """One row, for any number of requests."""
        nodes = torch.arange(drafts + 1, device=self.device).unsqueeze(0)
        return Tree(nodes[:, :-1], (2 << nodes) - 1, nodes)

    def branch(self, seats: Collection[int], trees: bool) -> None:
        """The host's note of what now waits for these seats."""
        self.branching = (self.branching.union if trees else self.branching.difference)(seats)


def tree_rows(rows: Seq[Seq[Node]]) -> tuple[list[int], list[int]]:
    """Ancestors and depths of each request's tree, one after the other."""
    ancestors, depths = list[int](), list[int]()
    for row in rows:
        first = len(depths)
        ancestors.append(1)
        depths.append(0)
        for number, node in enumerate(row, 1):
            ancestors.append(ancestors[first + node.parent] | 1 << number)
            depths.append(depths[first + node.parent] + 1)
    return ancestors, depths


def chain_rows(drafts: int) -> tuple[list[int], list[int], list[int]]:
    """A chain as the rows of a Tree: parents, ancestors, depths. A set with all 64 nodes is -1."""
    nodes = range(drafts + 1)
    return list(nodes[:-1]), [(2 << node) - 1 if node < 63 else -1 for node in nodes], list(nodes)
