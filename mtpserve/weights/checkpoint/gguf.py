"""The tensors of a GGUF file under the names and in the order of rows that Hugging Face's checkpoints have;
dequantised when they are read.

One tensor of the file may be many here: all experts of a layer are stored as one. Types by the package gguf
(llama.cpp's own), in numpy.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from mtpserve.core.errors import LoadError
from mtpserve.core.gguf import GGUFHeader, GGUFTensor
from mtpserve.weights.checkpoint.gguf_config import layout_of
from mtpserve.weights.checkpoint.gguf_layouts import OUTSIDE, ROPE_FACTORS, GGUFLayout
from mtpserve.weights.checkpoint.tensor_entry import TensorEntry

if TYPE_CHECKING:
    from torch import Tensor

IN_LAYER = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")
# and how many heads these have
PAIRED = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}
PLAIN = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class GGUFEntry(TensorEntry):
    """`heads`: rows are in the order of llama.cpp's rotation, in this many heads; None: as they are."""

    heads: int | None = None

    @property
    def is_real(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """Reads tensors as safetensors' handles do."""

    path: Path
    tensors: Mapping[str, TensorEntry]

    def get_tensor(self, name: str) -> Tensor:
        """A copy, in its own dtype or dequantised to float32. Raises OSError."""
        import torch  # not at the top: a header is checked before torch is there

        entry = self.tensors[name]
        assert isinstance(entry, GGUFEntry)
        stored = np.fromfile(self.path, np.uint8, entry.size, offset=entry.start)
        if len(stored) < entry.size:
            raise OSError("the file has become shorter")
        if entry.dtype in PLAIN:
            tensor = torch.from_numpy(stored).view(getattr(torch, PLAIN[entry.dtype]))
        else:
            rows = stored.reshape(math.prod(entry.shape[:-1]), -1)
            tensor = torch.from_numpy(dequantize(rows, GGMLQuantizationType[entry.dtype]))
        tensor = tensor.view(entry.shape)
        return tensor if entry.heads is None else unpaired(tensor, entry.heads)


def unpaired(tensor: Tensor, heads: int) -> Tensor:
    """Rows of `heads` heads from llama.cpp's order to Hugging Face's: numbers 2i and 2i + 1 of a head to i
    and i + half."""
    return tensor.view(heads, -1, 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def gguf_entries(path: Path) -> Iterator[tuple[str, GGUFEntry]]:
    """Reads the header. Raises LoadError naming the file and the tensor."""
    header = GGUFHeader.read(path)
    layout = layout_of(header)
    for tensor in header.tensors:
        dtype, size = _stored(header, tensor)
        if tensor.start + size > header.size:
            raise LoadError(
                f"{path}: is truncated: {tensor.name} ends at byte {tensor.start + size}, the file "
                f"has only {header.size}"
            )
        if tensor.name == ROPE_FACTORS:
            continue
        name, heads = _name(layout, tensor.name), _heads(header, layout, tensor.name)
        shape = (
            (1, *tensor.shape)
            if name.endswith("shared_expert_gate.weight") and len(tensor.shape) == 1
            else tensor.shape
        )
        if "{}" not in name:
            yield name, GGUFEntry(path, dtype, shape, tensor.start, size, heads)
            continue
        if len(shape) != 3:
            raise LoadError(
                f"{path}: {tensor.name} must have three dimensions, the experts' number first, got "
                f"{list(shape)}"
            )
        for expert in range(shape[0]):
            expert_size = size // shape[0]
            yield (
                name.format(expert),
                GGUFEntry(path, dtype, shape[1:], tensor.start + expert * expert_size, expert_size),
            )


def _name(layout: GGUFLayout, name: str) -> str:
    """A name that the layout does not know stays, and no rule matches it."""
    if (match := IN_LAYER.fullmatch(name)) is None:
        return OUTSIDE.get(name, name)
    layer, part, end = match.groups()
    whole = layout.names.get(f"{part}.{end}")
    if whole is None:
        whole = f"{layout.names[part]}.{end}" if part in layout.names else None
    return name if whole is None else f"model.layers.{layer}.{whole}"


def _heads(header: GGUFHeader, layout: GGUFLayout, name: str) -> int | None:
    match = IN_LAYER.fullmatch(name)
    if not layout.paired or match is None or match[2] not in PAIRED:
        return None
    start = header.get("general.architecture", str) + "."
    heads = header.get(start + PAIRED["attn_q"], int)
    return header.get(start + PAIRED[match[2]], int, heads)


def _stored(header: GGUFHeader, tensor: GGUFTensor) -> tuple[str, int]:
    """The type's name, and how many bytes the tensor takes."""
    try:
        kind = GGMLQuantizationType(tensor.kind)
    except ValueError:
        raise LoadError(
            f"{header.path}: {tensor.name} has type {tensor.kind}, which the installed gguf does not know"
        ) from None
    if not _dequantised(kind):
        raise LoadError(
            f"{header.path}: {tensor.name} is stored as {kind.name}, which is not supported; "
            f"supported: {', '.join(_types())}"
        )
    numbers, block = GGML_QUANT_SIZES[kind]
    if not tensor.shape or tensor.shape[-1] % numbers:
        raise LoadError(
            f"{header.path}: {tensor.name} of shape {list(tensor.shape)} cannot be {kind.name}, in "
            f"blocks of {numbers}"
        )
    return kind.name, math.prod(tensor.shape) // numbers * block


@cache
def _dequantised(kind: GGMLQuantizationType) -> bool:
    try:
        dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def _types() -> list[str]:
    return [kind.name for kind in GGMLQuantizationType if _dequantised(kind)]
