"""One tensor of a checkpoint, from the header of its file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """`dtype` as the format writes it: BF16, F8_E4M3, Q4_K; `start` is the tensor's first byte in the file,
    `size` in bytes."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int

    @property
    def is_real(self) -> bool:
        """Numbers that a parameter of any floating-point dtype can take."""
        return self.dtype in FLOATS
