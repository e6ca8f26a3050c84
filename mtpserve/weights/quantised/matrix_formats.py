"""The format of one quantised matrix, from the dtypes and shapes of its tensors. Reads headers only;
quant/published.py says what tensors mean.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from mtpserve.quant import published
from mtpserve.quant.e2m1 import MXFP4_GROUP, NVFP4_GROUP
from mtpserve.quant.fp8 import scale_shape
from mtpserve.quant.stored import QuantisedMatrix
from mtpserve.weights.checkpoint.schemes import QuantConfig
from mtpserve.weights.checkpoint.tensor_entry import TensorEntry

FLOATS = ("F32", "F16", "BF16")
EXPONENTS = ("U8", "F8_E8M0")
# The roles of NVFP4's second scale → how its name ends
SECOND = {"factor": "weight_scale_2", "divisor": "weight_global_scale"}
Shape = tuple[int, ...]
Parts = Mapping[str, TensorEntry]  # the tensors of one matrix, by role


@dataclass(frozen=True, slots=True)
class StoredFormat:
    """The format of one matrix [N, K]. `read` takes its tensors by role."""

    label: str
    bits: int  # bits of a number
    groups: int | None  # scales of each row; None: a scale for each block of 128 x 128
    read: Callable[[Mapping[str, Tensor]], QuantisedMatrix]
    zeros: bool = False
    wide: str | None = None  # why it is always widened
    floats: bool = False  # the numbers are not whole
    global_scale: bool = False  # the matrix has one more scale: NVFP4

    @property
    def kind(self) -> str:
        """The kind of format that can be kept: int4 means all numbers of four bits."""
        return "fp8" if self.bits == 8 else "int4"


class Mismatch(Exception):
    """The tensor with this role is not what its matrix needs."""

    def __init__(self, role: str, entry: TensorEntry, needs: str) -> None:
        self.role, self.reason = (
            role,
            f"has shape {list(entry.shape)} and dtype {entry.dtype}, it needs {needs}",
        )


def expect(parts: Parts, role: str, shapes: Iterable[Shape], dtypes: tuple[str, ...]) -> None:
    """Raises Mismatch unless the tensor, where it is there, has one of the shapes and one of the dtypes."""
    shapes, entry = list(shapes), parts.get(role)
    if entry is not None and (entry.shape not in shapes or entry.dtype not in dtypes):
        raise Mismatch(
            role,
            entry,
            f"{' or '.join(str(list(shape)) for shape in dict.fromkeys(shapes))} in {', '.join(dtypes)}",
        )


def grouped(parts: Parts, columns: int, dim: int = 1) -> int:
    """The number of groups of a row's columns, from the scales."""
    shape = parts["scale"].shape
    groups = 1 if math.prod(shape) == 1 or len(shape) < 2 else shape[dim]
    if groups == 0 or (columns % groups and "group_of" not in parts):
        raise Mismatch("scale", parts["scale"], f"groups of equal size in rows of {columns} numbers")
    return groups


def granularity(groups: int, columns: int) -> str:
    return "a scale per row" if groups == 1 else f"groups of {-(-columns // groups)}"


