"""Counters by which the last of some programs knows that it is the last, and finishes what all of them have begun.

Each program writes its part, waits for its own threads, and adds to the counter. The program that finds the count complete reads all parts
and adds them up in a fixed order, so that the sum does not depend on who came last. It leaves the counter at zero for the next launch: no
launch clears them.
"""

from __future__ import annotations

import torch
from torch import Tensor

MIN_COUNTERS = 4096  # counters of a buffer

_buffers: dict[tuple[str, torch.device], Tensor] = {}
_replaced: list[Tensor] = []  # captured graphs still have their addresses


def arrival_counters(op: str, number: int, device: torch.device) -> Tensor:
    """int32 [number or more], zeros. Launches of one op on one device share them: they follow one another."""
    buffer = _buffers.get((op, device))
    if buffer is None or len(buffer) < number:
        if buffer is not None:
            _replaced.append(buffer)
        buffer = _buffers[op, device] = torch.zeros(max(number, MIN_COUNTERS), dtype=torch.int32, device=device)
    return buffer
