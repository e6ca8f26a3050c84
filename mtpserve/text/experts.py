"""The experts that a request's tokens had, as events bring them, and as clients of both peers read them."""

from __future__ import annotations

from array import array
from base64 import b64encode
from dataclasses import dataclass, field

NPY = b"\x93NUMPY\x01\x00"
Sizes = tuple[int, int, int]
ALIGNED = 64  # bytes of a .npy file before its numbers are a multiple of it


@dataclass(slots=True)
class TokenExperts:
    """One request's, from its first token on. A token's may come twice, from an engine that goes on with
    another one's request. `sizes`: ModelCard.experts."""

    rows: list[bytes] = field(default_factory=list)

    def add(self, part: tuple[int, list[bytes]] | None) -> None:
        """`part`: TokenEvent.routed_experts."""
        if part is not None:
            first, rows = part
            self.rows[first : first + len(rows)] = rows

    def numbers(self, num_tokens: int, start: int = 0) -> bytes:
        """[num_tokens - 1 - start, layers, experts] of a request with so many tokens, whose last one was not
        computed, from token `start` on."""
        return b"".join(self.rows[start : num_tokens - 1])

    def int32(self, sizes: Sizes, num_tokens: int, start: int = 0) -> str:
        """The same as int32, in base64: SGLang's form."""
        numbers = array("B" if sizes[2] == 1 else "h", self.numbers(num_tokens, start))
        return b64encode(array("i", numbers)).decode()

    def npy(self, sizes: Sizes, num_tokens: int) -> str:
        """The same as a .npy file of uint8 or uint16, in base64: vLLM's form."""
        layers, top_k, itemsize = sizes
        numbers = self.numbers(num_tokens)
        shape = len(numbers) // (layers * top_k * itemsize), layers, top_k
        kind = "|u1" if itemsize == 1 else "<u2"
        header = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}"
        before = len(NPY) + 2
        length = -(-(before + len(header) + 1) // ALIGNED) * ALIGNED - before
        file = NPY + length.to_bytes(2, "little") + f"{header:<{length - 1}}\n".encode() + numbers
        return b64encode(file).decode()
