"""Which errors of a step the engine survives: all but those after which the device computes nothing any
more."""

from __future__ import annotations

import torch

OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation, hipErrorOutOfMemory


def is_fatal(error: BaseException) -> bool:
    """Errors of the device, such as an illegal address, are sticky: every later call to it fails, until the
    process ends. Memory that ran out is given back with the step that asked for it; torch's allocator says so
    by an error of another class, libraries by a code."""
    if not isinstance(error, torch.AcceleratorError):
        return False
    code = getattr(error, "error_code", None)  # None: raised by Python, or before the code was known
    return code != OUT_OF_MEMORY if code is not None else "out of memory" not in str(error)
