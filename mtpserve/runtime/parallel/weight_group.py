"""A group of torch.distributed that a trainer and the ranks of engines join for new weights: the trainer is
rank 0 and broadcasts them.

The trainer makes it as for SGLang: TCPStore at its address, in it PrefixStore(group name), and from these a
process group of that name, apart from the default one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore, distributed_c10d as c10d  # type: ignore[attr-defined]

from mtpserve.core.errors import InvalidRequest

# five minutes: how long the members wait for each other, and for a tensor
PATIENCE = c10d.default_pg_timeout / 6


class WeightGroup:
    """`rank`: of this process. Returns when all `size` have joined. Raises InvalidRequest."""

    def __init__(self, address: str, port: int, rank: int, size: int, name: str, backend: str) -> None:
        try:
            store = TCPStore(address, port, size, is_master=False, timeout=PATIENCE)
            members: Any = c10d._new_process_group_helper(
                size,
                rank,
                [],
                c10d.Backend(backend),
                PrefixStore(name, store),
                c10d.GroupName(name),
                timeout=PATIENCE,
            )
        except (RuntimeError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            raise InvalidRequest(f"cannot join the group {name!r} at {address}:{port}: {reason}") from error
        self._group = members[0]
        c10d._world.pg_group_ranks[self._group] = {member: member for member in range(size)}

    def receive(
        self, names: Sequence[str], dtypes: Sequence[torch.dtype], shapes: Sequence[Sequence[int]],
        device: torch.device,
    ) -> dict[str, Tensor]:  # fmt: skip
        """Tensors that rank 0 broadcasts, in this order. Raises InvalidRequest where it is gone."""
        tensors: dict[str, Tensor] = {}
        try:
            for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
                tensors[name] = torch.empty(tuple(shape), dtype=dtype, device=device)
                c10d.broadcast(tensors[name], src=0, group=self._group)
        except RuntimeError as error:
            raise InvalidRequest(f"the group has broken: {str(error).partition(chr(10))[0]}") from error
        return tensors

    def close(self) -> None:
        c10d.destroy_process_group(self._group)
