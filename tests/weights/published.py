"""Matrices in the layouts in which quantised checkpoints are published, written with numpy as the tools that publish them do it, and
what they are worth, by the formulas of their papers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # AutoAWQ's packing: which of eight outputs comes first, second, … in a word
Written = tuple[dict[str, Tensor], Tensor]  # tensors by the ends of their names; what the matrix is worth, float32
Writer = Callable[[Tensor], Written]


def words(values: np.ndarray[Any, Any], bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """[R, C] → int32 [R, C * bits / 32], padded with zeros"""
    per = 32 // bits
    padded = np.pad(values, ((0, 0), (0, -values.shape[1] % per))).astype(np.uint32)
    made = np.zeros((len(padded), padded.shape[1] // per), np.uint32)
    for place in range(per):
        made |= padded[:, (order[place] if order else place) :: per] << np.uint32(bits * place)
    return torch.from_numpy(made.view(np.int32))


def integers(matrix: Tensor, bits: int, group_of: np.ndarray[Any, Any], symmetric: bool) -> tuple[np.ndarray[Any, Any], ...]:
    """Whole numbers [N, K] from 0 on, scales [N, groups] float16, zeros [N, groups]; what they are worth."""
    wide, most = matrix.float().numpy(), 2**bits - 1
    number = group_of.max() + 1
    low = np.stack([np.minimum(wide[:, group_of == g].min(1), 0) for g in range(number)], 1)
    high = np.stack([np.maximum(wide[:, group_of == g].max(1), 0) for g in range(number)], 1)
    if symmetric:
        high = np.maximum(-low, high)
        low = -high
    scales = np.maximum((high - low) / most, 1e-4).astype(np.float16)
    zeros = np.full(low.shape, 2 ** (bits - 1)) if symmetric else np.clip(np.round(-low / scales.astype(np.float32)), 1, most)
    s, z = scales.astype(np.float32)[:, group_of], zeros[:, group_of]
    numbers = np.clip(np.round(wide / s) + z, 0, most)
    return numbers.astype(np.int64), scales, zeros.astype(np.int64), ((numbers - z) * s).astype(np.float32)


def in_groups(columns: int, group: int) -> np.ndarray[Any, Any]:
    return np.arange(columns) // (group if group > 0 else columns)


def gptq(matrix: Tensor, bits: int = 4, group: int = 32, symmetric: bool = True, below: int = 1, act_order: bool = False) -> Written:
    """AutoGPTQ's and GPTQModel's; `below` is 0 in gptq_v2."""
    group_of = in_groups(matrix.shape[1], group)
    if act_order:
        group_of = np.random.default_rng(matrix.shape[1]).permutation(group_of)
    numbers, scales, zeros, wide = integers(matrix, bits, group_of, symmetric)
    return {
        ".qweight": words(numbers, bits).T.contiguous(),
        ".qzeros": words(zeros.T - below, bits),
        ".scales": torch.from_numpy(scales).T.contiguous(),
        ".g_idx": torch.from_numpy(group_of.astype(np.int32)),
    }, torch.from_numpy(wide)


def awq(matrix: Tensor, group: int = 32) -> Written:
    numbers, scales, zeros, wide = integers(matrix, 4, in_groups(matrix.shape[1], group), symmetric=False)
    return {
        ".qweight": words(numbers.T, 4, AWQ_ORDER),
        ".qzeros": words(zeros.T, 4, AWQ_ORDER),
        ".scales": torch.from_numpy(scales).T.contiguous(),
    }, torch.from_numpy(wide)


def packed(matrix: Tensor, bits: int = 4, group: int = 32, symmetric: bool = True, act_order: bool = False) -> Written:
    """compressed-tensors' pack-quantized; a group of -1 is a whole row."""
    group_of = in_groups(matrix.shape[1], group)
    if act_order:
        group_of = np.random.default_rng(matrix.shape[1]).permutation(group_of)
    numbers, scales, zeros, wide = integers(matrix, bits, group_of, symmetric)
    found = {
        ".weight_packed": words(numbers, bits),
        ".weight_scale": torch.from_numpy(scales),
        ".weight_shape": torch.tensor(matrix.shape),
    }
    if not symmetric:
        found[".weight_zero_point"] = words(zeros.T, bits).T.contiguous()
    if act_order:
        found[".weight_g_idx"] = torch.from_numpy(group_of.astype(np.int32))
    return found, torch.from_numpy(wide)


