"""Mixture-of-experts layers whose experts are spread over several engines. Implements
`core.parallel.SpreadExperts`.

Each engine has requests and a schedule of its own, and comes to its layers when it comes to them. Nothing is
agreed on: whenever any of them computes such a layer, all take part in a round.

    1. gather    which layer each one is at, none where it has nothing to compute, and how many rows it sends
                 to each of the others
    2. swap      its rows, and for each which of the receiver's experts are wanted
    3.           each computes its experts for the rows that came, of each sender by the sender's layer
    4. swap      what each expert made of each row, back

So one may be in the first of these layers while another is in the last one, or in one that proposes tokens,
and a third has no request at all. One that has finished its step goes on without rows, until nobody has any:
all know from the same gather that all have finished.

A row's weighted sum is taken where the row is (layers/moe), in the order of the experts' numbers: who else
took part does not change it.

If engines have several ranks, those of one number are peers, and ranks of other numbers have rounds of their
own: all ranks of an engine have the same rows, each asks for the experts that its peers have, and the sum
over the ranks, which ends such a layer in any case, has all of them. The ranks of an engine come to the same
layers in the same order, so that the n-th round is at the same place in each of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mtpserve.core.errors import EngineDead
from mtpserve.core.heartbeat import PULSE
from mtpserve.core.protocols.parallel import ComputeExperts, Peers
from mtpserve.runtime.parallel.expert_load import ExpertLoad
from mtpserve.runtime.parallel.placement import ExpertPlacement

DONE = -1  # in place of a layer's number


class Rounds:
    """The rounds of engines that share experts. Until `join` it only says who has what, for a model that is
    planned."""

    peers: Peers
    device: torch.device

    def __init__(self, placement: ExpertPlacement, load: ExpertLoad | None = None) -> None:
        self.placement, self.load = placement, load
        self.computes: dict[int, ComputeExperts] = {}
        # [2, experts + 1]: the peer that has each, -1: none, and its number there; the last: of any greater
        # number, which no peer has
        self.places: dict[int, Tensor] = {}

    def join(self, peers: Peers, hidden: int, top_k: int, dtype: torch.dtype, device: torch.device) -> None:
        """Joins the peers before the first layer is computed. In all of a model's layers rows have `hidden`
        numbers in `dtype`, and `top_k` experts."""
        self.peers, self.hidden, self.top_k, self.dtype, self.device = peers, hidden, top_k, dtype, device
        self.places = {layer: places.to(device) for layer, places in self.places.items()}

    def owned(self, layer: int, experts: int) -> Sequence[int]:
        return self.placement.owned(layer, experts)

    def serve(self, layer: int, experts: int, compute: ComputeExperts) -> None:
        self.computes[layer] = compute
        self.places[layer] = torch.tensor([*self.placement.places(layer, experts), (-1, 0)]).T.contiguous()

    def outputs(self, layer: int, x: Tensor, topk_ids: Tensor) -> Tensor:
        experts = self.places[layer].shape[1] - 1
        topk_ids = topk_ids.clamp(max=experts)
        if self.load is not None:
            self.load.count(layer, topk_ids, experts)
        owners, numbers = self.places[layer][:, topk_ids]  # [T, K] each
        here = owners == torch.arange(self.peers.size, device=self.device)[:, None, None]  # [peers, T, K]
        goes = here.any(-1)
        rows, pairs = torch.stack([goes.sum(1), here.sum((1, 2))]).tolist()
        expert_ids = torch.where(here, numbers, -1)[goes]
        answers = self.round(layer, x[goes.nonzero()[:, 1]], expert_ids, rows, pairs)
        assert answers is not None
        _, row, choice = here.nonzero(as_tuple=True)  # the order in which they come
        out = torch.zeros(*topk_ids.shape, self.hidden, dtype=x.dtype, device=self.device)
        out[row, choice] = answers
        return out

    def finish(self) -> None:
        """Ends a tick's steps, or none: returns when all have finished. Raises EngineDead."""
        nothing = torch.empty(0, self.hidden, dtype=self.dtype, device=self.device)
        none = [0] * self.peers.size
        idle = True
        while (
            self.round(DONE, nothing, nothing.new_empty(0, self.top_k, dtype=torch.int64), none, none)
            is not None
        ):
            idle = False
        if self.load is not None:
            self.load.tick(idle)

    def round(
        self, layer: int, x: Tensor, expert_ids: Tensor, rows: Sequence[int], pairs: Sequence[int]
    ) -> Tensor | None:
        """x [n, hidden] and expert_ids [n, top_k], numbers of the receiver's experts or -1, for each rank so
        many `rows`, in which it finds so many `pairs` of a row and an expert → [pairs, hidden], what the
        experts made of them. None: all have finished.

        Raises EngineDead for whatever fails here: the others wait for what will not come."""
        try:
            return self._round(layer, x, expert_ids, rows, pairs)
        except EngineDead:
            raise
        except Exception as error:
            raise EngineDead(
                f"engines that share their experts failed to exchange rows: {type(error).__name__}: {error}"
            ) from error

    def _round(
        self, layer: int, x: Tensor, expert_ids: Tensor, rows: Sequence[int], pairs: Sequence[int]
    ) -> Tensor | None:
        PULSE.beat()
        peers = self.peers
        layers, sent = zip(*((first, counts) for first, *counts in peers.gather([layer, *rows])), strict=True)
        if all(peer_layer == DONE for peer_layer in layers):
            return None
        received = [counts[peers.rank] for counts in sent]
        # A row and its experts travel together, as bytes.
        payload = torch.cat([as_bytes(x), as_bytes(expert_ids.int())], 1)
        received_rows = peers.swap(payload, rows, received)
        width = received_rows.shape[1] - 4 * self.top_k
        theirs, topk_ids = (
            received_rows[:, :width].contiguous().view(self.dtype),
            received_rows[:, width:].contiguous().view(torch.int32),
        )
        outputs = self.compute(layers, received, theirs, topk_ids)
        of_sender = [
            int(count)
            for count in torch.stack([(ids >= 0).sum() for ids in topk_ids.split(received)]).tolist()
        ]
        return peers.swap(as_bytes(outputs), of_sender, pairs).view(self.dtype)

    def compute(self, layers: Sequence[int], received: Sequence[int], x: Tensor, topk_ids: Tensor) -> Tensor:
        """x [n, hidden], topk_ids [n, top_k] from senders at `layers`, `received` from each → [pairs,
        hidden]."""
        row, choice = (topk_ids >= 0).nonzero(as_tuple=True)
        expert = topk_ids[row, choice].long().unsqueeze(1)
        at = torch.tensor(layers).repeat_interleave(torch.tensor(received)).to(self.device)[row]
        out = torch.empty(len(row), self.hidden, dtype=self.dtype, device=self.device)
        for layer in sorted({layer for layer, count in zip(layers, received, strict=True) if count}):
            these = (at == layer).nonzero()[:, 0]
            out[these] = self.computes[layer](x[row[these]], expert[these])
        return out


def as_bytes(rows: Tensor) -> Tensor:
    return rows.contiguous().view(torch.uint8)
