"""GGUF files of tiny models, written as llama.cpp's conversion does: by gguf's own writer, names and quantisation."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind, GGUFWriter
from torch import Tensor

from tests.models.checkpoints import Tiny

ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen2_moe": "qwen2moe",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "glm4_moe": "glm4moe",
}
# Where a block has its scales, in float16, and how large they are for numbers of about 0.1. gguf cannot quantise to these types.
SCALES = {
    Kind.Q2_K: {80: 0.006, 82: 0.009},
    Kind.Q3_K: {108: 0.001},
    Kind.Q4_K: {0: 2e-4, 2: 15e-4},
    Kind.Q5_K: {0: 1e-4, 2: 15e-4},
    Kind.Q6_K: {208: 1e-4},
    Kind.IQ4_XS: {0: 1e-4},
}
REALS = {
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "routed_scaling_factor": "expert_weights_scale",
}
INTEGERS = {
    "hidden_size": "embedding_length", "intermediate_size": "feed_forward_length", "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv", "max_position_embeddings": "context_length", "num_experts": "expert_count",
    "n_routed_experts": "expert_count", "num_experts_per_tok": "expert_used_count", "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length", "n_shared_experts": "expert_shared_count",
    "first_k_dense_replace": "leading_dense_block_count", "num_nextn_predict_layers": "nextn_predict_layers",
}  # fmt: skip
TYPES = {int: gguf.GGUFValueType.UINT32, float: gguf.GGUFValueType.FLOAT32, bool: gguf.GGUFValueType.BOOL, str: gguf.GGUFValueType.STRING}


def as_gguf(tiny: Tiny, path: Path, kind: Kind = Kind.F32, *, tokenizer: Path | None = None, **entries: Any) -> Tiny:
    """The same model from a file. What is lost by quantising its matrices the model loses too. `tokenizer`: a directory with one.
    `entries`: of the metadata, with __ for dots; None omits one."""
    writer = GGUFWriter(path, ARCHITECTURES[tiny.config["model_type"]])
    metadata = described(tiny.config) | (of_tokenizer(tokenizer) if tokenizer else {})
    for key, value in (metadata | {key.replace("__", "."): value for key, value in entries.items()}).items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            writer.add_key_value(key, value, TYPES[type(value)])
    experts: dict[str, list[np.ndarray[Any, Any]]] = {}
    for name, tensor in tiny.tensors.items():
        raw = quantised(tensor, kind if tensor.dim() > 1 and "shared_expert_gate" not in name else Kind.F32)
        used = kind if raw.dtype == np.uint8 else Kind.F32
        if raw.dtype == np.uint8:
            put_back(tiny, name, torch.from_numpy(gguf.quants.dequantize(raw, kind).copy()).view(tensor.shape))
        start, dot, rest = name.partition(".experts.")
        if dot:
            experts.setdefault(f"{start}.experts.{rest.split('.')[1]}.weight", []).append(raw)
        else:
            writer.add_tensor(llama_cpp_name(tiny.config, name), paired(raw, name, tiny.config), raw_dtype=used)
    for name, matrices in experts.items():
        raw = np.stack(matrices)
        writer.add_tensor(llama_cpp_name(tiny.config, name), raw, raw_dtype=kind if raw.dtype == np.uint8 else Kind.F32)
    if (tiny.config.get("rope_scaling") or {}).get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_factors(tiny.config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return replace(tiny, directory=path)


def described(config: Mapping[str, Any]) -> dict[str, Any]:
    arch, heads = ARCHITECTURES[config["model_type"]], config["num_attention_heads"]
    dim = config.get("head_dim", config["hidden_size"] // heads)
    entries: dict[str, Any] = {INTEGERS[name]: value for name, value in config.items() if name in INTEGERS}
    entries |= {REALS[name]: float(value) for name, value in config.items() if name in REALS}
    entries |= {"attention.key_length": dim, "attention.value_length": dim}
    entries["block_count"] = config["num_hidden_layers"] + config.get("num_nextn_predict_layers", 0)
    entries["rope.dimension_count"] = int(dim * config.get("partial_rotary_factor", 1.0))
    scaling = config.get("rope_scaling") or {}
    if scaling.get("rope_type") in ("linear", "yarn"):
        entries |= {"rope.scaling.type": scaling["rope_type"], "rope.scaling.factor": scaling["factor"]}
        if "original_max_position_embeddings" in scaling:
            entries["rope.scaling.original_context_length"] = scaling["original_max_position_embeddings"]
    if "n_routed_experts" in config:
        entries["expert_weights_norm"] = config["norm_topk_prob"]
    return {f"{arch}.{key}": value for key, value in entries.items()} | {"tokenizer.ggml.eos_token_id": config["eos_token_id"]}


def of_tokenizer(directory: Path) -> dict[str, Any]:
    """A byte-level tokenizer.json's entries."""
    model = json.loads((directory / "tokenizer.json").read_text())
    config = json.loads((directory / "tokenizer_config.json").read_text())
    vocab, added = model["model"]["vocab"], {token["content"] for token in model["added_tokens"]}
    tokens = sorted(vocab, key=vocab.__getitem__)
    found = {
        "ggml.model": "gpt2",
        "ggml.pre": "gpt-2",
        "ggml.tokens": tokens,
        "ggml.token_type": [3 if token in added else 1 for token in tokens],
        "ggml.merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in model["model"]["merges"]],
        "ggml.bos_token_id": vocab[config["bos_token"]],
        "ggml.eos_token_id": vocab[config["eos_token"]],
        "ggml.add_bos_token": True,
        "chat_template": config["chat_template"],
    }
    return {f"tokenizer.{key}": value for key, value in found.items()}