def float8(
    matrix: Tensor, by: str = "tensor", suffix: str = ".weight_scale", static: bool = False, dtype: torch.dtype = torch.float32
) -> Written:  # fmt: skip
    """`by` tensor, row, block (of 128 x 128) or group (of 32); `static`: with a scale of the inputs."""
    rows, columns = matrix.shape
    scale = torch.empty(rows, columns)
    sizes = {"tensor": (rows, columns), "row": (1, columns), "block": (128, 128), "group": (1, 32)}[by]
    for i in range(0, rows, sizes[0]):
        for j in range(0, columns, sizes[1]):
            part = slice(i, i + sizes[0]), slice(j, j + sizes[1])
            scale[part] = (matrix[part].abs().max() / 448).to(dtype)
    numbers = (matrix / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    kept = scale[:: sizes[0], :: sizes[1]].to(dtype).contiguous()
    found = {".weight": numbers, suffix: kept.reshape(()) if by == "tensor" else kept}
    if static:
        found[".input_scale"] = torch.tensor(0.02)
    return found, numbers.float() * scale


def mxfp8(matrix: Tensor) -> Written:
    """Exponents of groups of 32 for numbers of float8."""
    groups = matrix.unflatten(1, (-1, 32))
    exponent = (groups.abs().amax(-1) / 448).log2().ceil().clamp(-127, 127)
    numbers = (groups / exponent.exp2().unsqueeze(-1)).to(torch.float8_e4m3fn)
    wide = (numbers.float() * exponent.exp2().unsqueeze(-1)).flatten(1)
    return {".weight": numbers.flatten(1), ".weight_scale": (exponent + 127).byte()}, wide


def int8(matrix: Tensor) -> Written:
    """compressed-tensors' int-quantized: W8A8."""
    scale = matrix.abs().amax(1, keepdim=True) / 127
    numbers = (matrix / scale).round().to(torch.int8)
    return {".weight": numbers, ".weight_scale": scale}, numbers * scale


E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6)


def mxfp4(matrix: Tensor) -> Written:
    """compressed-tensors' mxfp4-pack-quantized: bytes of two numbers, exponents of groups of 32."""
    groups = matrix.double().unflatten(1, (-1, 32))
    exponent = (groups.abs().amax(-1) / 6).log2().ceil().clamp(-127, 127)
    values = torch.tensor(E2M1, dtype=torch.float64)
    numbers = (groups / exponent.exp2().unsqueeze(-1)).unsqueeze(-1).sub(values).abs().argmin(-1)
    wide = (values[numbers] * exponent.exp2().unsqueeze(-1)).flatten(1).float()
    flat = numbers.flatten(1)
    return {
        ".weight_packed": (flat[:, ::2] + 16 * flat[:, 1::2]).byte(),
        ".weight_scale": (exponent + 127).byte(),
    }, wide


def nvfp4(matrix: Tensor, modelopt: bool = True) -> Written:
    """Bytes of two numbers, float8 scales of groups of 16, and a scale of the matrix: ModelOpt's, which is multiplied, or the reciprocal of
    compressed-tensors'. Both tools write a scale of the inputs, too."""
    second = torch.tensor(float(matrix.abs().max()) / (448 * 6))
    groups = matrix.unflatten(1, (-1, 16))
    scale = (groups.abs().amax(-1) / 6 / second).clamp(2**-9, 448).to(torch.float8_e4m3fn)
    values = torch.tensor(E2M1)
    numbers = (groups / (scale.float() * second).unsqueeze(-1)).unsqueeze(-1).sub(values).abs().argmin(-1)
    flat, inputs = numbers.flatten(1), torch.tensor([0.01])
    halves = (flat[:, ::2] + 16 * flat[:, 1::2]).byte()
    if modelopt:
        found = {".weight": halves, ".weight_scale": scale, ".weight_scale_2": second, ".input_scale": inputs[0]}
    else:
        found = {".weight_packed": halves, ".weight_scale": scale, ".input_global_scale": 1 / inputs}
        found[".weight_global_scale"] = divisor = (1 / second).reshape(1)
        second = 1 / divisor
    return found, (values[numbers] * scale.float().unsqueeze(-1)).flatten(1) * second


