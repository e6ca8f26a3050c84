"""The formats of weights, keys and values in memory: from the options, from what the checkpoint has, and from what the device reads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from mtpserve.config import EngineConfig
from mtpserve.core.errors import ConfigError
from mtpserve.quant.fp8 import FP8, SCALE
from mtpserve.weights.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class Storage:
    keep_blocks: bool  # matrices with block scales stay in float8; which these are, the checkpoint says one by one
    cache: torch.dtype  # of keys and values


def storage_of(config: EngineConfig, checkpoints: Iterable[Checkpoint], dtype: torch.dtype, device: torch.device, kernels: bool) -> Storage:
    """`kernels`: the layers compute with them. Without, float8 is widened by torch for each use, which saves memory and costs time."""
    unreadable = kernels and not reads_float8(device)
    why = "the kernels read float8 (e4m3) from compute capability 8.9 on, and this GPU is older"
    weights, cache = config.model.quantization, config.cache.kv_cache_dtype
    stored = any(name.endswith(SCALE) for checkpoint in checkpoints for name in checkpoint.tensors)
    if weights == "fp8" and not stored:
        made = "python -m mtpserve.weights.quantise writes a checkpoint that has"
        raise ConfigError(f"--quantization fp8: {config.model.directory} has no matrix in float8 with block scales; {made}")
    if weights == "fp8" and unreadable:
        raise ConfigError(f"--quantization fp8: {why}; with none the weights are expanded")
    if cache in ("fp8", "fp8_e4m3") and unreadable:
        raise ConfigError(f"--kv-cache-dtype {cache}: {why}")
    keep = weights == "fp8" or (weights == "auto" and stored and kernels and not unreadable)
    return Storage(keep, {"auto": dtype, "bfloat16": torch.bfloat16}.get(cache, FP8))


def reads_float8(device: torch.device) -> bool:
    """What Triton needs; plain torch converts float8 anywhere."""
    return device.type != "cuda" or torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 9)