def quantised(tensor: Tensor, kind: Kind) -> np.ndarray[Any, Any]:
    """[…, bytes of a row] as uint8, or float32. Where gguf cannot quantise, random blocks with scales of a sensible size."""
    values = tensor.float().numpy()
    if kind == Kind.F32:
        return values
    if kind not in SCALES:
        return np.ascontiguousarray(gguf.quants.quantize(values, kind)).view(np.uint8)
    numbers, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(tensor.numel()).integers(0, 256, (values.size // numbers, size), np.uint8)
    for at, scale in SCALES[kind].items():
        blocks[:, at : at + 2] = np.array([scale], np.float16).view(np.uint8)
    return blocks.reshape(*values.shape[:-1], -1)


def paired(raw: np.ndarray[Any, Any], name: str, config: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    """llama.cpp's order of a head's rows, of Llama's queries and keys alone: the first half and the second one by turns."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}.get(name.split(".")[-2])
    if config["model_type"] != "llama" or heads is None:
        return raw
    return np.ascontiguousarray(raw.reshape(heads, 2, -1, *raw.shape[1:]).swapaxes(1, 2).reshape(raw.shape))


def llama_cpp_name(config: Mapping[str, Any], name: str) -> str:
    arch = next(arch for arch, of in gguf.MODEL_ARCH_NAMES.items() if of == ARCHITECTURES[config["model_type"]])
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"] + 1)
    found = names.get_name(name.replace("e_score_correction_bias", "e_score_correction.bias"), try_suffixes=(".weight", ".bias"))
    assert found is not None, name
    return found


def put_back(tiny: Tiny, name: str, values: Tensor) -> None:
    """Into transformers' model, which has all experts of a layer in one tensor."""
    state = tiny.trunk.state_dict()
    start, dot, rest = name.partition(".experts.")
    if not dot:
        if name in state:  # the MTP layer's copies are not
            state[name].copy_(values)
        return
    expert, part, _ = rest.split(".")
    fused = state[f"{start}.experts.{'down_proj' if part == 'down_proj' else 'gate_up_proj'}"][int(expert)]
    (fused if part == "down_proj" else fused.chunk(2)[part == "up_proj"]).copy_(values)


def llama3_factors(config: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    scaling, dim, found = config["rope_scaling"], config["head_dim"], []
    low, high, length = (scaling[key] for key in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings"))
    for pair in range(dim // 2):
        wavelength = 2 * math.pi * config["rope_theta"] ** (2 * pair / dim)
        smooth = (length / wavelength - low) / (high - low)
        between = 1 / ((1 - smooth) / scaling["factor"] + smooth)
        found.append(1 if wavelength < length / high else scaling["factor"] if wavelength > length / low else between)
    return np.array(found, np.float32)
