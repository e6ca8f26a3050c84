"""A process's signs of life: a number that rises as its main thread gets on, where another process can see
it.

It rises at every turn of the engine's loop, also while it is idle, and inside of long steps at every layer: a
step of a long prompt may take a minute on a CPU, one layer of it does not. Nothing is sent, so that neither a
lock nor a full queue keeps it from being seen.
"""

from __future__ import annotations

import mmap
from pathlib import Path

BYTES = 8


class Heartbeat:
    """The process's own, until `share`."""

    def __init__(self) -> None:
        self._count = memoryview(bytearray(BYTES)).cast("Q")

    def beat(self) -> None:
        """The main thread alone calls this: other threads run on while it hangs."""
        self._count[0] += 1

    @property
    def count(self) -> int:
        return self._count[0]

    def share(self, file: Path) -> None:
        """From here on in the memory of all processes that share this file, which may be removed
        afterwards."""
        with file.open("a+b") as opened:
            opened.truncate(BYTES)
            self._count = memoryview(mmap.mmap(opened.fileno(), BYTES)).cast("Q")


PULSE = Heartbeat()
