"""The tensors of a checkpoint that together are one matrix, and their format: read from names, dtypes and
shapes, matrix by matrix, whatever the config says. Reads headers only; quant/published.py says what tensors
mean.

A family's rules know a matrix by the name that it has unquantised, X.weight (or X, where experts are one
tensor):

    role       plain     scale                zeros                numbers in words of 32 bits, or in bytes
    float8     X.weight  X.weight_scale(_inv)                      DeepSeek-V4 calls the scale X.scale
    int8       X.weight  X.weight_scale       X.weight_zero_point
    packed               X.weight_scale       X.weight_zero_point  X.weight_packed X.weight_g_idx
                                                                   X.weight_shape
    GPTQ, AWQ            X.scales             X.qzeros             X.qweight       X.g_idx
    MXFP4                X_scales                                  X_blocks
    MXFP4      X.weight  X.scale                                   DeepSeek-V4, two in an int8
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from mtpserve.core.errors import LoadError
from mtpserve.quant import published
from mtpserve.quant.fp8 import scale_shape
from mtpserve.quant.mxfp4 import GROUP
from mtpserve.quant.stored import QuantisedMatrix
from mtpserve.weights.checkpoint.checkpoint import Checkpoint
from mtpserve.weights.checkpoint.schemes import QuantConfig
from mtpserve.weights.checkpoint.tensor_entry import TensorEntry

FLOATS = ("F32", "F16", "BF16")
EXPONENTS = ("U8", "F8_E8M0")
# What a name ends in → what the matrix's own name ends in, and the tensor's role.
SUFFIXES = {
    ".qweight": (".weight", "words"),
    ".scales": (".weight", "scale"),
    ".qzeros": (".weight", "zeros"),
    ".g_idx": (".weight", "group_of"),
    ".weight_packed": (".weight", "packed"),
    ".weight_scale": (".weight", "scale"),
    ".weight_zero_point": (".weight", "zeros"),
    ".weight_g_idx": (".weight", "group_of"),
    ".weight_shape": (".weight", "shape"),
    ".scale": (".weight", "scale"),
    "_scale_inv": ("", "scale"),
    "_scales": ("", "scale"),
    "_blocks": ("", "blocks"),
}
NUMBERS = ("plain", "words", "packed", "blocks")  # roles of the tensors that the others belong to
FIXED, OF_CACHE = (
    "activations are not quantised with fixed scales",
    "are stored as --kv-cache-dtype says, without scales",
)
# What a name ends in, for which the model has no place → why nothing is lost without it.
UNUSED = {
    r"(?:input|activation)_(?:scale(?:_ub)?|zero_point)": FIXED,
    r"(?:q|prob|prob_output)_(?:scale|zero_point)": "attention's queries and weights are not quantised",
    r"k_(?:scale|zero_point)": f"keys {OF_CACHE}",
    r"v_(?:scale|zero_point)": f"values {OF_CACHE}",
    r"(?:kv|output)_(?:scale|zero_point)|kv_cache_scaling_factor": f"keys and values {OF_CACHE}",
    r"rotary_emb\.\w+|rope\.freqs": "the rotation is computed",
}
Entries = Mapping[str, TensorEntry]
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Group:
    """`name`: of the matrix, as rules call it. A tensor that is not a part of any matrix's is a group of its
    own."""

    name: str
    tensors: dict[str, str] = field(default_factory=dict)  # role → name in the checkpoint

    @property
    def main(self) -> str:
        return next(self.tensors[role] for role in NUMBERS if role in self.tensors)

    def entries(self, of: Entries) -> dict[str, TensorEntry]:
        return {role: of[name] for role, name in self.tensors.items()}


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

    @property
    def kind(self) -> str:
        """The kind of format that can be kept: int4 means all numbers of four bits."""
        return "fp8" if self.bits == 8 else "int4"


def kinds_of(tensors: Entries) -> set[str]:
    """Returns the checkpoint's formats that some product reads; not for all matrices, perhaps."""
    float8 = any(entry.dtype == "F8_E4M3" for entry in tensors.values())
    four = any(
        name.endswith((".qweight", ".weight_packed", "_blocks")) and entry.dtype in ("I32", "U8")
        for name, entry in tensors.items()
    )
    halves = (name for name, entry in tensors.items() if entry.dtype == "I8" and name.endswith(".weight"))
    four = four or any(name.removesuffix("weight") + "scale" in tensors for name in halves)
    return {kind for kind, there in (("fp8", float8), ("int4", four)) if there}


def groups(tensors: Entries) -> list[Group]:
    """Returns all tensors, each in exactly one group, in the checkpoint's order. Raises LoadError for two
    that are the same part of one matrix."""
    by_name: dict[str, Group] = {}
    for name in tensors:
        whole, role = part(name, tensors)
        group = by_name.setdefault(whole, Group(whole))
        if role in group.tensors:
            raise LoadError(
                f"{tensors[name].file}: {name} and {group.tensors[role]} are both there, each the "
                f"{role} of {whole}"
            )
        group.tensors[role] = name
    return list(by_name.values())


def part(name: str, tensors: Entries) -> tuple[str, str]:
    """Returns the matrix that a tensor belongs to, and the tensor's role in it."""
    whole, role = belongs(name)
    if role in ("plain", "words", "packed") or any(numbers in tensors for numbers in numbers_of(whole)):
        return whole, role
    return name, "plain"


