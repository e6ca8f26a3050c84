"""Pages of 2 MiB for what is read from end to end: weights and KV pools. Fewer misses of the TLB; what is stored does not change."""

from __future__ import annotations

import ctypes
import sys

from torch import Tensor

HUGE = 2 << 20
MADV_HUGEPAGE, MADV_COLLAPSE = 14, 25  # of linux/mman.h; to collapse what was written before is known from Linux 6.1 on


def advise(tensor: Tensor) -> bool:
    """Asks the kernel for huge pages under a contiguous tensor: at once where it can, otherwise for what is not yet written to.
    → whether there are whole huge pages in it and the kernel took the advice."""
    size = tensor.numel() * tensor.element_size()
    start = -(-tensor.data_ptr() // HUGE) * HUGE
    length = (tensor.data_ptr() + size) // HUGE * HUGE - start
    if not sys.platform.startswith("linux") or length <= 0:
        return False
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    taken: bool = madvise(start, length, MADV_HUGEPAGE) == 0
    collapsed: bool = madvise(start, length, MADV_COLLAPSE) == 0
    return collapsed or taken
