"""Kernels compiled before they are needed, in many processes and without a GPU: a compile takes about a second, and a captured step needs
dozens, tuning a thousand.

Triton is told that an H100 is there. It compiles into its cache (TRITON_CACHE_DIR), where a process that launches the same kernel with
the same constants finds it, on this machine or on another one with the same versions.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import torch
from torch import Tensor

from gpu_kit.candidates import Tile, tiles_of
from gpu_kit.environment import compilations
from gpu_kit.launches import launches_are
from gpu_kit.models import Cell, Place
from gpu_kit.steps import first_line
from gpu_kit.works import Work

TARGET = ("cuda", 90, 32)


class CompileOnly:
    """As much of Triton's driver as compiling needs."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget(*TARGET)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class Pointer:
    """A tensor as the compiler sees it: its type, and whether its address is a multiple of 16."""

    dtype: torch.dtype
    address: int

    def data_ptr(self) -> int:
        return self.address

    def ptr_range(self) -> int:
        return 0

    @classmethod
    def of(cls, tensor: Tensor) -> Pointer:
        return cls(tensor.dtype, int(tensor.storage_offset() * tensor.itemsize))


def compile_launch(original: Any, kernel: Any, args: tuple[Any, ...], grid: Any, kwargs: dict[str, Any]) -> None:
    def as_pointer(value: Any) -> Any:
        return Pointer.of(value) if isinstance(value, Tensor) else value

    original(kernel, *map(as_pointer, args), grid=grid, warmup=True, **{name: as_pointer(value) for name, value in kwargs.items()})


def only_compiling() -> None:
    """For the rest of the process."""
    from triton.runtime import driver

    os.environ.pop("TRITON_INTERPRET", None)
    driver.set_active(CompileOnly())


@dataclass(frozen=True, slots=True)
class CompileCounts:
    """What jobs found compiled and what they compiled; `failures`: a sentence for each that failed."""

    hits: int = 0
    misses: int = 0
    failures: tuple[str, ...] = ()

    def __add__(self, other: CompileCounts) -> CompileCounts:
        return CompileCounts(self.hits + other.hits, self.misses + other.misses, (*self.failures, *other.failures))


def compile_work(work: Work, tiles: list[Tile]) -> CompileCounts:
    """With the kernel's own tiling and each of these."""
    from mtpserve_kernels import tuned

    from gpu_kit.paper import CPU, fake

    only_compiling()
    failures = list[str]()
    with compilations() as count:
        for tile in (None, *tiles):
            override: AbstractContextManager[Any] = nullcontext() if tile is None else tuned.override(work.op, tile)
            try:
                with fake(), override, launches_are(compile_launch):
                    work.call(Place(CPU, toy=False)).run(0)
            except Exception as error:
                failures.append(f"{work.label}, {work.op} {tile}: {type(error).__name__}: {first_line(error)}")
    return CompileCounts(count.hits, count.misses, tuple(failures[:1]))


def compile_cell(cell: Cell) -> CompileCounts:
    """All kernels of a step."""
    from triton.runtime.jit import JITFunction

    from gpu_kit.paper import CPU, launches_of

    only_compiling()
    original, failures = JITFunction.run, tuple[str, ...]()
    with compilations() as count:
        try:
            launches_of(Place(CPU, toy=False), cell, lambda kernel, args, kwargs: compile_launch(original, kernel, args, (1,), kwargs))
        except Exception as error:
            failures = (f"{cell}: {type(error).__name__}: {first_line(error)}",)
    return CompileCounts(count.hits, count.misses, failures)


def distinct_kernels(works: Iterable[Work]) -> list[tuple[Work, list[Tile]]]:
    """One work for all that have the same kernels, with the tilings of all of them."""
    groups: dict[tuple[Any, ...], tuple[Work, dict[str, Tile]]] = {}
    for work in works:
        rows = min(max(16, 1 << (work.rows - 1).bit_length()), 64)
        key = work.op, work.kind, *((work.sizes[0], work.sizes[2:]) if work.kind == "span" else (rows, work.sizes))
        tiles = groups.setdefault(key, (work, {}))[1]
        tiles |= {str(tile): tile for tile in tiles_of(work)}
    return [(work, list(tiles.values())) for work, tiles in groups.values()]


def compile_ahead(cells: Iterable[Cell], works: Iterable[Work], processes: int, seconds: float) -> CompileCounts:
    """Fills the cache for so long."""
    pool, end = ProcessPoolExecutor(processes, mp_context=get_context("spawn")), time.perf_counter() + seconds
    try:
        total = CompileCounts()
        jobs = [pool.submit(compile_cell, cell) for cell in cells]
        jobs += [pool.submit(compile_work, work, tiles) for work, tiles in distinct_kernels(works)]
        for job in jobs:
            total += job.result(max(end - time.perf_counter(), 0.0))
        return total
    except TimeoutError:
        return total + CompileCounts(failures=(f"kernels are still to be compiled after {seconds:.0f} s",))
    except BrokenProcessPool as error:
        return total + CompileCounts(failures=(f"compiling ahead: a process died: {first_line(error)}",))
    finally:
        # Those that run would go on for minutes beside what is measured next.
        for process in list((pool._processes or {}).values()):
            process.terminate()
        pool.shutdown(wait=False, cancel_futures=True)