COMPRESSED: dict[str, Any] = {"quant_method": "compressed-tensors", "quantization_status": "compressed", "ignore": ["lm_head"]}


def scheme(form: str, bits: int, kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    """compressed-tensors' part of a config.json."""
    weights = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False} | more
    return COMPRESSED | {"format": form, "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}


GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True, "checkpoint_format": "gptq"}
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
MODELOPT: dict[str, Any] = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}

# What a checkpoint's config.json says, and how its matrices are written.
LAYOUTS: dict[str, tuple[dict[str, Any], Writer]] = {
    "float8 per tensor": (scheme("float-quantized", 8, "float", "tensor"), partial(float8, static=True)),
    "float8 per channel": (scheme("float-quantized", 8, "float", "channel"), partial(float8, by="row", dtype=torch.bfloat16)),
    "float8 in blocks": (scheme("float-quantized", 8, "float", "block", block_structure=[128, 128]), partial(float8, by="block")),
    "float8 in groups": (scheme("float-quantized", 8, "float", "group", group_size=32), partial(float8, by="group")),
    "fp8 without blocks": ({"quant_method": "fp8", "activation_scheme": "static"}, partial(float8, suffix=".weight_scale_inv")),
    "ModelOpt": (MODELOPT, partial(float8, static=True)),
    "MXFP8": (MODELOPT | {"quant_algo": "MXFP8"}, mxfp8),
    "int8": (scheme("int-quantized", 8, "int", "channel"), int8),
    "AWQ": (AWQ, awq),
    "GPTQ": (GPTQ, gptq),
    "GPTQ, zeros": (GPTQ | {"sym": False}, partial(gptq, symmetric=False)),
    "GPTQ, second version": (GPTQ | {"sym": False, "checkpoint_format": "gptq_v2"}, partial(gptq, symmetric=False, below=0)),
    "GPTQ in act order": (GPTQ | {"desc_act": True}, partial(gptq, act_order=True)),
    "GPTQ, one group": (GPTQ | {"group_size": -1}, partial(gptq, group=-1)),
    "GPTQ, 8 bits": (GPTQ | {"bits": 8}, partial(gptq, bits=8)),
    "packed": (scheme("pack-quantized", 4, "int", "group", group_size=32), packed),
    "packed, zeros": (scheme("pack-quantized", 4, "int", "group", symmetric=False), partial(packed, symmetric=False)),
    "packed per channel": (scheme("pack-quantized", 4, "int", "channel"), partial(packed, group=-1)),
    "packed, 8 bits": (scheme("pack-quantized", 8, "int", "group"), partial(packed, bits=8)),
    "packed in act order": (scheme("pack-quantized", 4, "int", "group", actorder="group"), partial(packed, act_order=True)),
    "MXFP4": (scheme("mxfp4-pack-quantized", 4, "float", "group", group_size=32), mxfp4),
    "NVFP4": (MODELOPT | {"quant_algo": "NVFP4", "group_size": 16}, nvfp4),
    "NVFP4, packed": (scheme("nvfp4-pack-quantized", 4, "float", "tensor_group", group_size=16), partial(nvfp4, modelopt=False)),
}  # fmt: skip


def converted(tensors: Mapping[str, Tensor], chosen: Callable[[str], bool], writer: Writer) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """A checkpoint's tensors, with the chosen matrices X.weight quantised → (those, the same with what the matrices are worth)."""
    quantised: dict[str, Tensor] = {}
    worth: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if not chosen(name):
            quantised[name] = worth[name] = tensor
            continue
        found, worth[name] = writer(tensor.float())
        quantised |= {name.removesuffix(".weight") + end: part.contiguous() for end, part in found.items()}
    return quantised, worth


def write(directory: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(dict(config)))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    return directory