def float8(parts: Parts, shape: Shape, quant_config: QuantConfig) -> StoredFormat:
    """Describes a matrix in float8. Experts in one tensor must have blocks. Raises LoadError."""
    weight, scale = parts["plain"], parts["scale"]
    *experts, rows, columns = shape if len(shape) == 3 else two(shape)
    if weight.dtype == "I8" and weight.shape == (rows, columns // 2) and columns % MXFP4_GROUP == 0:
        expect(parts, "scale", [(rows, columns // MXFP4_GROUP)], EXPONENTS)
        return StoredFormat("MXFP4", 4, columns // MXFP4_GROUP, partial(read_mxfp4, "plain"), floats=True)
    if weight.dtype == "U8" or "factor" in parts:
        return nvfp4(parts, "plain", "factor", rows, columns)
    expect(parts, "plain", [shape], ("F8_E4M3", "I8"))
    blocks = *experts, *scale_shape(rows, columns)
    dtypes = (*FLOATS, "F64", *EXPONENTS)
    if scale.shape in (blocks, (blocks[0], 1, blocks[1], 1)) and weight.dtype == "F8_E4M3":
        expect(parts, "scale", [scale.shape], dtypes)
        return StoredFormat("float8, blocks of 128 x 128", 8, None, read_scaled, floats=True)
    sizes = [(), (1,), (1, 1), (rows,), (rows, 1)]
    if len(scale.shape) == 2 and scale.shape[0] == rows and scale.shape[1] and columns % scale.shape[1] == 0:
        sizes.append(scale.shape)
    if experts or scale.shape not in sizes or scale.dtype not in dtypes:
        raise Mismatch(
            "scale", scale, f"{list(blocks)} (blocks of 128 x 128), [{rows}, 1] or [1] in {', '.join(dtypes)}"
        )
    expect(parts, "zeros", [scale.shape], ("I8",))
    number = grouped(parts, columns)
    how = "one scale" if math.prod(scale.shape) == 1 else granularity(number, columns)
    label = f"{'int8' if weight.dtype == 'I8' else 'float8'}, {how}"
    if weight.dtype == "I8":
        return StoredFormat(label, 8, number, read_scaled, "zeros" in parts, INT8)
    return StoredFormat(label, 8, number, read_scaled, floats=True)


def in_chunks(parts: Parts, shape: Shape, chunks: int) -> StoredFormat:
    """Blocks of 128 x 128 that begin anew with each chunk of rows."""
    rows, columns = two(shape)
    down, across = scale_shape(rows // chunks, columns)
    expect(parts, "plain", [shape], ("F8_E4M3",))
    expect(parts, "scale", [(chunks * down, across)], (*FLOATS, "F64", *EXPONENTS))
    if columns % across:
        raise Mismatch("scale", parts["scale"], f"blocks of equal size in rows of {columns} numbers")
    label = f"float8, blocks of 128 x 128 in each of {chunks} chunks"
    return StoredFormat(label, 8, across, partial(read_chunks, chunks), floats=True)


def read_chunks(chunks: int, tensors: Mapping[str, Tensor]) -> QuantisedMatrix:
    return published.in_chunks(tensors["plain"], tensors["scale"], chunks)


INT8 = "no product reads int8 with these scales"


def read_scaled(tensors: Mapping[str, Tensor]) -> QuantisedMatrix:
    return published.scaled(tensors["plain"], tensors["scale"], tensors.get("zeros"))


def packed(parts: Parts, shape: Shape, quant_config: QuantConfig) -> StoredFormat:
    """compressed-tensors: words along a row's columns, or bytes of MXFP4 or NVFP4."""
    rows, columns = two(shape)
    if "divisor" in parts or (parts["packed"].dtype == "U8" and parts["scale"].dtype == "F8_E4M3"):
        return nvfp4(parts, "packed", "divisor", rows, columns)
    if parts["packed"].dtype == "U8" and columns % MXFP4_GROUP == 0:
        expect(parts, "packed", [(rows, columns // 2)], ("U8",))
        expect(parts, "scale", [(rows, columns // MXFP4_GROUP)], EXPONENTS)
        return StoredFormat("MXFP4", 4, columns // MXFP4_GROUP, partial(read_mxfp4, "packed"), floats=True)
    widths = {bits: (rows, -(-columns * bits // 32)) for bits in (4, 8) if columns * bits % 8 == 0}
    expect(parts, "packed", widths.values(), ("I32",))
    bits = next(bits for bits, words in widths.items() if parts["packed"].shape == words)
    number = grouped(parts, columns)
    expect(parts, "scale", [(rows, number)] if number > 1 else [(), (1,), (rows,), (rows, 1)], FLOATS)
    expect(parts, "shape", [(2,)], ("I64", "I32"))
    expect(parts, "group_of", [(columns,)], ("I32", "I64"))
    if "zeros" in parts:
        as_they_are = parts["zeros"].dtype == "I8"
        expect(parts, "zeros", [(rows if as_they_are else -(-rows * bits // 32), number)], ("I8", "I32"))
    out_of_order = ACT_ORDER if "group_of" in parts else None
    return integers("packed", bits, number, columns, partial(read_packed, columns, bits), parts, out_of_order)


def nvfp4(parts: Parts, role: str, second: str, rows: int, columns: int) -> StoredFormat:
    """`role`: of the bytes; `second`: of the scale of the whole matrix."""
    if columns % NVFP4_GROUP:
        raise Mismatch(role, parts[role], f"rows of a multiple of {NVFP4_GROUP} numbers")
    groups = columns // NVFP4_GROUP
    expect(parts, role, [(rows, columns // 2)], ("U8",))
    expect(parts, "scale", [(rows, groups)], ("F8_E4M3",))
    expect(parts, second, [(), (1,)], ("F32",))
    if second not in parts:
        raise Mismatch(role, parts[role], f"{SECOND[second]} beside it")
    read = partial(read_nvfp4, role, second)
    return StoredFormat("NVFP4", 4, groups, read, floats=True, global_scale=True)


def read_nvfp4(role: str, second: str, tensors: Mapping[str, Tensor]) -> QuantisedMatrix:
    scale = tensors[second]
    return published.nvfp4(
        tensors[role], tensors["scale"], scale if second == "factor" else scale.reciprocal()
    )


def read_packed(columns: int, bits: int, tensors: Mapping[str, Tensor]) -> QuantisedMatrix:
    return published.compressed(
        tensors["packed"], tensors["scale"], tensors.get("zeros"), tensors.get("group_of"), columns, bits
    )


def words(parts: Parts, shape: Shape, quant_config: QuantConfig) -> StoredFormat:
    """GPTQ's run down the inputs, AWQ's along the outputs."""
    rows, columns = two(shape)
    sizes = {("GPTQ", bits): (columns * bits // 32, rows) for bits in (4, 8) if columns * bits % 32 == 0}
    if rows % 8 == 0:
        sizes["AWQ", 4] = columns, rows // 8
    expect(parts, "words", sizes.values(), ("I32",))
    name, bits = next(kind for kind, size in sizes.items() if parts["words"].shape == size)
    number = grouped(parts, columns, dim=0)
    expect(parts, "scale", [(number, rows)], FLOATS)
    expect(parts, "zeros", [(number, rows * bits // 32)], ("I32",))
    expect(parts, "group_of", [(columns,)], ("I32", "I64"))
    if name == "AWQ":
        return integers(name, bits, number, columns, read_awq, parts, None)
    out_of_order = ACT_ORDER if quant_config.act_order and "group_of" in parts else None
    return integers(
        name, bits, number, columns, partial(read_gptq, bits, quant_config.below), parts, out_of_order
    )


def read_gptq(bits: int, below: int, tensors: Mapping[str, Tensor]) -> QuantisedMatrix:
    return published.gptq(
        tensors["words"], tensors["scale"], tensors.get("zeros"), tensors.get("group_of"), bits, below
    )


def read_awq(tensors: Mapping[str, Tensor]) -> QuantisedMatrix:
    return published.awq(tensors["words"], tensors["scale"], tensors.get("zeros"))


ACT_ORDER = "its columns are in groups out of order"


def integers(
    name: str, bits: int, number: int, columns: int, read: Callable[[Mapping[str, Tensor]], QuantisedMatrix],
    parts: Parts, wide: str | None
) -> StoredFormat:  # fmt: skip
    label = f"int{bits} ({name}), {granularity(number, columns)}"
    return StoredFormat(label, bits, number, read, "zeros" in parts, wide if bits == 4 else INT8)


def mxfp4(parts: Parts, shape: Shape, quant_config: QuantConfig) -> StoredFormat:
    *experts, rows, columns = shape
    if columns % MXFP4_GROUP:
        raise Mismatch("blocks", parts["blocks"], f"rows of a multiple of {MXFP4_GROUP} numbers")
    expect(parts, "blocks", [(*experts, rows, columns // MXFP4_GROUP, MXFP4_GROUP // 2)], ("U8",))
    expect(parts, "scale", [(*experts, rows, columns // MXFP4_GROUP)], EXPONENTS)
    return StoredFormat("MXFP4", 4, columns // MXFP4_GROUP, partial(read_mxfp4, "blocks"), floats=True)


def read_mxfp4(role: str, tensors: Mapping[str, Tensor]) -> QuantisedMatrix:
    return published.mxfp4(tensors[role].view(torch.uint8), tensors["scale"])


def two(shape: Shape) -> tuple[int, int]:
    """Returns rows and columns; for a parameter that is no matrix, a shape that nothing has."""
    return (shape[0], shape[1]) if len(shape) == 2 else (-1, -1)


# The role of the numbers → what else must be there, what may be, and the function that describes it.
FORMATS: dict[str, tuple[set[str], set[str], Callable[[Parts, Shape, QuantConfig], StoredFormat]]] = {
    "plain": ({"scale"}, {"zeros", "factor"}, float8),
    "words": ({"scale"}, {"zeros", "group_of"}, words),
    "packed": ({"scale"}, {"zeros", "group_of", "shape", "divisor"}, packed),
    "blocks": ({"scale"}, set(), mxfp4),
}
