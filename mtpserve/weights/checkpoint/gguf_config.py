"""A GGUF file's metadata as the config.json from which the file was made; errors name the file's own keys."""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any

from mtpserve.core.errors import LoadError, UnsupportedModel
from mtpserve.core.gguf import GGUFHeader, GGUFTensor
from mtpserve.weights.checkpoint.gguf_layouts import DEFAULTS, LAYOUTS, ROPE_FACTORS, GGUFLayout
from mtpserve.weights.checkpoint.hf_config import HFConfig

F32, F16 = 0, 1  # GGUF's numbers of types
REALS, BOOLS = ("rms_norm_eps", "routed_scaling_factor"), ("norm_topk_prob",)
ENDS = ("eos", "eot", "eom")  # tokens that end a text, a turn, a message
# What changes a model's arithmetic in ways that no family here computes, unless it is zero.
FOREIGN = (
    "attention.sliding_window", "attention.scale", "attention.clamp_kqv", "attention.max_alibi_bias",
    "attention.temperature_scale",
    "attn_logit_softcapping", "final_logit_softcapping", "logit_scale", "residual_scale", "embedding_scale",
    "use_parallel_residual",
    "rope.scaling.attn_factor", "rope.scaling.yarn_log_multiplier", "rope.scaling.yarn_attn_factor",
    "expert_group_count",
)  # fmt: skip
# where they are one
NEUTRAL = ("rope.scaling.attn_factor", "rope.scaling.yarn_attn_factor", "expert_group_count")
# in all that Meta has published
LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def layout_of(header: GGUFHeader) -> GGUFLayout:
    """Raises UnsupportedModel, or LoadError where the file does not say."""
    name = header.get("general.architecture", str)
    if name not in LAYOUTS:
        raise UnsupportedModel(
            f'{header.path}: general.architecture = "{name}" is not supported; supported: '
            f"{', '.join(LAYOUTS)}"
        )
    if (parts := header.get("split.count", int, 1)) > 1:
        raise UnsupportedModel(
            f"{header.path}: is one of {parts} parts; `llama-gguf-split --merge` makes one file of them"
        )
    return LAYOUTS[name]


