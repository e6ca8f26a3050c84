"""What recurrent layers keep: a state of fixed size for each request, and kept states that requests may start
from.

    rows   | seat 0 | seat 1 | … | padding | kept 0 | kept 1 | …   a kept state is a copy of a seat's,
                                                                   of all layers
    ring   | seat 0 | seat 1 | … | padding |                       inputs of the last rows that are not
                                                                   in the state

A step's rows change the state when they are certain; the inputs of its other rows wait in the ring until the
next step knows which of them count: see mtpserve_kernels.recurrent. `computed` says up to which token each
seat's state goes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from mtpserve_kernels.recurrent.reference import LayerState
from torch import Tensor

from mtpserve.core.arch.model import Recurrent


class States:
    """`layers` of one kind; `seats`: with the one that pads batches; `ring`: rows of a request that may wait;
    `num_checkpoints`: states besides those of the seats. Memory is not cleared. `poison` fills it with NaN:
    a test then sees a state that is read and was not written."""

    def __init__(
        self, layers: Sequence[Recurrent], seats: int, ring: int, num_checkpoints: int, dtype: torch.dtype,
        device: torch.device,
        poison: bool = False,
    ) -> None:  # fmt: skip
        (kind,) = set(layers)
        self.kind, self.max_num_reqs = kind, seats
        rows, number = seats + num_checkpoints, len(layers)
        self.state = torch.empty(
            number, rows, kind.value_heads, kind.key_dim, kind.value_dim, device=device, dtype=torch.float32
        )
        self.before = torch.empty(number, rows, kind.taps - 1, kind.channels, device=device, dtype=dtype)
        self.ring = torch.empty(number, seats, ring, kind.channels, device=device, dtype=dtype)
        self.ring_gates = torch.empty(
            number, seats, ring, 2, kind.value_heads, device=device, dtype=torch.float32
        )
        self.computed = torch.zeros(seats, device=device, dtype=torch.int64)
        if poison:
            for tensor in self.tensors:
                tensor.fill_(torch.nan)

    @property
    def tensors(self) -> list[Tensor]:
        """Returns those with the states of requests, and of their last rows."""
        return [self.state, self.before, self.ring, self.ring_gates]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self.tensors, self.computed))

    def layer(self, number: int) -> LayerState:
        return LayerState(self.state[number], self.before[number], self.ring[number], self.ring_gates[number])

    @property
    def pages(self) -> list[Tensor]:
        """[layers, kept, …] views of the states that are kept."""
        return [tensor[:, self.max_num_reqs :] for tensor in (self.state, self.before)]

    def row_of(self, checkpoint: int) -> int:
        """The row of a state that is kept."""
        return self.max_num_reqs + checkpoint

    def start(self, req_indices: Tensor, computed: Tensor, sources: Tensor, targets: Tensor) -> None:
        """Requests begin in `seats` [n] after `computed` [n] tokens; the seats `targets` [m] begin with the
        states that are kept in `sources` [m]. The others begin with their first token."""
        self.computed[req_indices] = computed
        if len(targets):
            for tensor in (self.state, self.before):
                tensor[:, targets] = tensor[:, sources + self.max_num_reqs]

    def move(self, req_indices: Tensor, path: Tensor) -> None:
        """seats [R], path [R, D]: of a tree, the nodes of the rows that survived; the first that waits is 1.
        Their inputs are put together."""
        if self.ring.shape[2] == 0:
            return
        ring_index = (path - 1).clamp(min=0)
        for tensor in (self.ring, self.ring_gates):
            tensor[:, req_indices, : path.shape[1]] = tensor[:, req_indices.unsqueeze(1), ring_index]
