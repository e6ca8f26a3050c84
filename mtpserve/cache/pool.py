"""The KV storage of layers of one kind: a tensor for keys, one for values, and one for index keys where
layers select by them, addressed by slot. Who holds which page: see pages.py.

    slot = page_of_the_request[index // page_size] * page_size + index % page_size

All may be stored in float8 (e4m3), and the reader widens them: keys and values with scale 1, numbers beyond
±448 cut off; index keys with a scale for each of them, as DeepSeek-V3.2's own code does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from mtpserve_kernels.cache import reference
from torch import Tensor

from mtpserve.core.arch.model import KVLayout

Compact = Callable[[Tensor, Tensor, Tensor], None]
FP8, LARGEST = torch.float8_e4m3fn, 448.0
SCALE_BYTES = 4


class IndexKeys(NamedTuple):
    """A layer's: rows [slots, 1, dim], and where these are float8 their scales [slots, 1, 1] float32."""

    rows: Tensor
    scales: Tensor | None

    def store(self, slots: Tensor, keys: Tensor) -> None:
        """keys [T, 1, dim], slots [T]"""
        if self.scales is not None:
            scales = scale_of(keys)
            store(self.scales, slots, scales)
            keys = keys.float() / scales
        store(self.rows, slots, keys)

    def at(self, slots: Tensor) -> Tensor:
        """slots [...] → float32 [..., dim]"""
        rows = self.rows[slots].squeeze(-2).float()
        return rows if self.scales is None else rows * self.scales[slots].squeeze(-2)


class KVPool:
    """k [layers, slots, heads, key_dim]; v [layers, slots, heads, value_dim], or None for the latent layout
    (v is part of k); index [layers, slots, 1, index_dim], or None; scales [layers, slots, 1, 1] float32, of
    index keys in float8, or None; inputs [layers, slots, 1, inputs_dim], of which entries are made, or None.
    `parts` are all of them.

    There are slots `beyond` those of the pages. `dtype` is what the layers compute in, `kv_dtype` what they
    are kept in (None: the same), but for the inputs. Memory is not cleared: no slot is read before it was
    written. `poison` fills it with NaN, so that a test sees it if one is.
    """

    def __init__(
        self, layout: KVLayout, layers: int, pages: int, page_size: int, dtype: torch.dtype,
        device: torch.device, poison: bool = False,
        compact: Compact = reference.compact, kv_dtype: torch.dtype | None = None, index_dim: int = 0,
        inputs_dim: int = 0, beyond: int = 0,
    ) -> None:  # fmt: skip
        self.layout, self.page_size, self.pages, self._compact, self.dtype = (
            layout,
            page_size,
            pages,
            compact,
            dtype,
        )

        def allocate(heads: int, dim: int, part_dtype: torch.dtype | None = kv_dtype) -> Tensor:
            return torch.empty(
                layers, pages * page_size + beyond, heads, dim, dtype=part_dtype or dtype, device=device
            )

        self.k = allocate(layout.heads, layout.key_dim)
        self.v = allocate(layout.heads, layout.value_dim) if layout.kind == "gqa" else None
        self.index = allocate(1, index_dim) if index_dim else None
        self.scales = allocate(1, 1, torch.float32) if index_dim and kv_dtype == FP8 else None
        self.inputs = allocate(1, inputs_dim, dtype) if inputs_dim else None
        self.parts = [
            tensor for tensor in (self.k, self.v, self.index, self.scales, self.inputs) if tensor is not None
        ]
        if poison:
            for buffer in self.parts:
                buffer.fill_(torch.nan)

    @property
    def by_page(self) -> list[Tensor]:
        """[layers, pages, bytes] views."""
        page_rows = [buffer[:, : self.pages * self.page_size] for buffer in self.parts]
        return [
            buffer.unflatten(1, (-1, self.page_size)).flatten(2).view(torch.uint8) for buffer in page_rows
        ]

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self.parts)

    def clear(self, page: int) -> None:
        """Zeros, for a page that is read before anything is written to it."""
        for buffer in self.parts:
            buffer[:, page * self.page_size : (page + 1) * self.page_size] = 0

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy whole slots [R, D] to others, in all layers at once: see mtpserve_kernels.cache."""
        for buffer in self.parts:
            self._compact(buffer, source, target)

    def widened(self, rows: Tensor) -> Tensor:
        """Converts some of what `keys` or `values` gave to the type that is computed with."""
        return rows.to(self.dtype)

    def keys(self, layer: int) -> Tensor:
        """[slots, heads, key_dim]"""
        return self.k[layer]

    def values(self, layer: int) -> Tensor:
        """[slots, heads, value_dim], a view of the keys for the latent layout."""
        return self.k[layer, :, :, : self.layout.value_dim] if self.v is None else self.v[layer]

    def index_keys(self, layer: int) -> IndexKeys:
        """Returns the index keys of a layer that has them."""
        assert self.index is not None
        return IndexKeys(self.index[layer], None if self.scales is None else self.scales[layer])

    def inputs_of(self, layer: int) -> Tensor:
        """[slots, 1, inputs_dim], of layers that make entries."""
        assert self.inputs is not None
        return self.inputs[layer]

    def gathered(self, layer: int, slots: Tensor | slice) -> tuple[Tensor, Tensor]:
        """Returns some slots [...] in the type that is computed with: keys [..., heads, key_dim] and values
        [..., heads, value_dim].

        Copies, read once where the values are part of the keys; of a slice, views where nothing is
        converted."""
        keys = self.widened(self.keys(layer)[slots])
        if self.v is None:
            return keys, keys[..., : self.layout.value_dim]
        return keys, self.widened(self.v[layer][slots])


def store(tensor: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Write rows [T, heads, dim] to slots [T] of one layer's part [slots, heads, dim], in plain torch."""
    if tensor.dtype == FP8:
        # As bytes: torch moves few float8 numbers by index. NaN passes the clamp, as it must.
        tensor, rows = tensor.view(torch.uint8), rows.clamp(-LARGEST, LARGEST).to(FP8).view(torch.uint8)
    tensor.index_copy_(0, slots, rows.to(tensor.dtype))


def scale_of(keys: Tensor) -> Tensor:
    """keys [..., dim] → [..., 1] float32, by which they are divided before they become float8: the smallest
    power of two that brings the largest number to 448 at most, or 1 for zeros. A power of two rounds nothing
    (ue8m0, as the published models have it)."""
    exponent = torch.frexp(keys.float().abs().amax(-1, keepdim=True) / LARGEST).exponent
    # by its bits: pow is not exact on every device
    return (exponent.clamp(-126, 127) + 127 << 23).view(torch.float32)
