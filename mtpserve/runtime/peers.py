"""Engines that share their experts, by torch.distributed: gloo for what the hosts tell each other and for rows on CPUs, NCCL for those on
GPUs. Implements `core.parallel.Peers`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from mtpserve.core.errors import EngineDead
from mtpserve.runtime.ranks import LOOPBACK, PATIENCE_S

LOADING_S = 3600.0  # how long the first one that has loaded its weights waits for the last


class TorchPeers:
    """Waits until all are there. `meeting`: a file that all of them can write and that none of an earlier group has used. Raises
    EngineDead."""

    def __init__(self, rank: int, size: int, device: torch.device, meeting: str) -> None:
        self.rank, self.size = rank, size
        for name, interface in LOOPBACK.items():
            os.environ.setdefault(name, interface)
        store = dist.FileStore(meeting, size)  # type: ignore[attr-defined]
        try:
            store.set(f"loaded {rank}", "")
            store.wait([f"loaded {each}" for each in range(size)], timedelta(seconds=LOADING_S))
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", store=store, rank=rank, world_size=size,
                timeout=timedelta(seconds=PATIENCE_S),
            )  # fmt: skip
        except RuntimeError as error:
            raise EngineDead(f"the engines that share their experts did not meet: {first_line(error)}") from error

    def gather(self, numbers: Sequence[int]) -> list[list[int]]:
        mine = torch.tensor(numbers)
        told = [torch.empty_like(mine) for _ in range(self.size)]
        try:
            dist.all_gather(told, mine)
        except RuntimeError as error:
            raise EngineDead(gone(error)) from error
        return [each.tolist() for each in told]

    def swap(self, rows: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        taken = rows.new_empty(sum(received), rows.shape[1])
        try:
            dist.all_to_all_single(taken, rows.contiguous(), list(received), list(sent))
        except RuntimeError as error:
            raise EngineDead(gone(error)) from error
        return taken


def gone(error: RuntimeError) -> str:
    return f"an engine that has a part of the experts is gone, or did not answer in {PATIENCE_S:g} s: {first_line(error)}"


def first_line(error: RuntimeError) -> str:
    return str(error).partition("\n")[0]
