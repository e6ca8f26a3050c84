"""The compiled object that this process uses, chosen once: that of the best instruction set here, or of the one that
MTPSERVE_CPU_ISA names."""

from __future__ import annotations

import ctypes
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mtpserve_kernels.cpu.build import BuildError, InstructionSet, available, object_of

log = logging.getLogger(__name__)

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
        objects = library()
        if (function := self.bound.get(objects.isa.name)) is None:
            function = self.bound[objects.isa.name] = objects.functions[self.name]
            function.argtypes, function.restype = [*self.types, ctypes.c_int32], None
        function(*[x.data_ptr() if type(x) in TENSORS else x for x in arguments], torch.get_num_threads())


@dataclass(frozen=True, slots=True)
class Library:
    isa: InstructionSet
    functions: ctypes.CDLL


@cache
def openmp() -> None:
    """Makes the symbols of torch's OpenMP library visible to the objects, so that both use one thread pool."""
    for path in (Path(torch.__file__).parent / "lib").glob("libgomp*.so*"):
        ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)


def wanted() -> InstructionSet:
    """Raises Unavailable."""
    here, name = available(), os.environ.get("MTPSERVE_CPU_ISA", "")
    if name == NO_KERNELS:
        raise Unavailable("MTPSERVE_CPU_ISA=none")
    if name and name not in [isa.name for isa in here]:
        raise Unavailable(f"MTPSERVE_CPU_ISA={name} is not one of this machine's: {', '.join(isa.name for isa in here) or 'none'}")
    if not here:
        raise Unavailable("this CPU has none of the instruction sets that the kernels are written for")
    return next(isa for isa in here if name in ("", isa.name))


@cache
def load(isa: InstructionSet) -> Library:
    """Raises BuildError."""
    openmp()
    start = time.perf_counter()
    path = object_of(isa)
    if (seconds := time.perf_counter() - start) > 1:
        log.info("compiled the CPU kernels for %s in %.0f s: %s", isa.name, seconds, path)
    return Library(isa, ctypes.CDLL(str(path)))


in_use: list[Library] = []  # one at most


def library() -> Library:
    """Raises Unavailable."""
    if not in_use:
        try:
            in_use.append(load(wanted()))
        except (BuildError, OSError) as error:
            raise Unavailable(str(error)) from error
    return in_use[0]


@contextmanager
def using(isa: InstructionSet) -> Iterator[None]:
    """For tests: another object inside the block. What was packed for one is packed for all."""
    before = in_use[:]
    in_use[:] = [load(isa)]
    try:
        yield
    finally:
        in_use[:] = before
