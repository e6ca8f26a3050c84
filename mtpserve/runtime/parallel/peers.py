"""Engines that share their experts, by torch.distributed: gloo for what the hosts tell each other and for
rows on CPUs, NCCL for those on GPUs. Implements `core.parallel.Peers`. The groups are made without
torch.distributed's default one, which is that of an engine's ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mtpserve.core.errors import EngineDead
from mtpserve.runtime.parallel.ranks import LOOPBACK, PATIENCE_S

C10D: Any = dist  # its stubs lack much of this
LOADING_S = 3600.0  # how long the first one that has loaded its weights waits for the last


class TorchPeers:
    """Waits until all are there. `meeting`: a file that all of them can write and that none of an earlier
    group has used. Raises EngineDead."""

    def __init__(self, rank: int, size: int, device: torch.device, meeting: str) -> None:
        self.rank, self.size = rank, size
        for name, interface in LOOPBACK.items():
            os.environ.setdefault(name, interface)
        store = C10D.FileStore(meeting, size)
        try:
            store.set(f"loaded {rank}", "")
            store.wait([f"loaded {peer}" for peer in range(size)], timedelta(seconds=LOADING_S))
            patience = timedelta(seconds=PATIENCE_S)
            self.hosts = self.devices = C10D.ProcessGroupGloo(
                C10D.PrefixStore("hosts", store), rank, size, patience
            )
            if device.type == "cuda":
                options = C10D.ProcessGroupNCCL.Options()
                options._timeout = patience
                self.devices = C10D.ProcessGroupNCCL(C10D.PrefixStore("devices", store), rank, size, options)
        except RuntimeError as error:
            raise EngineDead(
                f"the engines that share their experts did not meet: {first_line(error)}"
            ) from error

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        mine = torch.tensor(numbers)
        tensors = [torch.empty_like(mine) for _ in range(self.size)]
        try:
            self.hosts.allgather([tensors], [mine]).wait()
        except RuntimeError as error:
            raise EngineDead(gone(error)) from error
        return [tensor.tolist() for tensor in tensors]

    def swap(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        received_rows = rows.new_empty(sum(received), rows.shape[1])
        try:
            self.devices.alltoall_base(received_rows, rows.contiguous(), list(received), list(sent)).wait()
        except RuntimeError as error:
            raise EngineDead(gone(error)) from error
        return received_rows


def gone(error: RuntimeError) -> str:
    return (
        f"an engine that has a part of the experts is gone, or did not answer in {PATIENCE_S:g} s: "
        f"{first_line(error)}"
    )


def first_line(error: RuntimeError) -> str:
    return str(error).partition("\n")[0]