def belongs(name: str) -> tuple[str, str]:
    """Returns the matrix and the role that the name alone tells."""
    for suffix, (end, role) in SUFFIXES.items():
        if name.endswith(suffix):
            return name.removesuffix(suffix) + end, role
    return name, "plain"


def numbers_of(whole: str) -> tuple[str, ...]:
    stem = whole.removesuffix(".weight")
    return (
        (whole, f"{whole}_blocks") if stem == whole else (whole, f"{stem}.qweight", f"{stem}.weight_packed")
    )


def unused(name: str, checkpoint: Checkpoint) -> str | None:
    """Returns why a tensor is left out for which the model has no place; None: it must have one."""
    stem, _, last = name.rpartition(".")
    if last == "bias" and f"{stem}.qweight" in checkpoint.tensors and not checkpoint.tensor(name).any():
        return "AutoGPTQ writes a bias of zeros for every matrix"
    return next((why for end, why in UNUSED.items() if re.search(rf"(?:^|\.)(?:{end})$", name)), None)


def format_of(
    group: Group, tensors: Entries, shape: Shape, quant_config: QuantConfig, chunks: int = 0
) -> StoredFormat | None:
    """Returns the format of a matrix that must have this shape; None if it is not quantised. `chunks`: as in
    rules.Arranged. Raises LoadError."""
    parts = group.entries(tensors)
    if chunks and parts.keys() != {"plain", "scale"}:
        raise LoadError(
            f"{tensors[group.main].file}: {group.main} is not stored in float8 with scales, which "
            f"alone tell the order of its rows: "
            f"supported are matrices apart, and the {chunks} chunks of the published float8 checkpoints"
        )
    if parts.keys() == {"plain"}:
        return None
    role = next(role for role in NUMBERS if role in parts)
    needs, may, describe = FORMATS[role]
    for other in needs - parts.keys():
        raise LoadError(
            f"{parts[role].file}: {group.main} has no {other}: {wanted(group.name, role, other)} is "
            f"not in the checkpoint"
        )
    for other in parts.keys() - needs - may - {role}:
        raise LoadError(f"{parts[other].file}: {group.tensors[other]} does not belong beside {group.main}")
    try:
        return in_chunks(parts, shape, chunks) if chunks else describe(parts, shape, quant_config)
    except Mismatch as error:
        wrong = error.role
        raise LoadError(
            f"{parts[wrong].file}: {group.tensors[wrong]} {error.reason} (for {group.name} {list(shape)})"
        ) from None


def wanted(whole: str, numbers: str, role: str) -> str:
    """The name of a tensor that is missing beside one with the role `numbers`."""
    suffix = {"words": ".scales", "packed": ".weight_scale", "blocks": "_scales"}.get(numbers)
    assert role == "scale", role
    return f"{whole}_scale" if suffix is None else whole.removesuffix(SUFFIXES[suffix][0]) + suffix


class Mismatch(Exception):
    """The tensor with this role is not what its matrix needs."""

    def __init__(self, role: str, entry: TensorEntry, needs: str) -> None:
        self.role, self.reason = (
            role,
            f"has shape {list(entry.shape)} and dtype {entry.dtype}, it needs {needs}",
        )


Parts = Mapping[str, TensorEntry]


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
    if weight.dtype == "I8" and weight.shape == (rows, columns // 2) and columns % GROUP == 0:
        expect(parts, "scale", [(rows, columns // GROUP)], EXPONENTS)
        return StoredFormat("MXFP4", 4, columns // GROUP, partial(read_mxfp4, "plain"), floats=True)
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
    """compressed-tensors: words along a row's columns, or bytes of MXFP4."""
    rows, columns = two(shape)
    if parts["packed"].dtype == "U8" and columns % GROUP == 0:
        expect(parts, "packed", [(rows, columns // 2)], ("U8",))
        expect(parts, "scale", [(rows, columns // GROUP)], EXPONENTS)
        return StoredFormat("MXFP4", 4, columns // GROUP, partial(read_mxfp4, "packed"), floats=True)
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
    if columns % GROUP:
        raise Mismatch("blocks", parts["blocks"], f"rows of a multiple of {GROUP} numbers")
    expect(parts, "blocks", [(*experts, rows, columns // GROUP, GROUP // 2)], ("U8",))
    expect(parts, "scale", [(*experts, rows, columns // GROUP)], EXPONENTS)
    return StoredFormat("MXFP4", 4, columns // GROUP, partial(read_mxfp4, "blocks"), floats=True)


def read_mxfp4(role: str, tensors: Mapping[str, Tensor]) -> QuantisedMatrix:
    return published.mxfp4(tensors[role].view(torch.uint8), tensors["scale"])


def two(shape: Shape) -> tuple[int, int]:
    """Returns rows and columns; for a parameter that is no matrix, a shape that nothing has."""
    return (shape[0], shape[1]) if len(shape) == 2 else (-1, -1)


# The role of the numbers → what else must be there, what may be, and the function that describes it.
FORMATS: dict[str, tuple[set[str], set[str], Callable[[Parts, Shape, QuantConfig], StoredFormat]]] = {
    "plain": ({"scale"}, {"zeros"}, float8),
    "words": ({"scale"}, {"zeros", "group_of"}, words),
    "packed": ({"scale"}, {"zeros", "group_of", "shape"}, packed),
    "blocks": ({"scale"}, set(), mxfp4),
}
