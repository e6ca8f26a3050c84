"""Kernels compiled before they are needed, in many processes and without a GPU: a compile takes about a second, and a captured step needs
dozens, tuning a thousand.

Triton is told that an H100 is there. It compiles into its cache (TRITON_CACHE_DIR), where a process that launches the same kernel with
the same constants finds it, on this machine or on another one with the same versions.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpu_kit.candidates import Tile, tiles_of
from gpu_kit.environment import compilations
from gpu_kit.launches import launch_hook
from gpu_kit.models import Cell, DeviceConfig
from gpu_kit.steps import first_line
from gpu_kit.untuned_workloads import UntunedWorkload
from gpu_kit.workloads import PRODUCTS, Workload, is_prompt

TARGET = ("cuda", 90, 32)
TILES_OF_JOB = 6
LAUNCHERS: set[str] = set()  # hashes of the kernels that this process has built launchers for


Job = tuple[Callable[..., "CompileCounts"], tuple[Any, ...]]


class CompileOnlyDriver:
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

    named = {name: as_pointer(value) for name, value in kwargs.items()}
    build_launcher(original(kernel, *map(as_pointer, args), grid=grid, warmup=True, **named))


def build_launcher(kernel: Any) -> None:
    """Up to Triton 3.6 a C compiler makes a launcher for each signature when a kernel first runs, for a third of a second: into the cache,
    too. Loading it here may fail, for want of CUDA's driver."""
    from triton.backends.nvidia.driver import CudaLauncher

    if kernel.hash not in LAUNCHERS:
        LAUNCHERS.add(kernel.hash)
        with suppress(Exception):
            CudaLauncher(kernel.src, kernel.metadata)


