"""Tensors whose memory goes back to the system while an engine sleeps, and comes back when it wakes up.

CPU    the memory is given back and the addresses stay, since descriptions of layers hold them (madvise
       with MADV_DONTNEED). It reads as zeros until something is written. Linux alone has this.
CUDA   storages shrink to nothing and grow again, at other addresses: steps are captured again.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

DONTNEED = 4  # MADV_DONTNEED of linux/mman.h


@dataclass(slots=True)
class ReleasedStorage:
    """One storage, and what it had: the contents come back with the memory, or are undefined (None)."""

    storage: torch.UntypedStorage
    nbytes: int
    contents: torch.UntypedStorage | None


class Storages:
    """The storages of `tensors`, which may share them. `keep`: the contents come back with the memory. On a
    CPU memory whose contents are kept stays where it is."""

    def __init__(self, tensors: Iterable[Tensor], keep: bool) -> None:
        self._keep = keep
        self._storages = {
            storage.data_ptr(): storage
            for tensor in tensors
            if tensor.layout == torch.strided and tensor.device.type != "meta"
            for storage in (tensor.untyped_storage(),)
            if storage.nbytes() > 0
        }
        self._released: list[ReleasedStorage] = []

    def release(self) -> int:
        """Returns how many bytes were given back."""
        return sum(map(self._release, self._storages.values()))

    def _release(self, storage: torch.UntypedStorage) -> int:
        if storage.device.type == "cpu":
            return 0 if self._keep else give_back(storage.data_ptr(), storage.nbytes())
        return self._shrink(storage)

    def _shrink(self, storage: torch.UntypedStorage) -> int:
        nbytes = storage.nbytes()
        contents = torch.UntypedStorage(nbytes).copy_(storage) if self._keep else None
        self._released.append(ReleasedStorage(storage, nbytes, contents))
        storage.resize_(0)
        return nbytes

    def resume(self) -> None:
        for released in self._released:
            released.storage.resize_(released.nbytes)
            if released.contents is not None:
                released.storage.copy_(released.contents)
        self._released = []


def give_back(address: int, nbytes: int) -> int:
    """Gives whole pages of this process's own memory back to the system. Returns their bytes; 0 where the
    system has no such call."""
    first, end = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE, (address + nbytes) // mmap.PAGESIZE
    size = end * mmap.PAGESIZE - first
    if size <= 0 or sys.platform != "linux":
        return 0
    failed: int = ctypes.CDLL(None).madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), DONTNEED)
    return 0 if failed else size
