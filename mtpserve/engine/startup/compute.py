"""What a model computes with: device, number format, and the kernels of layers and attention."""

from __future__ import annotations

import os
from importlib import import_module
from typing import cast

import torch
from mtpserve_kernels.cpu.library import Unavailable, library
from mtpserve_kernels.recurrent.reference import recur as reference_recur

from mtpserve.attention.recurrent import Recur
from mtpserve.config import EngineConfig
from mtpserve.config.options import check
from mtpserve.core.arch.model import ModelArch
from mtpserve.core.errors import ConfigError

# modules with the kernel of recurrent layers, by backend, imported only where they run
RECUR: dict[str, str] = {
    "cpu": "mtpserve_kernels.cpu.recurrent",
    "triton": "mtpserve_kernels.recurrent.delta",
}


def recur_of(backend: str) -> Recur:
    """The kernel of recurrent layers."""
    name = RECUR.get(backend)
    recur: Recur = reference_recur if name is None else import_module(name).recur
    return recur


def device_of(config: EngineConfig) -> torch.device:
    """The process's own: engine/startup/threads has chosen it among several. Raises ConfigError."""
    name, there = config.model.device, torch.cuda.device_count()
    if name == "cuda" and not there:
        raise ConfigError("--device cuda: PyTorch finds no GPU")
    if name == "cpu" or not there:
        return torch.device("cpu")
    ranks = config.parallel.ranks
    check(ranks <= there, "tensor_parallel_size", ranks, f"at most {there}, one rank for each GPU")
    engines = config.parallel.data_parallel_size
    check(
        device_number(config) < there,
        "data_parallel_size",
        engines,
        f"at most {there // ranks}, one engine for each {gpus(ranks)}",
    )
    return torch.device("cuda")


def gpus(count: int) -> str:
    return "GPU" if count == 1 else f"{count} GPUs"


def device_number(config: EngineConfig) -> int:
    """Returns the number of the process's GPU."""
    return config.replica * config.parallel.ranks + config.rank


def dtype_of(config: EngineConfig, arch: ModelArch, device: torch.device) -> torch.dtype:
    """The CPU's kernels read bfloat16 weights on any CPU; plain torch emulates such products where there are
    no bfloat16 units, and is then faster in float32."""
    if config.model.dtype != "auto":
        return cast(torch.dtype, getattr(torch, config.model.dtype))
    if device.type == "cpu" and (
        arch.dtype == "float16" or not (backend_of(config, device) == "cpu" or has_bfloat16_units())
    ):
        return torch.float32
    return cast(torch.dtype, getattr(torch, arch.dtype))


def backend_of(config: EngineConfig, device: torch.device) -> str:
    """A name in attention/registry. Raises ConfigError for one that cannot run here."""
    name = config.model.attention_backend
    if name == "triton" and device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ConfigError(
            "--attention-backend triton needs a GPU; on a CPU set TRITON_INTERPRET=1, for tests: it "
            "is very slow"
        )
    if name == "cpu" and (why := why_not_cpu(config, device)) is not None:
        raise ConfigError(f"--attention-backend cpu: {why}")
    if name != "auto":
        return name
    if device.type == "cuda":
        return "triton"
    return "cpu" if why_not_cpu(config, device) is None else "reference"


def why_not_cpu(config: EngineConfig, device: torch.device) -> str | None:
    """Returns why the CPU's kernels are not used; None: nothing speaks against them."""
    if device.type != "cpu":
        return f"the device is {device.type}"
    if config.model.dtype == "float16":
        return "float16 is computed in plain torch"
    if config.model.quantization == "int4":
        return "numbers of four bits are widened in plain torch"
    if config.model.quantization == "fp8" or config.cache.kv_cache_dtype.startswith("fp8"):
        return "float8 is computed in plain torch"
    try:
        library()
    except Unavailable as error:
        return str(error)
    return None


def compiles(config: EngineConfig) -> bool:
    """True if kernels are compiled for sizes when they first meet them: not in C++, in plain torch, nor
    interpreted."""
    return backend_of(config, device_of(config)) == "triton" and os.environ.get("TRITON_INTERPRET") != "1"


def kernels_of(config: EngineConfig, device: torch.device) -> str:
    """What the layers compute with: a name in layers/kernels."""
    backend = backend_of(config, device)
    if backend == "cpu":
        return "cpu"
    if config.spec.exact:
        return "exact"
    return "triton" if backend == "triton" else "torch"


def is_exact(config: EngineConfig) -> bool:
    """True if a row's numbers depend on that row alone, to the last bit."""
    return config.spec.exact or backend_of(config, device_of(config)) == "cpu"


def described(config: EngineConfig, device: torch.device) -> str:
    """Describes the kernels for people. Identical output is promised on one instruction set."""
    kernels = kernels_of(config, device)
    if kernels == "cpu":
        return f"cpu, {library().isa.name}"
    why = (
        why_not_cpu(config, device)
        if device.type == "cpu" and kernels == "torch" and config.model.attention_backend == "auto"
        else None
    )
    return kernels if why is None else f"{kernels} ({why})"


def has_bfloat16_units() -> bool:
    # private, but there is no public question
    probes = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(bool(getattr(torch.cpu, probe, bool)()) for probe in probes)
