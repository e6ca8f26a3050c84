"""The trunk's rows that another model is yet to absorb: the last few of each seat.

They are kept by their places in the request, modulo how many are kept. Neither the host nor the device counts them here.
"""

from __future__ import annotations

import torch
from torch import Tensor


class DeferredRows:
    """rows [seats * room, width]"""

    def __init__(self, seats: int, room: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.room = room
        self.rows = torch.zeros(seats * room, width, dtype=dtype, device=device)

    def keep(self, seat_ids: Tensor, index: Tensor, rows: Tensor) -> None:
        """seat_ids [n], index [n] places in their requests, rows [n, width]."""
        self.rows.index_copy_(0, self.places(seat_ids, index), rows)

    def of(self, seat_ids: Tensor, index: Tensor) -> Tensor:
        """[n], [n] → [n, width]"""
        return self.rows[self.places(seat_ids, index)]

    def places(self, seat_ids: Tensor, index: Tensor) -> Tensor:
        return torch.add(index % self.room, seat_ids, alpha=self.room)
