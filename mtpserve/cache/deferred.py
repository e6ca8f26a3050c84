"""The trunk's rows that another model is yet to absorb: the last few of each seat.

They are kept by their places in the request, modulo how many are kept. Neither the host nor the device counts
them here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from mtpserve_kernels.cache import reference
from torch import Tensor

Keep = Callable[[Tensor, int, Tensor, Tensor, Tensor], None]


class DeferredRows:
    """rows [seats * room, width]"""

    def __init__(
        self, seats: int, room: int, width: int, dtype: torch.dtype, device: torch.device,
        keep: Keep = reference.keep
    ) -> None:  # fmt: skip
        self.room, self._keep = room, keep
        self.rows = torch.zeros(seats * room, width, dtype=dtype, device=device)

    def keep(self, req_indices: Tensor, index: Tensor, rows: Tensor) -> None:
        """seat_ids [n], index [n] places in their requests, rows [n, width]."""
        self._keep(self.rows, self.room, req_indices, index, rows.contiguous())

    def of(self, req_indices: Tensor, index: Tensor) -> Tensor:
        """[n], [n] → [n, width]"""
        return self.rows[reference.kept_at(self.room, req_indices, index)]
