"""Which errors of a step the engine survives: all but those after which the device computes nothing any
more."""

from __future__ import annotations

import logging

import torch

from mtpserve.core.errors import EngineDead

log = logging.getLogger(__name__)

OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation, hipErrorOutOfMemory


def is_fatal(error: BaseException) -> bool:
    """Errors of the device, such as an illegal address, are sticky: every later call to it fails, until the
    process ends. Memory that ran out is given back with the step that asked for it; torch's allocator says so
    by an error of another class, libraries by a code."""
    if not isinstance(error, torch.AcceleratorError):
        return False
    code = getattr(error, "error_code", None)  # None: raised by Python, or before the code was known
    return code != OUT_OF_MEMORY if code is not None else "out of memory" not in str(error)


def require_device(error: Exception) -> None:
    """Raises EngineDead where no other step can come to anything."""
    if isinstance(error, EngineDead):
        raise error
    if is_fatal(error):
        reason = str(error).partition("\n")[0]  # what follows is advice for CUDA's developers
        log.debug("the device has failed", exc_info=error)  # the receiver of EngineDead logs its message
        raise EngineDead(f"the device has failed: {reason}") from error
