"""Host memory that other processes of this user may read: a file without a name, which ends with the last process that has it open.

| nonce | blocks of group 0 | blocks of group 1 | …          the nonce tells a reader that it has opened the memory that it means
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
from collections import OrderedDict
from collections.abc import Sequence as Seq
from threading import Lock

import msgspec
import numpy as np
import torch
from torch import Tensor

from mtpserve.core.errors import ConfigError

FRONT = mmap.PAGESIZE  # bytes before the blocks
NONCE = 16
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW  # reading mapped memory that has shrunk would end the reader
KEPT = 8  # nodes whose memory stays mapped


class Address(msgspec.Struct, frozen=True, array_like=True):
    """Where a process of this machine finds it."""

    process: int
    descriptor: int
    size: int
    nonce: bytes


class SharedBlocks:
    """`counts` and `sizes` in bytes of each group's blocks. `pin`: for a GPU's copies. Raises ConfigError where there is too little."""

    def __init__(self, counts: Seq[int], sizes: Seq[int], pin: bool) -> None:
        self._starts = [FRONT]
        for count, size in zip(counts, sizes, strict=True):
            self._starts.append(self._starts[-1] + count * size)
        self._sizes, nonce = list(sizes), secrets.token_bytes(NONCE)
        descriptor = os.memfd_create("mtpserve-pages", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, self._starts[-1])
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
            self._memory = mmap.mmap(descriptor, self._starts[-1])
        except OSError as error:
            raise ConfigError(f"--kv-offload-gib: {self._starts[-1]} bytes cannot be shared: {error.strerror}") from error
        self._memory[:NONCE] = nonce
        self.whole = torch.frombuffer(self._memory, dtype=torch.uint8)
        if pin:
            torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(self.whole.data_ptr(), self.whole.numel(), 0))
        self.blocks: list[Tensor] = [  # [blocks, bytes] of each group
            self.whole[start : start + count * size].view(count, size)
            for start, count, size in zip(self._starts, counts, sizes, strict=False)
        ]
        self.address = Address(os.getpid(), descriptor, self._starts[-1], nonce)

    def place(self, group: int, block: int) -> tuple[int, int]:
        """Where a block begins, and its bytes."""
        return self._starts[group] + block * self._sizes[group], self._sizes[group]


class Mapped:
    """Other processes' memory, opened once for each."""

    def __init__(self) -> None:
        self._lock, self._known = Lock(), OrderedDict[bytes, np.ndarray]()

    def open(self, address: Address) -> np.ndarray | None:
        """None: it is another machine's, or another user's."""
        with self._lock:
            if address.nonce not in self._known:
                opened = _opened(address)
                if opened is None:
                    return None
                self._known[address.nonce] = opened
                if len(self._known) > KEPT:
                    self._known.popitem(last=False)
            self._known.move_to_end(address.nonce)
            return self._known[address.nonce]


def _opened(address: Address) -> np.ndarray | None:
    try:
        descriptor = os.open(f"/proc/{address.process}/fd/{address.descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            meant = os.fstat(descriptor).st_size == address.size and os.pread(descriptor, NONCE, 0) == address.nonce
            if not meant or fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SEALS != SEALS:
                return None
            return np.frombuffer(mmap.mmap(descriptor, address.size, prot=mmap.PROT_READ), np.uint8)
        finally:
            os.close(descriptor)
    except (OSError, ValueError):
        return None
