"""What a bug report needs of the machine: versions, devices, compiler, kernels; and what is probably wrong
with it."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import torch
from mtpserve_kernels.cpu import build
from mtpserve_kernels.cpu.library import Unavailable, library

from mtpserve import __version__
from mtpserve.engine.startup.threads import allowed

PACKAGES = ("torch", "triton", "transformers", "tokenizers", "safetensors", "llguidance", "numpy")
PREFIXES = ("MTPSERVE_", "TRITON_", "CUDA_", "HIP_", "HF_", "OMP_", "NCCL_", "TORCH_")
SECRETS = ("TOKEN", "KEY", "SECRET", "PASSWORD")
NVIDIA_SMI_TIMEOUT_S = 20
OLDEST_CAPABILITY = (8, 0)  # of an NVIDIA GPU whose kernels are compiled by the tests
GIB = 2**30

Facts = dict[str, str]


def environment() -> Facts:
    """Reads nothing from the network. Values are for people."""
    return {
        "mtpserve": __version__,
        "python": f"{platform.python_version()} on {platform.platform()}",
        **{name: version for name in PACKAGES if (version := version_of(name)) is not None},
        **processor(),
        **cpu_kernels(),
        **gpus(),
        **variables(),
    }


def version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def lines_of(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def number_of_cores() -> int:
    """Returns how many cores the process may use."""
    cores = allowed()
    return os.cpu_count() or 1 if cores is None else len(cores)


def processor() -> Facts:
    models = [
        line.partition(":")[2].strip()
        for line in lines_of("/proc/cpuinfo")
        if line.startswith(("model name", "Model"))
    ]
    memory = {
        name: int(size.split()[0]) * 1024
        for name, _, size in (line.partition(":") for line in lines_of("/proc/meminfo"))
        if name in ("MemTotal", "MemAvailable")
    }
    facts = {
        "cpu": models[0] if models else platform.processor() or platform.machine(),
        "cores": f"{number_of_cores()}, torch computes with {torch.get_num_threads()} threads",
    }
    if memory:
        total, free = memory.get("MemTotal", 0), memory.get("MemAvailable", 0)
        facts["memory"] = f"{total / GIB:.1f} GiB, {free / GIB:.1f} GiB of it free"
    return facts


def cpu_kernels() -> Facts:
    names = [isa.name for isa in build.available()]
    return {"instruction sets": ", ".join(names) or "none that has kernels", "cpu kernels": cpu_object()}


def cpu_object() -> str:
    try:
        objects = library()
    except Unavailable as error:
        return f"not used: {error}"
    origin = "from the package" if (build.PACKAGED / object_name(objects.isa)).exists() else "compiled here"
    return f"{objects.isa.name}, {origin}"


def object_name(isa: build.InstructionSet) -> str:
    return f"{isa.name}-{build.source_hash(isa)}.so"


def gpus() -> Facts:
    runtime = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    if not torch.cuda.is_available():
        return {
            "gpu": "torch finds none" if torch.version.cuda or torch.version.hip else "torch is a CPU build"
        }
    facts = {"gpu runtime": runtime}
    if (driver := nvidia_driver()) is not None:
        facts["gpu driver"] = driver
    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        free, total = torch.cuda.mem_get_info(number)
        facts[f"gpu {number}"] = (
            f"{properties.name}, {architecture(number)}, {properties.multi_processor_count} processors, "
            f"{total / GIB:.1f} GiB, {free / GIB:.1f} GiB of it free"
        )
    return facts


def architecture(number: int) -> str:
    """Returns the compiler's name of a GPU's architecture: sm_90, gfx942."""
    properties = torch.cuda.get_device_properties(number)
    return str(getattr(properties, "gcnArchName", "")) or f"sm_{properties.major}{properties.minor}"


def nvidia_driver() -> str | None:
    """None: nvidia-smi is not there or does not answer."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(
            command, capture_output=True, text=True, check=True, timeout=NVIDIA_SMI_TIMEOUT_S
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.splitlines()[0].strip() if answer.stdout.strip() else None


def variables() -> Facts:
    """Environment variables that change what runs. The values of secrets are hidden."""
    return {
        name: "(hidden)" if any(word in name for word in SECRETS) else value
        for name, value in sorted(os.environ.items())
        if name.startswith(PREFIXES)
    }


def warnings_of(facts: Facts) -> Iterator[str]:
    """What costs speed or keeps a device from being used, with the way out."""
    if facts.get("gpu", "").startswith("torch") and shutil.which("nvidia-smi"):
        yield (
            f"nvidia-smi is here, but torch {torch.__version__} finds no GPU: install a CUDA build of torch "
            "(https://pytorch.org/get-started/locally)"
        )
    if torch.cuda.is_available() and "triton" not in facts:
        yield "Triton is missing, so the GPU's kernels cannot run: pip install triton"
    if torch.cuda.is_available() and torch.version.cuda:
        for number in range(torch.cuda.device_count()):
            if torch.cuda.get_device_capability(number) < OLDEST_CAPABILITY:
                yield f"gpu {number} is {architecture(number)}: the kernels are tested from sm_80 on"
    if facts["cpu kernels"].startswith("not used") and not torch.cuda.is_available():
        yield (
            f"the CPU's kernels are {facts['cpu kernels']}. Everything runs on plain torch, which is several "
            "times slower"
        )
    if (load := os.getloadavg()[0]) > number_of_cores() / 2:
        yield (
            f"other processes keep {load:.1f} of {number_of_cores()} cores busy: measurements mean little now"
        )
