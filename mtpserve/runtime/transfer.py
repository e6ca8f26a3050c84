"""Numbers between host and device, without either waiting for the other.

A plain `torch.tensor(…, device=…)`, `.tolist()` or assignment of a number to an element on a GPU waits for
all that was launched before, and so may a copy of more than 64 KiB of pageable memory. So what goes up is
written to pinned memory first. torch's allocator of that memory is a ring: it gives a block again when the
copies out of it are done, and grows with what is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mtpserve.core.protocols.runner import StepEnd

ALIGNED = 2  # numbers, 16 bytes: kernels are compiled anew for pointers with less

Integers = Seq[int] | np.ndarray[Any, np.dtype[np.int64]]


def staged(lists: Seq[Integers], device: torch.device) -> list[Tensor]:
    """Each list as an int64 tensor on the device, by one copy."""
    starts = list(accumulate((len(values) + len(values) % ALIGNED for values in lists), initial=0))
    host = torch.empty(starts[-1], dtype=torch.int64, pin_memory=device.type == "cuda")
    numbers = host.numpy()
    for values, start in zip(lists, starts, strict=False):
        numbers[start : start + len(values)] = values
    copy = host.to(device, non_blocking=True)
    return [copy[start : start + len(values)] for values, start in zip(lists, starts, strict=False)]


@lru_cache(maxsize=64)
def cached_upload(lists: tuple[tuple[int, ...], ...], device: torch.device) -> list[Tensor]:
    """`staged`, for lists that steady decoding repeats step after step. Nobody writes to these tensors."""
    return staged(lists, device)


def bits(values: Seq[float]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Numbers for `staged`; `floats` makes them numbers again."""
    return np.array(values, dtype=np.float64).view(np.int64)


def floats(staged: Tensor) -> Tensor:
    """→ float32"""
    return staged.view(torch.float64).float()


def upload(values: Seq[Any], device: torch.device) -> Tensor:
    return pinned(torch.tensor(values, dtype=torch.int64), device).to(device, non_blocking=True)


def write(target: Tensor, values: Seq[Any]) -> None:
    target.copy_(pinned(torch.tensor(values, dtype=target.dtype), target.device), non_blocking=True)


def pinned(host: Tensor, device: torch.device) -> Tensor:
    return host.pin_memory() if device.type == "cuda" else host


class Moment:
    """core.protocols.StepEnd: when the device comes to it."""

    def __init__(self) -> None:
        self.event = torch.cuda.Event(enable_timing=True)
        self.event.record()

    def seconds_after(self, before: StepEnd) -> float | None:
        assert isinstance(before, Moment)
        return (
            before.event.elapsed_time(self.event) / 1000
            if self.event.query() and before.event.query()
            else None
        )


def moment(device: torch.device) -> Moment | None:
    """None on a CPU, where everything is over when it has been called."""
    return Moment() if device.type == "cuda" else None


class Download:
    """A copy that the device makes when it comes to it; `wait` gives it."""

    def __init__(self, tensor: Tensor) -> None:
        self.event: torch.cuda.Event | None = None
        if tensor.device.type == "cpu":
            # What computes at once has nothing to wait for, but a later step may write where this one's
            # numbers are.
            self.host = tensor.clone()
            return
        self.host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self.host.copy_(tensor, non_blocking=True)
        self.event = torch.cuda.Event()
        self.event.record()

    def wait(self) -> Tensor:
        if self.event is not None:
            self.event.synchronize()
        return self.host
