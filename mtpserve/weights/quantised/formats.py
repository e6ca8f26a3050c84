"""The tensors of a checkpoint that together are one matrix, by their names. Their dtypes and shapes say its
format, matrix by matrix, whatever the config says: see matrix_formats.py. Reads headers only.

A family's rules know a matrix by the name that it has unquantised, X.weight (or X, where experts are one
tensor):

    role       plain     scale                zeros                numbers in words of 32 bits, or in bytes
    float8     X.weight  X.weight_scale(_inv)                      DeepSeek-V4 calls the scale X.scale
    int8       X.weight  X.weight_scale       X.weight_zero_point
    packed               X.weight_scale       X.weight_zero_point  X.weight_packed X.weight_g_idx
                                                                   X.weight_shape
    NVFP4      X.weight  X.weight_scale       X.weight_scale_2     ModelOpt's, two numbers in a byte
    NVFP4                X.weight_scale       X.weight_global_scale                X.weight_packed
    GPTQ, AWQ            X.scales             X.qzeros             X.qweight       X.g_idx
    MXFP4                X_scales                                  X_blocks
    MXFP4      X.weight  X.scale                                   DeepSeek-V4, two in an int8
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from mtpserve.core.errors import LoadError
from mtpserve.weights.checkpoint.checkpoint import Checkpoint
from mtpserve.weights.checkpoint.schemes import QuantConfig
from mtpserve.weights.checkpoint.tensor_entry import TensorEntry
from mtpserve.weights.quantised.matrix_formats import FORMATS, Mismatch, Shape, StoredFormat, in_chunks

# What a name ends in → what the matrix's own name ends in, and the tensor's role.
SUFFIXES = {
    ".qweight": (".weight", "words"),
    ".scales": (".weight", "scale"),
    ".qzeros": (".weight", "zeros"),
    ".g_idx": (".weight", "group_of"),
    ".weight_packed": (".weight", "packed"),
    ".weight_scale": (".weight", "scale"),
    ".weight_scale_2": (".weight", "factor"),
    ".weight_global_scale": (".weight", "divisor"),
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
    r"(?:input|activation)_(?:(?:global_)?scale(?:_ub)?|zero_point)": FIXED,
    r"(?:q|prob|prob_output)_(?:scale|zero_point)": "attention's queries and weights are not quantised",
    r"k_(?:scale|zero_point)": f"keys {OF_CACHE}",
    r"v_(?:scale|zero_point)": f"values {OF_CACHE}",
    r"(?:kv|output)_(?:scale|zero_point)|kv_cache_scaling_factor": f"keys and values {OF_CACHE}",
    r"rotary_emb\.\w+|rope\.freqs": "the rotation is computed",
}
Entries = Mapping[str, TensorEntry]


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


def kinds_of(tensors: Entries) -> set[str]:
    """Returns the checkpoint's formats that some product reads; not for all matrices, perhaps."""
    float8 = any(  # NVFP4's scales are float8, too
        entry.dtype == "F8_E4M3" and not name.endswith(".weight_scale") for name, entry in tensors.items()
    )
    four = any(
        name.endswith((".qweight", ".weight_packed", "_blocks")) and entry.dtype in ("I32", "U8")
        for name, entry in tensors.items()
    )
    halves = (name for name, entry in tensors.items() if entry.dtype == "I8" and name.endswith(".weight"))
    four = four or any(name.removesuffix("weight") + "scale" in tensors for name in halves)
    four = four or any(name.endswith(".weight_scale_2") for name in tensors)
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
