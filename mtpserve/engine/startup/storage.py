"""The formats of weights, keys and values in memory: from the options, from what the checkpoint has, and from
what the device reads."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import lcm

import torch

from mtpserve.config import EngineConfig
from mtpserve.config.model import FORMATS
from mtpserve.config.options import USUAL_PAGE
from mtpserve.core.arch.model import ModelArch, tokens_of_entries
from mtpserve.core.errors import ConfigError
from mtpserve.core.gguf import SUFFIX
from mtpserve.core.protocols.linear import LinearMethod
from mtpserve.layers.decoder import Methods
from mtpserve.layers.kernels import Kernels
from mtpserve.quant.fp8 import FP8
from mtpserve.quant.registry import METHODS
from mtpserve.weights.checkpoint.checkpoint import Checkpoint
from mtpserve.weights.checkpoint.hf import quantization, quantization_section
from mtpserve.weights.checkpoint.hf_config import HFConfig
from mtpserve.weights.checkpoint.schemes import has_nvfp4
from mtpserve.weights.quantised.formats import kinds_of

log = logging.getLogger(__name__)

# From this size on a draft head is read from memory again in each pass, so that half the bytes save time:
# reasoned, not measured yet.
DRAFT_INT8_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Storage:
    keep_blocks: bool  # matrices in float8 stay so; which these are, the checkpoint says one by one
    cache: torch.dtype  # the dtype of keys and values
    int8: bool = False  # the trunk's layers, made int8 while they are loaded
    draft_int8: bool = False  # the draft model's layer, and a head of its own
    keep_int4: bool = False  # as keep_blocks, for numbers of four bits

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of weights that stay as they are stored."""
        return frozenset(kind for kind, keep in (("fp8", self.keep_blocks), ("int4", self.keep_int4)) if keep)

    def methods(self, kernels: Kernels) -> Methods:
        """Returns how the model's matrices are stored and multiplied."""
        linear_methods: dict[str, LinearMethod] = {}

        def method(name: str) -> LinearMethod:
            return linear_methods.setdefault(name, METHODS.get(name)(kernels))

        default = "stored" if self.kinds else "none"
        layers = method("int8" if self.int8 else default)
        return Methods(
            layers,
            method(default),
            method("int8") if self.draft_int8 else layers,
            method("int8") if self.draft_int8 else None,
        )


def with_format(config: EngineConfig, hf_config: HFConfig) -> EngineConfig:
    """Checks a --quantization that names the checkpoint's format, and returns `config` with auto in its
    place. Raises ConfigError where the checkpoint has another format."""
    name, directory = config.model.quantization, config.model.directory
    if name not in FORMATS:
        return config
    method = "gguf" if directory.suffix == SUFFIX else quantization(hf_config)
    stored = f"{method} NVFP4" if has_nvfp4(quantization_section(hf_config)) else method
    if not {method, stored} & set(FORMATS[name]):
        has = "weights that are not quantised" if method == "none" else f"weights in the format {stored}"
        others = (
            "; --quantization int8 rounds them on a CPU, `python -m mtpserve.weights.quantise` writes float8"
            if method == "none"
            else ""
        )
        raise ConfigError(
            f"--quantization {name}: {directory} has {has}: leave the option out, which reads them{others}"
        )
    return replace(config, model=replace(config.model, quantization="auto"))


def storage_of(
    config: EngineConfig,
    checkpoints: Iterable[Checkpoint],
    dtype: torch.dtype,
    device: torch.device,
    kernels: bool,
) -> Storage:
    """`kernels`: the layers compute with Triton's. Without, what is kept is widened by torch for each use:
    less memory, more time."""
    unreadable = kernels and not reads_float8(device)
    why = "float8 (e4m3) kernels need compute capability 8.9, and this GPU is older"
    weights, cache = config.model.quantization, config.cache.kv_cache_dtype
    tensor_kinds = {kind for checkpoint in checkpoints for kind in kinds_of(checkpoint.tensors)}
    if weights == "fp8" and "fp8" not in tensor_kinds:
        advice = "python -m mtpserve.weights.quantise writes a checkpoint that has"
        raise ConfigError(
            f"--quantization fp8: {config.model.directory} has no matrix in float8 with scales: leave the "
            f"option out; {advice}"
        )
    if weights == "int4" and "int4" not in tensor_kinds:
        formats = "AWQ, GPTQ, compressed-tensors' packed integers, MXFP4, NVFP4"
        raise ConfigError(
            f"--quantization int4: {config.model.directory} has no 4-bit matrix; known formats: {formats}"
        )
    if weights == "fp8" and unreadable:
        raise ConfigError(f"--quantization fp8: {why}; --quantization none expands the weights")
    if cache in ("fp8", "fp8_e4m3") and unreadable:
        raise ConfigError(f"--kv-cache-dtype {cache}: {why}")
    either = weights in ("auto", "fp8", "int4") and kernels
    return Storage(
        keep_blocks=weights == "fp8" or (either and "fp8" in tensor_kinds and not unreadable),
        cache={"auto": dtype, "bfloat16": torch.bfloat16}.get(cache, FP8),
        keep_int4=weights == "int4" or (either and "int4" in tensor_kinds),
    )


def int8_of(config: EngineConfig, arch: ModelArch, dtype: torch.dtype, kernels: str) -> tuple[bool, bool]:
    """Returns whether the trunk's layers are int8, and whether the draft model is. Raises ConfigError if no
    kernel multiplies int8."""
    trunk, draft = config.model.quantization == "int8", config.spec.speculative_draft_model_quantization
    for option, is_int8 in (
        ("quantization", trunk),
        ("speculative-draft-model-quantization", draft == "int8"),
    ):
        if is_int8 and kernels != "cpu":
            raise ConfigError(
                f"--{option} int8 needs the CPU kernels, and this engine uses the kernels {kernels}"
            )
    if kernels != "cpu" or draft == "none" or not arch.drafts:
        return trunk, False
    return trunk, draft == "int8" or trunk or arch.vocab * arch.hidden * dtype.itemsize >= DRAFT_INT8_BYTES


def reads_float8(device: torch.device) -> bool:
    """What Triton needs; plain torch converts float8 anywhere."""
    return (
        device.type != "cuda"
        or torch.version.hip is not None
        or torch.cuda.get_device_capability(device) >= (8, 9)
    )


def paged(config: EngineConfig, arch: ModelArch) -> EngineConfig:
    """Returns the config with a page size that the model's layers can have. Raises ConfigError if the user
    chose a size that they cannot have."""
    size, every = config.cache.page_size, tokens_of_entries(arch.layers)
    if size % every == 0:
        return config
    if size != USUAL_PAGE:
        raise ConfigError(
            f"--page-size must be a multiple of {every} for this model, whose layers store one entry "
            f"per {every} tokens, got {size}"
        )
    log.debug("pages of %d tokens: the model's layers store one entry per so many tokens", lcm(size, every))
    return replace(config, cache=replace(config.cache, page_size=lcm(size, every)))
