"""Host memory that other processes of this user may read: a file without a name, which ends with the last
process that has it open.

| nonce | blocks of group 0 | blocks of group 1 | …      by the nonce a reader knows the memory that it means

A block holds a page, whatever processes have computed it: with tensor parallel, the parts of all ranks side
by side.
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
    """The place at which a process of this machine finds the memory."""

    process: int
    descriptor: int
    size: int
    nonce: bytes


def make_file() -> int:
    """A descriptor of memory without a name, for SharedBlocks."""
    return os.memfd_create("mtpserve-pages", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


class SharedBlocks:
    """`counts` of each group's blocks, and the bytes of a rank's part of one. `pin`: for a GPU's copies.
    `file`: what `make_file` made, the same in all ranks; None: a new one. Raises ConfigError where there is
    too little."""

    def __init__(
        self,
        counts: Seq[int],
        parts: Seq[int],
        pin: bool,
        rank: int = 0,
        ranks: int = 1,
        file: int | None = None,
    ) -> None:
        self._starts, self._sizes = [FRONT], [ranks * size for size in parts]
        for count, size in zip(counts, self._sizes, strict=True):
            self._starts.append(self._starts[-1] + count * size)
        descriptor = make_file() if file is None else file
        try:
            os.ftruncate(descriptor, self._starts[-1])
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
            self._memory = mmap.mmap(descriptor, self._starts[-1])
        except OSError as error:
            raise ConfigError(
                f"--kv-offload-gib: {self._starts[-1]} bytes cannot be shared: {error.strerror}"
            ) from error
        if rank == 0:
            self._memory[:NONCE] = secrets.token_bytes(NONCE)
        self.tensor = torch.frombuffer(self._memory, dtype=torch.uint8)
        if pin:
            torch.cuda.check_error(
                torch.cuda.cudart().cudaHostRegister(self.tensor.data_ptr(), self.tensor.numel(), 0)
            )
        self.blocks: list[Tensor] = [  # [blocks, bytes] of each group
            self.tensor[start : start + count * size].view(count, size)
            for start, count, size in zip(self._starts, counts, self._sizes, strict=False)
        ]
        # this rank's part of the blocks
        self.rank_blocks = [
            blocks.unflatten(1, (ranks, size))[:, rank]
            for blocks, size in zip(self.blocks, parts, strict=True)
        ]
        self.address = Address(os.getpid(), descriptor, self._starts[-1], self._memory[:NONCE])

    def byte_range(self, group: int, block: int) -> tuple[int, int]:
        """Returns a block's start and size, in bytes."""
        return self._starts[group] + block * self._sizes[group], self._sizes[group]


class Mapped:
    """Other processes' memory, opened once for each."""

    def __init__(self) -> None:
        self._lock, self._memories = Lock(), OrderedDict[bytes, np.ndarray]()

    def open(self, address: Address) -> np.ndarray | None:
        """Opens the memory; None: it is another machine's, or another user's."""
        with self._lock:
            if address.nonce not in self._memories:
                opened = _opened(address)
                if opened is None:
                    return None
                self._memories[address.nonce] = opened
                if len(self._memories) > KEPT:
                    self._memories.popitem(last=False)
            self._memories.move_to_end(address.nonce)
            return self._memories[address.nonce]


def _opened(address: Address) -> np.ndarray | None:
    try:
        descriptor = os.open(f"/proc/{address.process}/fd/{address.descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        try:
            meant = (
                os.fstat(descriptor).st_size == address.size
                and os.pread(descriptor, NONCE, 0) == address.nonce
            )
            if not meant or fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SEALS != SEALS:
                return None
            return np.frombuffer(mmap.mmap(descriptor, address.size, prot=mmap.PROT_READ), np.uint8)
        finally:
            os.close(descriptor)
    except (OSError, ValueError):
        return None