def stub_driver(folder: Path) -> None:
    """A library of the name of CUDA's driver whose functions fail, for the processes that start afterwards on a machine without it: what
    is linked with it can be built, and loaded."""
    import triton.backends.nvidia as nvidia

    sources = [path.read_text() for path in Path(nvidia.__file__).parent.glob("driver.*")]
    names = sorted({name for source in sources for name in re.findall(r"\b(cu[A-Z]\w*)\s*\(", source)})
    code = "".join(f"int {name}(void) {{ return 999; }}\n" for name in names)
    command = [os.environ.get("CC", "cc"), "-shared", "-fPIC", "-x", "c", "-", "-o", str(folder / "libcuda.so.1")]
    if shutil.which(command[0]) and subprocess.run(command, input=code, text=True, capture_output=True, check=False).returncode == 0:
        os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
        os.environ["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, (str(folder), os.environ.get("LD_LIBRARY_PATH"))))


def use_compile_only_driver() -> None:
    """For the rest of the process."""
    from triton.backends.nvidia.driver import CudaUtils
    from triton.runtime import driver

    os.environ.pop("TRITON_INTERPRET", None)
    with suppress(Exception):  # a C module, as the launchers are
        CudaUtils()
    driver.set_active(CompileOnlyDriver())


@dataclass(frozen=True, slots=True)
class CompileCounts:
    """What jobs found compiled and what they compiled; `failures`: a sentence for each that failed."""

    hits: int = 0
    misses: int = 0
    failures: tuple[str, ...] = ()

    def __add__(self, other: CompileCounts) -> CompileCounts:
        return CompileCounts(self.hits + other.hits, self.misses + other.misses, (*self.failures, *other.failures))


def compile_call(run: Callable[[], object], op: str, label: str, tiles: Sequence[Tile | None]) -> CompileCounts:
    """With each of these tilings; None: the default of its wrapper."""
    from mtpserve_kernels import tuned

    from gpu_kit.launch_counter import fake

    use_compile_only_driver()
    failures = list[str]()
    with compilations() as count:
        for tile in tiles:
            override: AbstractContextManager[Any] = nullcontext() if tile is None else tuned.override(op, tile)
            try:
                with fake(), override, launch_hook(compile_launch):
                    run()
            except Exception as error:
                failures.append(f"{label}, {op} {tile}: {type(error).__name__}: {first_line(error)}")
    return CompileCounts(count.hits, count.misses, tuple(failures[:1]))


def compile_workload(workload: Workload, tiles: Sequence[Tile | None]) -> CompileCounts:
    from gpu_kit.launch_counter import CPU

    return compile_call(lambda: workload.call(DeviceConfig(CPU, toy=False)).run(0), workload.op, workload.label, tiles)


def compile_untuned(workload: UntunedWorkload) -> CompileCounts:
    from gpu_kit.launch_counter import CPU

    return compile_call(lambda: workload.call(DeviceConfig(CPU, toy=False))[0](0), workload.op, str(workload.rows), [None])


def compile_ceilings() -> CompileCounts:
    from gpu_kit.ceilings import launch_kernels
    from gpu_kit.launch_counter import CPU

    return compile_call(lambda: launch_kernels(CPU), "ceilings", "ceilings", [None])


def compile_cell(cell: Cell) -> CompileCounts:
    """All kernels of a step."""
    from triton.runtime.jit import JITFunction

    from gpu_kit.launch_counter import CPU, launches_of

    use_compile_only_driver()
    original, failures = JITFunction.run, tuple[str, ...]()

    def observe(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        compile_launch(original, kernel, args, (1,), kwargs)

    with compilations() as count:
        try:
            launches_of(DeviceConfig(CPU, toy=False), cell, observe)
        except Exception as error:
            failures = (f"{cell}: {type(error).__name__}: {first_line(error)}",)
    return CompileCounts(count.hits, count.misses, failures)


def kernel_class(workload: Workload) -> tuple[Any, ...]:
    """Equal for workloads with the same kernels; those of attention differ in whether there are splits, and who adds them up, and those of
    mixtures among many rows in what a program has of them."""
    if workload.kind == "grouped" or (workload.kind == "router" and workload.rows > 16):
        return workload.op, workload.kind, workload.rows, workload.sizes
    rows = min(max(16, 1 << (workload.rows - 1).bit_length()), 64)
    if workload.kind == "router":  # eight rows are chosen together, or sixteen
        return workload.op, workload.kind, workload.rows <= 8, workload.sizes
    if workload.kind in ("norm", "rope"):
        return workload.op, workload.kind, workload.sizes
    if workload.kind in PRODUCTS:  # for any numbers of outputs and inputs
        return workload.op, workload.kind, rows if workload.rows > 2 else workload.rows
    return workload.op, workload.kind, workload.rows if workload.kind == "span" else rows, workload.sizes


def distinct_kernels(workloads: Iterable[Workload]) -> list[tuple[Workload, list[Tile | None]]]:
    """One workload for all that have the same kernels, with some of their tilings, the default first: jobs of a few seconds each."""
    distinct = dict[tuple[Any, ...], Workload]()
    tiles = defaultdict[tuple[Any, ...], dict[tuple[Any, ...], Tile | None]](dict)
    for workload in workloads:
        key = kernel_class(workload)
        distinct.setdefault(key, workload)
        default: list[Tile | None] = [{"splits": 1}, {"splits": 2}] if workload.kind in PRODUCTS else [None]
        for tile in default if is_prompt(workload) else [*default, *tiles_of(workload)]:
            tiles[key].setdefault(constants_of(workload, tile), tile)
    lists = {key: list(some.values()) for key, some in tiles.items()}
    return [(distinct[key], lists[key][i : i + TILES_OF_JOB]) for key in distinct for i in range(0, len(lists[key]), TILES_OF_JOB)]


def constants_of(workload: Workload, tile: Tile | None) -> tuple[Any, ...]:
    """Equal for tilings with the same kernels: those of products know only whether there are splits."""
    if tile is None:
        return ()
    if workload.kind in PRODUCTS:
        tile = tile | {"splits": min(tile["splits"], 2)}
    return tuple(sorted(tile.items()))


def cell_jobs(cells: Iterable[Cell]) -> list[Job]:
    return [(compile_cell, (cell,)) for cell in cells]


def workload_jobs(workloads: Iterable[Workload], untuned: Iterable[UntunedWorkload]) -> list[Job]:
    jobs: list[Job] = [(compile_workload, job) for job in distinct_kernels(workloads)]
    return [*jobs, *((compile_untuned, (workload,)) for workload in untuned)]


def compile_ahead(jobs: Iterable[Job], processes: int, seconds: float, probes: int = 0) -> CompileCounts:
    """Fills the cache for so long. Stops where none of the first jobs finds anything to compile; `probes`: how many, 0: never."""
    pool, end = ProcessPoolExecutor(processes, mp_context=get_context("spawn")), time.perf_counter() + seconds
    try:
        total = CompileCounts()
        futures = [pool.submit(function, *arguments) for function, arguments in jobs]
        for number, future in enumerate(futures, 1):
            total += future.result(max(end - time.perf_counter(), 0.0))
            if number == probes and not total.misses and not total.failures:
                return total
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
