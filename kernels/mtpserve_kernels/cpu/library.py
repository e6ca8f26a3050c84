"""The compiled object that this process uses, chosen once: that of the best instruction set here, or of the one that
MTPSERVE_CPU_ISA names."""

from __future__ import annotations

import ctypes
import os
import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mtpserve_kernels.cpu.build import BuildError, InstructionSet, available, object_of

TENSORS = frozenset({Tensor, torch.nn.Parameter})  # isinstance() asks Tensor's metaclass, which takes as long as a small op
NO_KERNELS = "none"  # the value of MTPSERVE_CPU_ISA with which everything runs on plain torch


class Unavailable(Exception):
    """This machine cannot run the kernels; the message says why."""


class Op:
    """A C function of the object in use. `types`: ctypes of its arguments; it gets the number of torch's threads after them."""

    def __init__(self, name: str, *types: Any) -> None:
        self.name, self.types = name, types
        self.bound: dict[str, Any] = {}  # by instruction set

    def __call__(self, *arguments: Any) -> None:
        """Tensors are passed as their addresses, None as a null pointer."""
        objects = in_use[0] if in_use else library()
        if (function := self.bound.get(objects.isa.name)) is None:
            function = self.bound[objects.isa.name] = objects.functions[self.name]
            function.argtypes, function.restype = [*self.types, ctypes.c_int32], None
        function(*[x.data_ptr() if type(x) in TENSORS else x for x in arguments], torch.get_num_threads())


@dataclass(frozen=True, slots=True)
class Library:
    isa: InstructionSet
    functions: ctypes.CDLL


def openmp_of(maps: str, torch_folder: Path) -> str | None:
    """maps: /proc/self/maps → the OpenMP library that torch uses: its own where it brings one (in a wheel in `lib` or `torch.libs`),
    otherwise the first that is loaded: gcc's, or Intel's or LLVM's, which have gcc's functions too."""
    loaded = dict.fromkeys(re.findall(r"(/\S*/lib(?:gomp|iomp5|omp)\b[^/\s]*\.so\S*)$", maps, re.MULTILINE))
    own = [path for path in loaded if path.startswith((f"{torch_folder}/", f"{torch_folder}.libs/"))]
    return next(iter((*own, *loaded)), None)


@cache
def openmp() -> str | None:
    """Makes the functions of torch's OpenMP library visible to the objects, so that both use one thread pool. → its path."""
    path = openmp_of(Path("/proc/self/maps").read_text(), Path(torch.__file__).resolve().parent)
    if path is not None:
        ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
    return path


def wanted() -> InstructionSet:
    """Raises Unavailable."""
    name = os.environ.get("MTPSERVE_CPU_ISA", "")
    if name == NO_KERNELS:
        raise Unavailable("MTPSERVE_CPU_ISA=none")
    here = available()
    if name and name not in [isa.name for isa in here]:
        raise Unavailable(f"MTPSERVE_CPU_ISA={name} is not one of this machine's: {', '.join([*(isa.name for isa in here), NO_KERNELS])}")
    if not here:
        machine = f"{platform.system()} on {platform.machine()}"
        raise Unavailable(f"the kernels are written for AVX2, AVX-512 and NEON on Linux, and this is {machine} without them")
    return next(isa for isa in here if name in ("", isa.name))


@cache
def load(isa: InstructionSet) -> Library:
    """Raises BuildError, or OSError where the object cannot be loaded."""
    path = object_of(isa)
    threads = openmp()
    try:
        return Library(isa, ctypes.CDLL(str(path), mode=os.RTLD_NOW))  # a function that is missing is seen here, not when it is called
    except OSError as error:
        raise OSError(f"{error}; torch's OpenMP library: {threads or 'none was found'}") from error


in_use: list[Library] = []  # one: what was chosen, once something was called, or what `using` names


@cache
def chosen() -> Library | Unavailable:
    """Tried once: a compiler that fails is not run again."""
    try:
        return load(wanted())
    except Unavailable as reason:
        return reason
    except (BuildError, OSError) as error:
        return Unavailable(str(error))


def library() -> Library:
    """Raises Unavailable."""
    if in_use:
        return in_use[0]
    if isinstance(found := chosen(), Unavailable):
        raise found
    in_use[:] = [found]
    return found


@contextmanager
def using(isa: InstructionSet) -> Iterator[None]:
    """For tests: another object inside the block. What was packed for one is packed for all."""
    before = in_use[:]
    in_use[:] = [load(isa)]
    try:
        yield
    finally:
        in_use[:] = before
