"""Sums and gathered tensors of the processes of one machine that compute a model together, through memory that they share: src/ranks.h."""

from __future__ import annotations

from ctypes import Structure, addressof, byref, c_char, c_int32, c_int64, c_void_p
from mmap import mmap

import torch
from torch import Tensor

from mtpserve_kernels.cpu.library import Op
from mtpserve_kernels.cpu.linear import TYPES

MOST_RANKS = 64


class Rank(Structure):
    _fields_ = [("exchange", c_void_p), ("rank", c_int64), ("ranks", c_int64), ("milliseconds", c_int64), ("done", c_int64)]


_bytes = Op("mtp_exchange_bytes", c_int64, c_void_p)
_break = Op("mtp_break_exchange", c_void_p)
_sum = Op("mtp_sum_ranks", c_void_p, c_void_p, c_int64, c_int32)
_gather = Op("mtp_gather_ranks", c_void_p, c_void_p, c_void_p, c_int64, c_int64)


class PeerGone(Exception):
    """Another rank has ended, or did not come in time."""


def exchange_bytes(ranks: int) -> int:
    """Of the memory that so many ranks share."""
    assert 1 <= ranks <= MOST_RANKS, ranks
    size = c_int64()
    _bytes(ranks, byref(size))
    return size.value


class Exchange:
    """What rank `rank` of `size` has of memory that all of them have mapped: `exchange_bytes`, zeros at first. All call the same methods in
    the same order with tensors of the same shapes and types, and get the same bits. Raises PeerGone, and then at every later call."""

    def __init__(self, memory: mmap, rank: int, size: int, seconds: float) -> None:
        """`seconds`: how long to wait for the others."""
        self.rank, self.size = rank, size
        self._memory = memory  # it stays mapped as long as this object is there
        self._own = Rank(addressof(c_char.from_buffer(memory)), rank, size, int(seconds * 1000), 0)

    def sum(self, x: Tensor) -> Tensor:
        """x of any shape → its sum over all ranks in their order, computed in float32 and rounded once. May overwrite x."""
        total = (x if x.dtype in (torch.float32, torch.bfloat16) else x.float()).contiguous()
        _sum(byref(self._own), total, total.numel(), TYPES[total.dtype])
        self.check()
        return total.to(x.dtype)

    def gather(self, x: Tensor) -> Tensor:
        """x [..., n] → [..., size * n]: the ranks' parts side by side."""
        x = x.contiguous()
        out = torch.empty(*x.shape[:-1], self.size * x.shape[-1], dtype=x.dtype)
        row = x.shape[-1] * x.element_size()
        _gather(byref(self._own), x, out, x.nbytes // max(row, 1), row)
        self.check()
        return out

    def give_up(self) -> None:
        """Also in another thread, while this rank waits: whoever waits, or will, raises PeerGone."""
        _break(self._own.exchange)

    @property
    def address(self) -> int:
        """Of the struct that ops sum with."""
        return addressof(self._own)

    def check(self) -> None:
        """Raises PeerGone if an exchange has failed."""
        if self._own.done < 0:
            raise PeerGone("a rank is gone, or did not come in time")
