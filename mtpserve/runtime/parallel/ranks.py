"""The sums and gathers between processes of one machine that compute a model together:
core.protocols.parallel.Ranks.

on GPUs    NCCL, also inside captured steps
on CPUs    shared memory (mtpserve_kernels.cpu.ranks): microseconds. Without its kernels gloo, which takes
           half a millisecond
"""

from __future__ import annotations

import os
import socket
from mmap import mmap

import torch
import torch.distributed as dist
from mtpserve_kernels.cpu.library import Unavailable, library
from mtpserve_kernels.cpu.ranks import Exchange, PeerGone, exchange_bytes
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # it is there, and documented

from mtpserve.core.errors import ConfigError

PATIENCE_S = 600.0  # how long a rank waits for the others: they may compile kernels
HERE = "127.0.0.1"
# they would listen on the network otherwise
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}


def shares_memory(device: torch.device) -> bool:
    """True if ranks on this kind of device exchange numbers through shared memory."""
    try:
        return device.type == "cpu" and library() is not None
    except Unavailable:
        return False


def shared(file: int, rank: int, size: int) -> Exchange:
    """`file`: a descriptor of the memory, which may be empty yet; each rank gives it the same length."""
    length = exchange_bytes(size)
    os.ftruncate(file, length)
    return Exchange(mmap(file, length), rank, size, PATIENCE_S)


def meeting_place(size: int) -> TCPStore:
    """Returns the store at which the ranks of torch.distributed find each other. Rank 0 makes it; its `port`
    is for the others. Only this machine reaches it."""
    listener = socket.create_server((HERE, 0))
    port = listener.getsockname()[1]
    return TCPStore(
        HERE, port, size, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )


class TorchRanks:
    """Ranks of torch.distributed: waits until all are there. `store`: rank 0's; the others find it at `port`.
    Raises ConfigError."""

    def __init__(
        self, rank: int, size: int, device: torch.device, port: int, store: TCPStore | None = None
    ) -> None:
        if dist.is_initialized():
            raise ConfigError(
                "--tensor-parallel-size needs torch.distributed, which this process uses already"
            )
        for name, interface in LOOPBACK.items():
            os.environ.setdefault(name, interface)
        self.rank, self.size, self.nccl = rank, size, device.type == "cuda"
        self.backend = "nccl" if self.nccl else "gloo"
        dist.init_process_group(
            self.backend, store=store or TCPStore(HERE, port, size), rank=rank, world_size=size
        )
        self.sum(torch.zeros(1, device=device))  # NCCL connects now, and not in a step that is captured

    def sum(self, x: Tensor) -> Tensor:
        """NCCL has an order of its own, the same for all ranks: its sum comes to all of them from one
        place."""
        if self.nccl:
            x = x.contiguous()
            dist.all_reduce(x)
            return x
        first, *others = self._parts(x)
        total = first.float()
        for tensor in others:
            total = total + tensor.float()
        return total.to(x.dtype)

    def gather(self, x: Tensor) -> Tensor:
        return torch.cat(self._parts(x), dim=-1)

    def _parts(self, x: Tensor) -> list[Tensor]:
        x = x.contiguous()
        if self.nccl:
            parts = x.new_empty(self.size, *x.shape)
            dist.all_gather_into_tensor(parts, x)
            return list(parts)
        numbers = x.view(-1).view(torch.uint8)  # gloo does not know every type
        tensors = [torch.empty_like(numbers) for _ in range(self.size)]
        try:
            dist.all_gather(tensors, numbers)
        except RuntimeError as error:
            raise PeerGone(str(error)) from error
        return [tensor.view(x.dtype).view(x.shape) for tensor in tensors]

    def close(self) -> None:
        dist.destroy_process_group()