def gguf_config(path: Path) -> HFConfig:
    """Reads the header. Raises LoadError and UnsupportedModel."""
    header = GGUFHeader.read(path)
    layout, start = layout_of(header), header.get("general.architecture", str) + "."
    _refuse(header, start, layout)
    values: dict[str, Any] = {"architectures": [layout.architecture], **layout.set}
    for name, key in layout.keys.items():
        kind: Any = float if name in REALS else bool if name in BOOLS else int
        default = {"default": DEFAULTS[name]} if name in DEFAULTS else {}
        values[name] = shortest(header.get(start + key, kind, **default))
    values["num_hidden_layers"] -= values.get("num_nextn_predict_layers", 0)
    heads, hidden = values["num_attention_heads"], values["hidden_size"]
    values["num_key_value_heads"] = header.get(start + "attention.head_count_kv", int, heads)
    values["head_dim"] = head_dim = header.get(start + "attention.key_length", int, hidden // max(heads, 1))
    if head_dim < 2:
        raise LoadError(f"{path}: {start}attention.key_length must be at least 2, got {head_dim}")
    tensors = {tensor.name: tensor for tensor in header.tensors}
    values |= {
        "vocab_size": _rows(header, tensors, "token_embd.weight"),
        "tie_word_embeddings": "output.weight" not in tensors,
        "eos_token_id": list(dict.fromkeys(header.get(key, int) for key in _ends(header))),
        "dtype": _dtype(header),
        **_rope(header, start, layout, head_dim, tensors),
    }
    bias = "blk.0.attn_q.bias" in tensors
    values |= {"attention_bias": bias, "qkv_bias": bias, "use_qk_norm": "blk.0.attn_q_norm.weight" in tensors}
    return HFConfig(path, values)


def shortest(value: Any) -> Any:
    """A number in 32 bits, 9.99999975e-06, as it was written before: 1e-05."""
    return float(f"{value:.7g}") if isinstance(value, float) else value


def _refuse(header: GGUFHeader, start: str, layout: GGUFLayout) -> None:
    foreign = [*FOREIGN, *(() if "expert_count" in layout.keys.values() else ("expert_count",))]
    for key in foreign:
        value = header.metadata.get(start + key)
        if value and not (value == 1 and key in NEUTRAL):
            raise UnsupportedModel(
                f"{header.path}: {start}{key} = {value} is not supported; supported: none, or 0"
            )
    if (values := header.metadata.get(start + "attention.value_length")) != (
        keys := header.metadata.get(start + "attention.key_length")
    ):
        raise UnsupportedModel(
            f"{header.path}: {start}attention.value_length = {values} is not supported; supported: "
            f"key_length = {keys}"
        )


def _rows(header: GGUFHeader, tensors: dict[str, GGUFTensor], name: str) -> int:
    if name not in tensors:
        raise LoadError(f"{header.path}: {name} is missing")
    return tensors[name].shape[0]


def _ends(header: GGUFHeader) -> list[str]:
    keys = [f"tokenizer.ggml.{end}_token_id" for end in ENDS]
    return [key for key in keys if header.has(key)] or keys[:1]  # the first is then missed by name


def _dtype(header: GGUFHeader) -> str:
    """Returns the dtype of matrices in 32 or 16 bits. Quantised ones have fewer bits than bfloat16, from
    which most were made."""
    kinds = {tensor.kind for tensor in header.tensors if len(tensor.shape) > 1}
    return "float32" if kinds == {F32} else "float16" if kinds <= {F32, F16} else "bfloat16"


def _rope(
    header: GGUFHeader, start: str, layout: GGUFLayout, dim: int, tensors: dict[str, GGUFTensor]
) -> dict[str, Any]:
    """`rope_theta`, `partial_rotary_factor`, and `rope_scaling` where there is one."""
    theta = shortest(header.get(start + "rope.freq_base", float, 10000.0))
    if not 0 < theta < math.inf:
        raise LoadError(f"{header.path}: {start}rope.freq_base must be a number above 0, got {theta}")
    rotated = header.get(start + "rope.dimension_count", int, dim)
    if layout.paired and rotated != dim:
        raise UnsupportedModel(
            f"{header.path}: {start}rope.dimension_count = {rotated} is not supported; supported: "
            f"{dim}, a whole head"
        )
    values: dict[str, Any] = {"rope_theta": theta, "partial_rotary_factor": rotated / dim}
    kind = header.get(start + "rope.scaling.type", str, "linear")  # as llama.cpp reads it
    factor = header.get(
        start + "rope.scaling.factor", float, header.get(start + "rope.scale_linear", float, 0.0)
    )
    if ROPE_FACTORS in tensors:
        return values | {"rope_scaling": _llama3(header, theta, rotated, tensors[ROPE_FACTORS])}
    if kind == "none" or not factor:
        return values
    if kind not in ("linear", "yarn"):
        raise UnsupportedModel(
            f'{header.path}: {start}rope.scaling.type = "{kind}" is not supported; supported: none, '
            f"linear, yarn"
        )
    scaling: dict[str, Any] = {"rope_type": kind, "factor": shortest(factor)}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = header.get(
            start + "rope.scaling.original_context_length", int
        )
        for name in ("beta_fast", "beta_slow"):
            if header.has(key := f"{start}rope.scaling.yarn_{name}"):
                scaling[name] = shortest(header.get(key, float))
    return values | {"rope_scaling": scaling}


def _llama3(header: GGUFHeader, theta: float, dim: int, tensor: GGUFTensor) -> dict[str, Any]:
    """The file has a factor for each frequency instead of the numbers that they were computed from, which are
    the same in all of Meta's models but for one. Raises UnsupportedModel where they give other factors."""
    pairs = dim // 2
    if tensor.kind != F32 or tensor.shape != (pairs,) or not pairs or tensor.start + 4 * pairs > header.size:
        raise LoadError(f"{header.path}: {tensor.name} must be {pairs} numbers in float32")
    with header.path.open("rb") as file:
        file.seek(tensor.start)
        factors = struct.unpack(f"<{pairs}f", file.read(4 * pairs))
    scaling = {"rope_type": "llama3", "factor": shortest(max(factors)), **LLAMA3}
    wavelengths = [2 * math.pi * theta ** (2 * pair / dim) for pair in range(pairs)]
    matches = (
        math.isclose(factor, llama3_factor(wave, scaling), rel_tol=1e-3)
        for factor, wave in zip(factors, wavelengths, strict=True)
    )
    if not (min(factors) > 0 and all(matches)):
        constants = ", ".join(f"{name} = {value:g}" for name, value in LLAMA3.items())
        raise UnsupportedModel(
            f"{header.path}: {tensor.name} is not supported; supported: the factors of Llama 3's "
            f"scaling with {constants}"
        )
    return scaling


def llama3_factor(wavelength: float, scaling: dict[str, Any]) -> float:
    """Returns the divisor of a frequency: https://github.com/meta-llama/llama-models, apply_scaling."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    share = (scaling["original_max_position_embeddings"] / wavelength - low) / (high - low)
    share = min(max(share, 0.0), 1.0)
    divisor: float = (1 - share) / scaling["factor"] + share
    return 1 / divisor
